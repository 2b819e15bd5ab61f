"""What two pages and the pictures show is what benchmarks/report.py makes of the saved figures."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from bench_modules import imported

from shardwise._svg import width_of


@pytest.fixture
def modules(monkeypatch):
    yield from imported(monkeypatch)


@pytest.fixture
def report(modules):
    return modules["report"]


@pytest.fixture
def one(modules, tmp_path):
    """A saved figure."""
    facts = {"date": "2026-11-22 10:00 UTC", "commit": "abc", "machine": "a machine", "torch": "2.11.0"}
    figure = modules["figures"].Figure("host", "C++ fully_shard, 8 blocks of 9", 3.0, "k instructions a unit")
    modules["figures"].save(tmp_path, facts, [figure])
    return modules["figures"].load(tmp_path)


def test_the_pages_and_the_pictures_are_made_of_the_saved_figures(report):
    stale = report.stale(report.wanted())
    assert not stale, "run: scripts/python benchmarks/report.py"
    assert list(report.RESULTS.glob("*.svg"))
    shown = "\n".join(report.table(report.load(report.RESULTS)))
    assert [each.title for each in report.ROWS if f"| {each.title} |" not in shown] == []


def test_only_what_stands_between_the_marks_is_written(report, one):
    text = report.replaced(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n", report.table(one))
    assert text.startswith("before\n")
    assert text.endswith(f"{report.END}\nafter\n")
    assert "old" not in text
    assert "| host, a unit of 9 parameters: `fully_shard`, thousand instructions | 3 |  |  |  |" in text
    assert report.replaced(text, report.table(one)) == text


def test_the_summary_says_what_the_peers_need(report):
    text = " ".join(report.summary(report.load(report.RESULTS)))
    for words in ("over torch's Gloo", "own transport by TCP", "benchmarks/results/steps.svg"):
        assert words in text
    assert re.search(r"holds [\d.]+ times the parameters, FSDP2 [\d.]+, DDP [\d.]+", text)
    assert not list(report.summary({}))


def test_pictures_are_svg_with_a_bar_for_each_figure(report, one):
    pictures = report.pictures(one)
    assert pictures.keys() == {"host.svg"}
    bars = [each for each in ElementTree.fromstring(pictures["host.svg"]).iter() if each.tag.endswith("rect")]
    assert len(bars) == 2  # the ground, and one figure


def test_no_label_of_a_picture_is_cut_off(report):
    for text in report.pictures(report.load(report.RESULTS)).values():
        root = ElementTree.fromstring(text)
        for words in (each for each in root.iter() if each.tag.endswith("text")):
            x, size = float(words.attrib["x"]), float(words.attrib.get("font-size", 13))
            wide = width_of(words.text, size)
            left, right = (x - wide, x) if words.attrib.get("text-anchor") == "end" else (x, x + wide)
            assert left >= 0 and right <= float(root.attrib["width"]), words.text
