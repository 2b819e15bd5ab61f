"""docs/coverage.md names every way to be wrong; it and docs/cpp.md name only tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "coverage.md"


def rows() -> dict[str, str]:
    found = re.findall(r"^\| ([TR]\d\d(?: to [TR]\d\d)?) \|.*\| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    return dict(found)


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
    text = (ROOT / "docs" / "cpp.md").read_text()
    lines = re.split(r"^\d+\. ", text, flags=re.MULTILINE)[1:]
    assert len(lines) == len(re.findall(r"^\d+\. ", text, re.MULTILINE)) > 15
    named = set(re.findall(r"`([A-Z]\w+\.[A-Z]\w+)`", text))
    assert named - cpp_tests() == set()
    without = {line.partition("**.")[0] for line in lines if not re.search(r"`[A-Z]\w+\.[A-Z]\w+`", line)}
    # What is in every test, a mesh and a loop; and what is torch's, a sampler.
    assert len(without) == 3, without


def test_a_row_names_a_test_or_says_why_there_is_none() -> None:
    for way, tests in rows().items():
        named = re.search(r"`\w+\.\w+`|`(unit|program)_tests`|pytest \(", tests)
        assert named or re.match(r"none|every test", tests), way
        for file in re.findall(r"\((\w+\.(?:py|cpp))\)", tests):
            assert list((ROOT / "test").rglob(file)), f"{way}: {file}"
