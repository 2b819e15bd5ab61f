"""What the README shows is what the examples are and what they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BUILD = Path(os.environ.get("SHARDWISE_BUILD_DIR", ROOT / "build" / "dev"))


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def launch(*command: str) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_cpp_snippet_prints_what_is_shown() -> None:
    (shown,) = blocks("cpp")
    assert shown in (ROOT / "examples" / "cpp" / "hello.cpp").read_text()
    binary = BUILD / "examples" / "cpp" / "hello"
    assert binary.exists(), f"build the examples first: {binary} is missing"
    assert launch("--no-python", str(binary)) == blocks("text")[0]


def test_the_python_snippet_prints_what_is_shown(tmp_path: Path) -> None:
    (shown,) = blocks("python")
    assert shown in (ROOT / "examples" / "python" / "hello.py").read_text()
    script = tmp_path / "hello.py"
    script.write_text(shown)
    assert launch(str(script)) == blocks("text")[1]


def test_the_cmake_snippet_is_what_a_consumer_writes() -> None:
    (shown,) = blocks("cmake")
    consumer = (ROOT / "test" / "consumer" / "CMakeLists.txt").read_text()
    for line in shown.strip().splitlines():
        pattern = re.escape(line).replace("hello", r"\w+")
        assert re.search(pattern, consumer), f"{line} is not in the consumer project"


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
