"""install(): makes imports of torch's fully_shard() and replicate() get ours."""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType
from typing import Any

from shardwise._local_switch import set_local_optimizers

_FSDP = ("FSDPModule", "fully_shard", "register_fsdp_forward_method")

#: The modules of torch that programs import these from; not torch.distributed._composable.replicate, which is DDP.
PLACES: dict[str, tuple[str, ...]] = {
    "torch.distributed.fsdp": (*_FSDP, "share_comm_ctx"),
    "torch.distributed.fsdp._fully_shard": (*_FSDP, "share_comm_ctx"),
    "torch.distributed.fsdp._fully_shard._fully_shard": (*_FSDP, "share_comm_ctx"),
    "torch.distributed._composable.fsdp": _FSDP,
    "torch.distributed._composable.fsdp.fully_shard": _FSDP,
    "torch.distributed._composable.replicate_with_fsdp": ("FSDPModule", "ReplicateModule", "replicate"),
}

_OURS = {
    "FSDPModule": "shardwise._isinstance_shims",
    "ReplicateModule": "shardwise._isinstance_shims",
    "fully_shard": "shardwise._fully_shard",
    "register_fsdp_forward_method": "shardwise._module_classes",
    "replicate": "shardwise._replicate",
    "share_comm_ctx": "shardwise._module_classes",
}

#: The names that are replaced.
NAMES = tuple(_OURS)

#: The modules in which ours are installed, with the class that each had before.
_installed: dict[ModuleType, type] = {}


def install() -> None:
    """Replaces torch's fully_shard(), replicate() and the names that belong to them by ours in this process.

    Call it before any module imports them by name: modules that have done so already keep torch's, and a warning names
    them. Torch's optimizers then step on shards, as after set_local_optimizers(True). A second call does nothing.

    With SHARDWISE_INSTALL=1 in the environment, an installed shardwise does this by itself.

    >>> shardwise.install()
    >>> from torch.distributed.fsdp import fully_shard  # is shardwise.fully_shard
    """
    _stop_waiting()
    if _installed:
        return
    set_local_optimizers(True)
    modules = {name: importlib.import_module(name) for name in PLACES}
    for name, module in modules.items():
        _installed[module] = type(module)
        # The class is replaced, not the module's dictionary, because torch's own functions look each other up there.
        module.__class__ = _class_of(module, PLACES[name])
    if holders := _holders():
        warnings.warn(
            f"shardwise.install(): these modules imported torch's by name before, and keep it: {'; '.join(holders)}. "
            "Call install() before they are imported, or set SHARDWISE_INSTALL=1.",
            stacklevel=2,
        )


def uninstall() -> None:
    """Restores torch's functions, and the steps of its optimizers. Modules that imported ours by name keep them.

    >>> shardwise.uninstall()
    """
    _stop_waiting()
    set_local_optimizers(False)
    while _installed:
        module, kind = _installed.popitem()
        module.__class__ = kind
    theirs = {id(_ours(name)): _torchs(name) for name in _OURS if _OURS[name] in sys.modules}
    for name, namespace in _namespaces():
        if _is_torchs(name):
            namespace.update({key: theirs[id(value)] for key, value in list(namespace.items()) if id(value) in theirs})


def _stop_waiting() -> None:
    """Stops the SHARDWISE_INSTALL hook: a program that calls install() or uninstall() decides for itself."""
    if hook := sys.modules.get("_shardwise_install"):
        hook.stop()


class _Ours:
    """A name in one of torch's modules. Reading it gives ours, as long as the module itself still has torch's."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: ModuleType | None, owner: type) -> Any:
        if module is None:
            return self
        torchs = _torchs(self._name)
        shown = vars(module).get(self._name, torchs)
        return _ours(self._name) if shown is torchs else shown

    # If a program writes back what it read here, as mock.patch() does, torch's is restored.
    def __set__(self, module: ModuleType, value: Any) -> None:
        is_ours = _OURS[self._name] in sys.modules and value is _ours(self._name)
        vars(module)[self._name] = _torchs(self._name) if is_ours else value

    def __delete__(self, module: ModuleType) -> None:
        del vars(module)[self._name]


def _class_of(module: ModuleType, names: tuple[str, ...]) -> type:
    base = type(module)
    # Without this, a module of another class could not be pickled by reference.
    reduce = {"__reduce__": lambda self: (importlib.import_module, (self.__name__,))}
    return type(base.__name__, (base,), reduce | {name: _Ours(name) for name in names})


# Both are imported on demand, because install() may run in the middle of their own imports.
def _ours(name: str) -> Any:
    return getattr(importlib.import_module(_OURS[name]), name)


def _torchs(name: str) -> Any:
    return importlib.import_module("shardwise._torch_api").ALL[name]


def _holders() -> list[str]:
    theirs = {id(_torchs(name)): name for name in _OURS}
    found = []
    for name, namespace in _namespaces():
        held = sorted({theirs[id(value)] for value in list(namespace.values()) if id(value) in theirs})
        if held and not _is_torchs(name) and name.partition(".")[0] != "shardwise":
            found.append(f"{name} ({', '.join(held)})")
    return sorted(found)


def _namespaces() -> list[tuple[str, dict[str, Any]]]:
    """The namespaces of all modules, each under its first name."""
    first = {id(module): (name, module) for name, module in reversed(list(sys.modules.items()))}
    return [(name, vars(module)) for name, module in first.values() if isinstance(module, ModuleType)]


def _is_torchs(name: str) -> bool:
    return name.partition(".")[0] == "torch"
