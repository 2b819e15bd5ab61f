"""Environments of a user, into which packages are installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[3]
TORCH = Path(torch.__file__).parent
# What the Makefile built is used again; elsewhere the first test builds.
BUILD_DIR = ROOT / (os.environ.get("SHARDWISE_BUILD_DIR") or "build/dev")


def run(*command: str | Path, environment: dict[str, str] | None = None, folder: Path | None = None) -> str:
    """The output of a command that must succeed."""
    result = subprocess.run(
        command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=3600
    )
    assert result.returncode == 0, f"{[str(word) for word in command]}:\n{result.stdout}"
    return result.stdout


def cached_options() -> dict[str, str]:
    """What the build folder was configured with: its kind, its Python, and shardwise's own options."""
    cache = BUILD_DIR / "CMakeCache.txt"
    options = r"^(CMAKE_BUILD_TYPE|Python_EXECUTABLE|SHARDWISE_(?:BUILD_\w+|CUDA|SANITIZE|TORCH_DIR)):\w+=(.*)$"
    return dict(re.findall(options, cache.read_text(), re.MULTILINE)) if cache.exists() else {}


@dataclass
class Environment:
    """A virtual environment that has nothing of its own, and may see the packages of a folder."""

    folder: Path

    @classmethod
    def create(cls, folder: Path, python: str = sys.executable, beside: Path | None = TORCH.parent) -> Environment:
        """Of this Python. It sees what lies beside the torch of the tests, or in another folder, or nothing."""
        # A pip beside torch has a setuptools that knows our pyproject.toml, which that of an old Python may not.
        has_pip = beside is not None and (beside / "pip").is_dir()
        run(python, "-m", "venv", *(["--without-pip"] if has_pip else []), folder)
        made = cls(folder)
        if beside:
            (made.site / "torch_of_the_tests.pth").write_text(f"{beside}\n")
        return made

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site(self) -> Path:
        (site,) = self.folder.glob("lib/python*/site-packages")
        return site

    @property
    def variables(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        tools = f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**kept, "PATH": tools, "VIRTUAL_ENV": str(self.folder), "SHARDWISE_BUILD_DIR": str(BUILD_DIR)}

    def run(self, *command: str | Path, folder: Path | None = None) -> str:
        return run(*command, environment=self.variables, folder=folder)

    def pip_install(self, *arguments: str | Path) -> None:
        self.run(self.python, "-m", "pip", "install", "--no-deps", "--no-index", *arguments)
