"""Recognizes C++ modules that torch::python::bind_module exposes to Python."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.cpp import ModuleWrapper

from shardwise import _C

#: The base class of every bound class.
_CppModule: type = torch._C.cpp.nn.Module  # type: ignore[attr-defined]


def is_cpp(module: object) -> bool:
    """Whether it is a C++ module, or the nn.Module around one."""
    return isinstance(module, (ModuleWrapper, _CppModule))


def inner(module: object) -> Any:
    """The C++ module itself."""
    if not is_cpp(module):
        raise TypeError(
            f"shardwise: expected a C++ module bound with torch::python::bind_module, not {module!r:.200}. For Python "
            "modules use torch's own functions."
        )
    return module.cpp_module if isinstance(module, ModuleWrapper) else module


def takes(module: Any) -> bool:
    """Whether a call with this argument is for C++ modules: a C++ module, or a list with at least one."""
    return is_cpp(module) or (isinstance(module, (list, tuple)) and any(map(is_cpp, module)))


def refuse_without_unit(roots: Iterable[nn.Module], ignored: set[nn.Parameter], function: str) -> None:
    """Raises ValueError for a parameter of a C++ module below `roots` that neither has a unit nor is ignored."""
    for root in roots:
        outermost = ""
        for name, module in root.named_modules():
            if not is_cpp(module):
                continue
            if not outermost or not name.startswith(f"{outermost}."):
                outermost = name
            for own, parameter in module._parameters.items():
                if _C.has_unit(parameter) or parameter in ignored:
                    continue
                raise ValueError(
                    f"shardwise: {function}(): '{outermost}' is a C++ module, and its parameter '{name}.{own}' has no "
                    f"unit: {function}() of a Python module does not wrap C++ modules inside it. Call {function}() on "
                    "the C++ module first, or name its parameters in ignored_params."
                )
