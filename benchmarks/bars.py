"""A picture of bars, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from figures import shown

WIDTH, LEFT, RIGHT, LINE, TOP = 760, 190, 70, 24, 44


@dataclass(frozen=True)
class Bar:
    label: str
    value: float
    #: Shardwise's own stand out.
    ours: bool


def picture(title: str, bars: Sequence[Bar]) -> str:
    """One line for each bar, as long as its value; the largest takes the whole width."""
    scale = (WIDTH - LEFT - RIGHT) / max(bar.value for bar in bars)
    height = TOP + LINE * len(bars) + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="24" font-size="14">{escape(title)}</text>',
    ]
    for number, bar in enumerate(bars):
        y = TOP + LINE * number
        colour = "#1f6fb4" if bar.ours else "#9a9a9a"
        lines += [
            f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(bar.label)}</text>',
            f'<rect x="{LEFT}" y="{y + 2}" width="{bar.value * scale:.1f}" height="{LINE - 8}" fill="{colour}"/>',
            f'<text x="{LEFT + bar.value * scale + 6:.1f}" y="{y + 14}">{shown(bar.value)}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"
