"""Pictures: what is drawn is in them as given, and words find their place."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from shardwise._svg import Picture, width_of

SVG = "{http://www.w3.org/2000/svg}"


def test_elements_are_as_given_and_in_order() -> None:
    picture = Picture(200, 100)
    picture.add("line", x1=1, y1=2.504, x2=3.0, y2=0.126, stroke_width=1.5, class_="thin")
    picture.add("rect", "a < b & c", x=0, y=0, width=10, height=10)
    picture.text(5, 6, "<words>", text_anchor="end")
    root = ET.fromstring(str(picture))
    assert (root.attrib["width"], root.attrib["height"], root.attrib["viewBox"]) == ("200", "100", "0 0 200 100")
    ground, line, rectangle, words = root
    assert (ground.attrib["width"], ground.attrib["height"]) == ("200", "100")
    assert line.attrib == {"x1": "1", "y1": "2.5", "x2": "3", "y2": "0.13", "stroke-width": "1.5", "class": "thin"}
    assert rectangle.find(f"{SVG}title").text == "a < b & c"
    assert (words.text, words.attrib["text-anchor"]) == ("<words>", "end")


def test_words_are_as_wide_as_their_letters() -> None:
    assert width_of("") == 0
    assert width_of("four", 26) == 2 * width_of("four") == 4 * width_of("four", 6.5)
