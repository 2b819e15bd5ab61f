"""Prints what the Python that runs it can be used for: its version, and which of suitable, complete, torch apply.

suitable: shardwise supports the version. complete: it can make a .venv and an extension module. torch: it has a torch
of the supported minor version. This file must also run on Pythons that are too old for shardwise.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import sysconfig

HERE = os.path.dirname(os.path.abspath(__file__))
OLDEST, NEWEST = (3, 10), (3, 12)


def supported_torch() -> str:
    """The minor version of torch in requirements.txt, such as 2.11."""
    with open(os.path.join(HERE, "requirements.txt")) as file:
        return str(re.findall(r"^torch==(\d+\.\d+)\.", file.read(), re.MULTILINE)[0])


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
    if OLDEST <= sys.version_info[:2] <= NEWEST:
        words.append("suitable")
        if not missing_parts():
            words.append("complete")
        if found_torch().startswith(supported_torch() + "."):
            words.append("torch")
    print(" ".join(words))


if __name__ == "__main__":
    main()
