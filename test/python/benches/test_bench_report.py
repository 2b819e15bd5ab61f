"""What two pages and the pictures show is what benchmarks/report.py makes of the saved figures."""

from __future__ import annotations

from xml.etree import ElementTree

import report

from shardwise._svg import width_of


def test_the_pages_and_the_pictures_are_made_of_the_saved_figures():
    stale = report.stale(report.wanted())
    assert not stale, "run: scripts/python benchmarks/report.py"
    assert list(report.RESULTS.glob("*.svg"))
    shown = "\n".join(report.table(report.load(report.RESULTS)))
    assert [each.title for each in report.ROWS if f"| {each.title} |" not in shown] == []


def test_no_label_of_a_picture_is_cut_off():
    for text in report.pictures(report.load(report.RESULTS)).values():
        root = ElementTree.fromstring(text)
        for words in (each for each in root.iter() if each.tag.endswith("text")):
            x, size = float(words.attrib["x"]), float(words.attrib.get("font-size", 13))
            wide = width_of(words.text, size)
            left, right = (x - wide, x) if words.attrib.get("text-anchor") == "end" else (x, x + wide)
            assert left >= 0 and right <= float(root.attrib["width"]), words.text
