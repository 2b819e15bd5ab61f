"""Prints what the Python that runs it can be used for: its version, and which of free-threaded, suitable, complete,
torch apply.

suitable: shardwise supports the version. complete: it can make a .venv and an extension module. torch: it has a torch
of a supported minor version. This file must also run on Pythons that are too old for shardwise.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import sysconfig

HERE = os.path.dirname(os.path.abspath(__file__))
OLDEST = (3, 10)


def torch_versions() -> list[str]:
    """One of each supported minor version of torch, such as 2.11.0, the newest last."""
    with open(os.path.join(HERE, "..", "cmake", "torch_versions.txt")) as file:
        return re.findall(r"^\d+\.\d+\.\d+$", file.read(), re.MULTILINE)


def is_supported(torch: str) -> bool:
    """Whether this version of torch is one that shardwise works with, or the one that TORCH asks for."""
    wanted = os.environ.get("TORCH", "")
    if wanted:
        return torch.partition("+")[0] == wanted
    return minor(torch) in [minor(version) for version in torch_versions()]


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def torch_folder() -> str:
    """The folder of this Python's torch, found without importing it; empty if there is none."""
    import importlib.util

    found = importlib.util.find_spec("torch")
    return (found.submodule_search_locations or [""])[0] if found else ""


def found_torch() -> str:
    """The version of this Python's torch; empty if there is none."""
    version_file = os.path.join(torch_folder(), "version.py")
    if not os.path.isabs(version_file) or not os.path.exists(version_file):
        return ""
    with open(version_file) as file:
        versions = re.findall(r"^__version__ = ['\"]([^'\"]+)", file.read(), re.MULTILINE)
    return versions[0] if versions else ""


def missing_parts() -> list[str]:
    """What this Python lacks to make a .venv ("venv") and an extension module ("dev")."""
    missing = []
    try:
        importlib.import_module("venv")
        importlib.import_module("ensurepip")
    except ImportError:
        missing.append("venv")
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        missing.append("dev")
    return missing


def main() -> None:
    words = ["{}.{}".format(*sys.version_info)]
    # Without the lock that torch's own code in Python relies on, torch has other packages, and we have none.
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        words.append("free-threaded")
    elif sys.version_info[:2] >= OLDEST:
        words.append("suitable")
        if not missing_parts():
            words.append("complete")
        if is_supported(found_torch()):
            words.append("torch")
    print(" ".join(words))


if __name__ == "__main__":
    main()
