"""What shardwise finds on this machine: versions, back ends, devices, and what works, with a remedy for what does not.

>>> print(examine().text())
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardwise import _abilities
from shardwise._abilities import LAUNCH, Ability, compiler, tool

_FOLDER = Path(__file__).parent
_OTHERS = (
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "SHARDWISE_INSTALL",
    "SHARDWISE_SHARED_MEMORY",
    "SHARDWISE_TRANSPORT",
)


@dataclass(frozen=True)
class Report:
    """Facts by section, and the abilities."""

    facts: dict[str, dict[str, str]]
    abilities: list[Ability]

    @property
    def usable(self) -> bool:
        return all(ability.works for ability in self.abilities if ability.needed)

    def text(self) -> str:
        lines = []
        for section, facts in self.facts.items():
            lines += [section, *(f"  {name:<20} {value}" for name, value in facts.items())]
        lines.append("what works here")
        for ability in self.abilities:
            lines.append(f"  {ability.answer:<4}{ability.name}")
            if not ability.works:
                lines += [f"        why:    {ability.reason}", f"        remedy: {ability.remedy}"]
        return "\n".join(lines)

    def json(self) -> str:
        abilities = [{**dataclasses.asdict(ability), "works": ability.works} for ability in self.abilities]
        return json.dumps({"usable": self.usable, **self.facts, "abilities": abilities}, indent=2)


def examine() -> Report:
    """Looks at this process's Python, torch, machine and environment. Starts no process group."""
    facts = {
        "versions": _versions(),
        "back ends": _back_ends(),
        "devices": _devices(),
        "environment": _environment(),
    }
    return Report(facts, _abilities.examine())


def _ask(question: Callable[[], object]) -> str:
    """The answer as text for the report; also if asking fails, whatever the state of torch."""
    try:
        return str(question())
    except Exception as error:
        return f"unknown ({type(error).__name__}: {error})"


def _versions() -> dict[str, str]:
    def built(name: str) -> object:
        from shardwise import _build_info

        return getattr(_build_info, name)

    def torch_version() -> str:
        import torch

        return f"{torch.__version__} in {Path(torch.__file__).parent}"

    return {
        "shardwise": f"{_ask(lambda: built('VERSION'))} in {_FOLDER}",
        "built against torch": _ask(lambda: built("TORCH_VERSION")),
        "torch": _ask(torch_version),
        "Python": f"{platform.python_version()} at {sys.executable}",
        "system": platform.platform(),
        "C++ compiler": _ask(lambda: _first_line(compiler(), "--version")),
        "CMake": _ask(lambda: _first_line(tool("cmake"), "--version")),
    }


def _back_ends() -> dict[str, str]:
    def gloo() -> str:
        import torch.distributed as dist

        return "in torch" if dist.is_gloo_available() else "not in torch"

    def nccl() -> str:
        import torch
        import torch.distributed as dist

        if not dist.is_nccl_available():
            return "not in torch"
        from shardwise import _build_info

        shardwise = f"shardwise was built {'with' if _build_info.WITH_NCCL else 'without'} it"
        loaded = ctypes.c_int()
        try:
            ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(loaded))
        except OSError:
            version = ".".join(map(str, torch.cuda.nccl.version()))
            return f"{version}, with which torch was built; {shardwise}"
        return f"{loaded.value // 10000}.{loaded.value // 100 % 100}.{loaded.value % 100}; {shardwise}"

    return {"Gloo": _ask(gloo), "NCCL": _ask(nccl), "gathers and sums": _transport()}


def _transport() -> str:
    """What units use for CPU tensors, whatever back end the program's own process group has."""
    if os.environ.get("SHARDWISE_TRANSPORT") == "gloo":
        return "of CPU tensors over Gloo, as SHARDWISE_TRANSPORT=gloo says"
    way = "over TCP" if os.environ.get("SHARDWISE_SHARED_MEMORY") == "off" else "shared memory on one host, else TCP"
    return f"of CPU tensors over shardwise's transport ({way})"


def _devices() -> dict[str, str]:
    def cpu() -> str:
        import torch

        cores = len(os.sched_getaffinity(0))
        return f"{cores} cores for this process; torch computes with {torch.get_num_threads()} threads"

    def gpus() -> dict[str, str]:
        import torch

        found = {}
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            found[f"cuda:{index}"] = f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"
        return found or {"GPU": "none"}

    try:
        return {"CPU": _ask(cpu), **gpus()}
    except Exception as error:
        return {"CPU": _ask(cpu), "GPU": f"unknown ({type(error).__name__}: {error})"}


def _environment() -> dict[str, str]:
    others = {name: os.environ[name] for name in _OTHERS if os.environ.get(name)}
    return {**{name: os.environ.get(name) or "not set" for name in LAUNCH}, **others}


def _first_line(command: str | None, option: str) -> str:
    if command is None:
        return "none"
    return subprocess.run([command, option], capture_output=True, text=True, check=True).stdout.splitlines()[0]
