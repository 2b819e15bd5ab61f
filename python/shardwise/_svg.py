"""Pictures as SVG: elements with attributes, in the order in which they are drawn."""

from __future__ import annotations

import xml.etree.ElementTree as ET

FONT = "system-ui, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
#: The width of an average letter of these fonts, relative to the font size; wide letters count as average.
LETTER = 0.6


class Picture:
    """A picture on a white ground. str() is the text of its file."""

    def __init__(self, width: float, height: float, size: float = 13) -> None:
        self._root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width:g} {height:g}"})
        _set(self._root, {"width": width, "height": height, "font_family": FONT, "font_size": size})
        self.add("rect", width=width, height=height, fill="#ffffff")

    def add(self, kind: str, tip: str = "", **attributes: str | float) -> None:
        """Adds an element; `tip` is shown when the mouse points at it. `font_size=9` becomes SVG's font-size."""
        element = ET.SubElement(self._root, kind)
        _set(element, attributes)
        if tip:
            ET.SubElement(element, "title").text = tip

    def text(self, x: float, y: float, words: str, **attributes: str | float) -> None:
        """Adds words that begin at `x`, or end there with text_anchor="end"."""
        element = ET.SubElement(self._root, "text")
        _set(element, {"x": x, "y": y, **attributes})
        element.text = words

    def __str__(self) -> str:
        ET.indent(self._root, "")
        return ET.tostring(self._root, encoding="unicode")


def width_of(words: str, size: float = 13) -> float:
    """About how wide the words are, rounded up: the reader's fonts are not known."""
    return len(words) * size * LETTER


def _set(element: ET.Element, attributes: dict[str, str | float]) -> None:
    for name, value in attributes.items():
        shown = value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
        # A name that is a keyword of Python ends in an underscore: class_.
        element.set(name.rstrip("_").replace("_", "-"), shown)
