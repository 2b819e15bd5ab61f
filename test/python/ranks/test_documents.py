"""The Python code of the pages runs as it stands, on two ranks, and what they show is what examples are and print."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import socket
from pathlib import Path

import pytest
import torch.distributed as dist
from checkout import ROOT
from pool import testing

#: Blocks that begin with ```py need more than a page can show.
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "```python\n" in page.read_text()]
README = {
    "python": "examples/python/train.py",
    "cpp": "examples/train/train.cpp",
    "cmake": "examples/train/CMakeLists.txt",
}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def run_page(_: int, code: str) -> None:
    exec(compile(code, "<page>", "exec"), {})
    dist.barrier()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_runs(page: Path) -> None:
    testing.run_ranks(2, run_page, "\n".join(blocks(page, "python")))


def test_pages_have_code() -> None:
    assert {"getting-started", "from-ddp", "from-fsdp2", "choosing", "checkpoints"} <= {page.stem for page in PAGES}


@pytest.mark.parametrize("language", README)
def test_the_readme_shows_whole_files(language: str) -> None:
    assert blocks(ROOT / "README.md", language) == [(ROOT / README[language]).read_text()]


def printed(rank: int) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(ROOT / README["python"]), run_name="__main__")
    return output.getvalue()


def test_the_python_snippet_prints_what_is_shown() -> None:
    """As torchrun would start it. What the C++ program prints test_package.py looks at, which builds it."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    launch = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    (shown,) = blocks(ROOT / "README.md", "text")
    assert "".join(testing.run_ranks(2, printed, backend=None, environment=launch)) == shown
