"""What the pages say of the sources and the tests is so: variables, texts of errors, commands, names of tests."""

from __future__ import annotations

import re

from checkout import ROOT

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
    read = set(re.findall(r"""["'](SHARDWISE_[A-Z_]+)["']""", SOURCES)) - set(table("Of the build"))
    assert len(read) >= 4
    assert set(table("Of shardwise")) == read


def test_every_other_variable_that_is_read_has_a_line() -> None:
    calls = r"""(?:getenv|variable|required|number_or|environ\.get)\(["']([A-Z_]+)["']"""
    read = {name for name in re.findall(calls, SOURCES) if not name.startswith(("SHARDWISE_", "CMAKE_"))}
    launchers = (ROOT / "csrc/comm/rendezvous/launcher.cpp").read_text()
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


def rows() -> dict[str, str]:
    """Of coverage.md: a way to be wrong, and its tests."""
    page = (DOCS / "coverage.md").read_text()
    return dict(re.findall(r"^\| ([TR]\d\d(?: to [TR]\d\d)?) \|.*\| (.+) \|$", page, re.MULTILINE))


def cpp_tests() -> set[str]:
    sources = "".join(path.read_text() for path in (ROOT / "test" / "cpp").rglob("*.cpp"))
    both_ways = re.findall(r"\bTRANSPORT_TEST\((\w+)\)", sources)
    return {f"{suite}.{name}" for suite, name in re.findall(r"\bTEST(?:_F)?\((\w+),\s*(\w+)\)", sources)} | {
        f"{suite}.{name}" for suite in ("Transport", "TransportSameHost") for name in both_ways
    }


def covered(ids: list[str]) -> set[str]:
    names = set()
    for text in ids:
        first, _, last = text.partition(" to ")
        names |= {f"{first[0]}{n:02}" for n in range(int(first[1:]), int((last or first)[1:]) + 1)}
    return names


def test_every_way_has_a_row() -> None:
    expected = {f"T{n:02}" for n in range(1, 37)} | {f"R{n:02}" for n in range(1, 44)}
    assert expected <= covered(list(rows()))


def test_named_tests_exist() -> None:
    named = {name for tests in rows().values() for name in re.findall(r"`(\w+\.\w+)`", tests)}
    assert len(named) > 50
    assert named - cpp_tests() == set()


def test_every_line_of_the_way_from_one_process_has_a_test() -> None:
    text = (DOCS / "cpp.md").read_text()
    lines = re.split(r"^\d+\. ", text, flags=re.MULTILINE)[1:]
    assert len(lines) == len(re.findall(r"^\d+\. ", text, re.MULTILINE)) > 15
    named = set(re.findall(r"`([A-Z]\w+\.[A-Z]\w+)`", text))
    assert named - cpp_tests() == set()
    without = {line.partition("**.")[0] for line in lines if not re.search(r"`[A-Z]\w+\.[A-Z]\w+`", line)}
    # What is in every test, a mesh and a loop; and what is torch's, a sampler.
    assert len(without) == 3, without


def test_every_difference_from_torch_names_tests_that_exist() -> None:
    section = (DOCS / "from-fsdp2.md").read_text().partition("## What differs")[2].partition("\n## ")[0]
    cells = [line.rstrip(" |").rpartition("|")[2] for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(cells) > 20
    assert all("`" in cell for cell in cells)
    files = {path.name: path.read_text() for path in (ROOT / "test").rglob("test_*.py")}
    sources = "\n".join(files.values())
    named = {name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}
    pairs = re.findall(r"^\s*(?:class|def) (\w+)|^\s+(test_\w+) = ", sources, re.MULTILINE)
    known = cpp_tests() | set(files) | {name for pair in pairs for name in pair}
    assert named - known == set()


def test_a_row_names_a_test_or_says_why_there_is_none() -> None:
    for way, tests in rows().items():
        named = re.search(r"`\w+\.\w+`|`(unit|program)_tests`|pytest \(", tests)
        assert named or re.match(r"none|every test", tests), way
        for file in re.findall(r"\((\w+\.(?:py|cpp))\)", tests):
            assert list((ROOT / "test").rglob(file)), f"{way}: {file}"
