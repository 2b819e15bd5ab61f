"""Calls shardwise.install() when torch.distributed.fsdp is imported: shardwise_install.pth asks for it at the start of
Python where SHARDWISE_INSTALL is set. Imports neither torch nor shardwise before that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# The second imports the first, and wants torch's own names from it.
_WATCHED = ("torch.distributed.fsdp", "torch.distributed._composable.replicate_with_fsdp")


class _Finder:
    """Finds the watched modules as the others would, and is told when they are there."""

    def __init__(self) -> None:
        self._under_way = 0

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _WATCHED:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in finders if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            self._under_way += 1
            try:
                execute(module)
            finally:
                self._under_way -= 1
            if self._under_way == 0 and self in sys.meta_path and module.__name__ in _WATCHED:
                stop()
                _install()

        loader.exec_module = exec_module


_finder = _Finder()


def start() -> None:
    """From now on an import of torch.distributed.fsdp is followed by shardwise.install()."""
    if _WATCHED[0] in sys.modules:
        _install()
    elif _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def stop() -> None:
    """Nothing follows any more."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def _install() -> None:
    try:
        import shardwise

        shardwise.install()
    except Exception as error:
        said = " ".join(str(error).split())
        print(f"shardwise: SHARDWISE_INSTALL is set, but torch's own functions stay: {said}", file=sys.stderr)
    else:
        _tell()


def _tell() -> None:
    """One line for a program: from its first rank, and not from the processes that this one starts."""
    # Both are there already: a Python that starts is not to import them.
    import multiprocessing

    from shardwise._install import NAMES

    if os.environ.get("RANK", "0") in ("", "0") and multiprocessing.current_process().name == "MainProcess":
        names = ", ".join(NAMES)
        print(f"shardwise: as SHARDWISE_INSTALL says, these are shardwise's, not torch's: {names}", file=sys.stderr)
