"""Copies of the package in states that import and doctor must explain, beside a torch that is not the real one."""

from __future__ import annotations

import shutil
import subprocess
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from checkout import PACKAGES, python

from shardwise import _build_info

PACKAGE = PACKAGES / "shardwise"
BUILT_MINOR = ".".join(_build_info.TORCH_VERSION.split(".")[:2])


class BrokenPackage:
    """A folder with a package shardwise, and with a torch if one is given. Its extension module is an empty file."""

    def __init__(self, folder: Path, *, built: bool = True, suffix: str = EXTENSION_SUFFIXES[0]):
        self.folder = folder
        self.package = folder / "shardwise"
        self.package.mkdir()
        for source in PACKAGE.glob("*.py"):
            if source.name != "_build_info.py":
                shutil.copy(source, self.package)
        (self.package / f"_C{suffix}").touch()
        if built:
            (self.package / "_build_info.py").write_text(
                f'VERSION = "0.1.0"\nTORCH_VERSION = "{_build_info.TORCH_VERSION}"\n'
                f"TORCH_MINORS = {_build_info.TORCH_MINORS}\nWITH_NCCL = False\n"
            )

    def add_torch(self, version: str) -> Path:
        torch = self.folder / "torch"
        torch.mkdir()
        (torch / "__init__.py").write_text(f'__version__ = "{version}"\n')
        return torch

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs Python with this package before all others."""
        return python(*arguments, folder=self.folder, PYTHONPATH=str(self.folder))
