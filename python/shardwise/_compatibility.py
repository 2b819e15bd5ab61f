"""Refuses a Python or a torch that this build of shardwise cannot run with, before the extension is loaded."""

from __future__ import annotations

import importlib
import itertools
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_FOLDER = Path(__file__).parent
_REBUILD = f"{sys.executable} -m pip install --no-build-isolation . (in shardwise's source folder)"


def find_problem() -> str | None:
    """Why this build cannot run here; None if it can. Loads the extension only if everything else fits."""
    return _build_problem() or _torch_problem() or _load_problem()


def _build_problem() -> str | None:
    if not (_FOLDER / "_build_info.py").exists():
        return f"shardwise: the package in {_FOLDER} is not built. Build it: {_REBUILD}"
    if not any((_FOLDER / f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        others = ", ".join(sorted(path.name for path in _FOLDER.glob("_C*.so"))) or "none"
        return (
            f"shardwise: there is no extension module for this Python, {sys.version.split()[0]} at {sys.executable} "
            f"(found in {_FOLDER}: {others}). Use the Python that shardwise was built for, or build it for this one: "
            f"{_REBUILD}"
        )
    return None


def _torch_problem() -> str | None:
    from shardwise import _build_info

    built_minor = _minor(_build_info.TORCH_VERSION)
    built = f"shardwise {_build_info.VERSION} was built against torch {_build_info.TORCH_VERSION}"
    install = f"Install torch {built_minor}: {sys.executable} -m pip install 'torch=={built_minor}.*'"
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"shardwise: {built}, but torch cannot be imported by {sys.executable}: {error}. {install}"
    folder = Path(torch.__file__).parent
    version = str(torch.__version__)
    found = _minor(version)
    if found != built_minor:
        keep = f"take shardwise's wheel for torch {found}, {_build_info.VERSION}+torch{found}, or build one: {_REBUILD}"
        return (
            f"shardwise: {built}, but torch {version} was found in {folder}. The minor versions must agree, since "
            f"torch's C++ interface changes between them. {install}"
            + (f" - or, to keep this torch, {keep}" if found in _build_info.TORCH_MINORS else "")
        )
    return None


def _load_problem() -> str | None:
    try:
        importlib.import_module("shardwise._C")
    except ImportError as error:
        return f"shardwise: the extension module could not be loaded: {error}. Build it again: {_REBUILD}"
    return None


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def is_program() -> bool:
    """Whether this is the start of `python -m shardwise`."""
    starting = sys.argv[:1] == ["-m"]
    return starting and ("-m", "shardwise") in itertools.pairwise(sys.orig_argv)
