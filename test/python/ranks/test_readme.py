"""What the README and other pages show is what the examples are and what they print."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import socket
from pathlib import Path

import pytest

from shardwise.testing import run_ranks

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


def printed(rank: int) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(ROOT / SHOWN["python"]), run_name="__main__")
    return output.getvalue()


def test_the_python_snippet_prints_what_is_shown() -> None:
    """As torchrun would start it. What the C++ program prints test_package.py looks at, which builds it."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    launch = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    (shown,) = blocks("text")
    assert "".join(run_ranks(2, printed, backend=None, environment=launch)) == shown
