"""Which modules are C++ modules that torch::python::bind_module made known to Python."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.cpp import ModuleWrapper

#: What every bound class is below.
_CppModule: type = torch._C.cpp.nn.Module  # type: ignore[attr-defined]


def is_cpp(module: object) -> bool:
    """Whether it is a C++ module, or the nn.Module around one."""
    return isinstance(module, (ModuleWrapper, _CppModule))


def inner(module: object) -> Any:
    """The C++ module itself."""
    if not is_cpp(module):
        raise TypeError(
            f"shardwise: expected a C++ module that torch::python::bind_module made known, and got {module!r:.200}. "
            "For modules of Python there are torch's own functions."
        )
    return module.cpp_module if isinstance(module, ModuleWrapper) else module


def takes(module: Any) -> bool:
    """Whether a call with this argument is for C++ modules; a list is when one of its modules is."""
    return is_cpp(module) or (isinstance(module, (list, tuple)) and any(map(is_cpp, module)))
