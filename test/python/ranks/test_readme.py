"""What the README and other pages show is what the examples are and what they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
README = ROOT / "README.md"
SHOWN = {
    "python": "examples/python/train.py",
    "cpp": "examples/train/train.cpp",
    "cmake": "examples/train/CMakeLists.txt",
}


def blocks(language: str, page: Path = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize(("language", "file"), SHOWN.items(), ids=SHOWN)
def test_the_readme_shows_whole_files(language: str, file: str) -> None:
    assert blocks(language) == [(ROOT / file).read_text()]


def test_the_python_snippet_prints_what_is_shown() -> None:
    """What the C++ program prints test_package.py looks at, which builds it."""
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SHOWN["python"]],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"},
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    (shown,) = blocks("text")
    assert result.stdout == shown


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150
