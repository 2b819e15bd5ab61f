"""Where our engine's ranks train: SHARDWISE_TEST_DEVICE, which is `cpu`, `late` (test/late_device) or `cuda`.

Ranks are processes. Each has a late device of its own; a GPU they share. The direct transport carries their tensors.
Models and data have the values that they have on the CPU. The late device computes with the CPU's kernels, so there the
bits are those of the CPU, where torch's engine stays.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / (os.environ.get("SHARDWISE_BUILD_DIR") or "build/dev") / "test" / "cpp"
DEVICE = os.environ.get("SHARDWISE_TEST_DEVICE") or "cpu"
#: Where torch's engine is.
TORCHS = "cpu" if DEVICE == "late" else DEVICE
#: Of the default process group.
BACKEND = "gloo" if DEVICE == "cpu" else f"cpu:gloo,{DEVICE}:shardwise"


def bound(name: str = "bound_late") -> Any:
    """An extension module; `make test` builds it."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)


def install_late() -> None:
    """For a process that has not used any device yet, and may be forked later."""
    late = bound()
    late.install()
    torch.utils.rename_privateuse1_backend("late")
    # What torch asks such a module for.
    module = ModuleType("torch.late")
    for name in ("device_count", "current_device", "set_device", "synchronize"):
        setattr(module, name, getattr(late, name))
    module.is_available = module.is_initialized = lambda: True  # type: ignore[attr-defined]
    module._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
    module.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]  # type: ignore[attr-defined]
    torch._register_device_module("late", module)


if DEVICE == "late":
    install_late()


class Checked:
    """A function of ranks, after which the late device has nothing to say."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        result = self.function(*args)
        faults = bound().take_faults()
        assert not faults, "\n".join(faults)
        return result


class _OnDevice(TorchFunctionMode):
    """What is made without a word of where is made on the CPU, with its random numbers, and moved."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _device_constructors() and (kwargs or {}).get("device") is None:
            return made.to(DEVICE)
        return made


@contextmanager
def data_on(device: str) -> Iterator[None]:
    """Tensors that a program makes meanwhile are on this device."""
    if device == "cpu":
        yield
        return
    with _OnDevice():
        yield
