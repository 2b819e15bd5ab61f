"""What the pages say of the sources is so: environment variables, texts of errors, commands of packages."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"


def sources() -> str:
    """Of the product, with literals that follow each other as one."""
    files = [path for folder in ("csrc", "python") for path in (ROOT / folder).rglob("*.*")]
    texts = [path.read_text() for path in files if path.suffix in (".cpp", ".h", ".cu", ".py", ".pth")]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join([*texts, (ROOT / "setup.py").read_text()]))


SOURCES = sources()


def table(title: str) -> list[str]:
    """The variables that a table of the page has."""
    section = (DOCS / "environment.md").read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    first_cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return re.findall(r"`(\w+)`", " ".join(first_cells))


def test_every_variable_of_shardwise_has_a_line() -> None:
    read = set(re.findall(r"""["'](SHARDWISE_[A-Z_]+)["']""", SOURCES)) - {"SHARDWISE_BUILD_DIR"}
    assert len(read) >= 4
    assert set(table("Of shardwise")) == read


def test_every_other_variable_that_is_read_has_a_line() -> None:
    calls = r"""(?:getenv|variable|required|number_or|environ\.get)\(["']([A-Z_]+)["']"""
    read = {name for name in re.findall(calls, SOURCES) if not name.startswith(("SHARDWISE_", "CMAKE_"))}
    launchers = (ROOT / "csrc/comm/meet/launcher.cpp").read_text()
    read |= set(re.findall(r'"((?:OMPI|PMIX|PMI|MPI|SLURM)_[A-Z_]+)"', launchers))
    assert {"RANK", "GLOO_SOCKET_IFNAME", "CXX"} <= read
    assert set(table("Of launchers and others, read by shardwise")) == read


def test_variables_of_the_build_are_read() -> None:
    text = (ROOT / "setup.py").read_text()
    assert set(table("Of the build")) == set(re.findall(r'environ\.get\("(\w+)"', text))


QUOTED = re.findall(r"^> `(.*)`$|reads\n`(.*)`", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)


def test_texts_of_errors_are_those_of_the_sources() -> None:
    assert len(QUOTED) >= 20
    for text in (one or other for one, other in QUOTED):
        parts = [part.strip() for part in text.split("…") if part.strip()]
        assert max(len(part) for part in parts) >= 12, f"too short to be told from others: {text}"
        assert [part for part in parts if part not in SOURCES] == []


def test_cpp_code_of_the_pages_is_compiled_and_run() -> None:
    run = [line.strip() for line in (ROOT / "test/cpp/ranks/documents_test.cpp").read_text().splitlines()]
    shown = [
        block
        for page in DOCS.rglob("*.md")
        for block in re.findall(r"^```cpp\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    ]
    assert len(shown) >= 6
    for block in shown:
        lines = [line.strip() for line in block.splitlines()]
        assert any(run[at : at + len(lines)] == lines for at in range(len(run))), block
