"""What a device and the host did in a step, lane by lane: as a picture, and as a table of copies and gaps."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "python"))
from shardwise._svg import Picture, width_of

#: Of names of operations and kernels, in the order in which they are looked for; what has none of them computes.
KINDS = {
    "collective": ("nccl", "c10d", "gloo", "all_gather", "reduce_scatter", "all_reduce"),
    "copy": ("memcpy", "copy", "catarray", "split_with_sizes", "move_kernel", "memset", "fill"),
}
COLORS = {"compute": "#4c78a8", "copy": "#e39b3b", "collective": "#8e6bb0"}
LEFT, WIDTH, TOP, ROW = 150, 1180, 40, 26
SIZE, INSIDE = 12, 10


@dataclass(frozen=True)
class Span:
    """Something that ran on a stream, or on a thread of the host, in microseconds."""

    lane: str
    name: str
    begin: float
    end: float

    @property
    def kind(self) -> str:
        name = self.name.lower()
        return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "compute")


def lanes(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """By lane, in the order of time; the host comes first."""
    found: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.begin):
        found.setdefault(span.lane, []).append(span)
    return dict(sorted(found.items(), key=lambda item: (not item[0].startswith("host"), item[0])))


def gaps(spans: Sequence[Span]) -> list[float]:
    """Between spans of one lane, in microseconds."""
    found, until = [], spans[0].end
    for span in spans[1:]:
        if span.begin > until:
            found.append(span.begin - until)
        until = max(until, span.end)
    return found


def table(spans: Iterable[Span], facts: dict[str, float]) -> str:
    """In Markdown: a line for each lane, in milliseconds."""
    lines = [f"{name}: {value:.3f} ms" for name, value in facts.items()]
    lines += ["", "| lane | spans | busy | copies | copying | collectives | gaps | idle | longest gap |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for lane, own in lanes(spans).items():
        idle = gaps(own)
        of_kind = {kind: [span for span in own if span.kind == kind] for kind in COLORS}
        milliseconds = {kind: sum(span.end - span.begin for span in found) / 1e3 for kind, found in of_kind.items()}
        busy = max(span.end for span in own) - own[0].begin - sum(idle)
        cells = [lane, len(own), f"{busy / 1e3:.3f}", len(of_kind["copy"]), f"{milliseconds['copy']:.3f}"]
        cells += [f"{milliseconds['collective']:.3f}", len(idle), f"{sum(idle) / 1e3:.3f}"]
        cells.append(f"{max(idle, default=0) / 1e3:.3f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def picture(spans: Sequence[Span]) -> str:
    """As SVG. What is inside another span of its lane lies upon it."""
    begin, end = min(span.begin for span in spans), max(span.end for span in spans)
    scale = WIDTH / max(end - begin, 1)
    found = lanes(spans)
    drawn = Picture(LEFT + WIDTH + 20, TOP + ROW * len(found) + 10, SIZE)
    for place, (kind, color) in enumerate(COLORS.items()):
        drawn.add("rect", x=LEFT + 120 * place, y=2, width=12, height=12, fill=color)
        drawn.text(LEFT + 120 * place + 17, 13, kind)
    drawn.text(LEFT + WIDTH, 13, f"{(end - begin) / 1e3:.2f} ms", text_anchor="end", fill="#666666")
    for line, (lane, own) in enumerate(found.items()):
        y = TOP + ROW * line
        drawn.text(LEFT - 8, y + 14, lane, text_anchor="end", fill="#666666")
        for span in own:
            x, width = LEFT + (span.begin - begin) * scale, max((span.end - span.begin) * scale, 0.5)
            tip = f"{span.name}: {(span.end - span.begin) / 1e3:.3f} ms"
            drawn.add("rect", tip, x=x, y=y, width=width, height=ROW - 6, fill=COLORS[span.kind])
            if width_of(span.name, INSIDE) < width:
                drawn.text(x + 3, y + 14, span.name, fill="#ffffff", font_size=INSIDE, pointer_events="none")
    return str(drawn)
