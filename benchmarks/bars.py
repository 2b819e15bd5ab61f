"""A picture of bars, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from figures import shown

from shardwise._svg import Picture, width_of

LENGTH, LINE, TOP, GAP, TITLE = 500, 24, 44, 8, 14


@dataclass(frozen=True)
class Bar:
    label: str
    value: float
    #: Shardwise's own stand out.
    ours: bool


def picture(title: str, bars: Sequence[Bar]) -> str:
    """One line for each bar, as long as its value; all labels and values are whole."""
    left = 2 * GAP + max(width_of(bar.label) for bar in bars)
    right = 2 * GAP + max(width_of(shown(bar.value)) for bar in bars)
    width = max(left + LENGTH + right, 2 * GAP + width_of(title, TITLE))
    scale = LENGTH / max(bar.value for bar in bars)
    drawn = Picture(width, TOP + LINE * len(bars) + 10)
    drawn.text(GAP, 24, title, font_size=TITLE)
    for number, bar in enumerate(bars):
        y = TOP + LINE * number
        length = bar.value * scale
        drawn.text(left - GAP, y + 14, bar.label, text_anchor="end")
        drawn.add("rect", x=left, y=y + 2, width=length, height=LINE - 8, fill="#1f6fb4" if bar.ours else "#9a9a9a")
        drawn.text(left + length + GAP, y + 14, shown(bar.value))
    return f"{drawn}\n"
