"""One picture of a training run as SVG: the loss and the memory of every rank over the steps, and what fills memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training import Memory, Record, Training

from shardwise._svg import Picture, width_of

Point = tuple[float, float]

WIDTH, HEIGHT = 960, 640
LEFT, RIGHT = 84, 28
COLOURS = ["#2563eb", "#ea580c", "#059669", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#be185d"]
#: What a bar of memory is made of, and its colours.
PARTS = {
    "parameters": "#1d4ed8",
    "gradients": "#60a5fa",
    "optimizer": "#bfdbfe",
    "other": "#9ca3af",
    "up to the peak of a step": "#e5e7eb",
}
#: The room above the bars of memory, and that of a bar.
BARS_TOP, BAR = 56, 34
INK, FAINT, GRID = "#1f2937", "#6b7280", "#e5e7eb"


@dataclass(frozen=True)
class Panel:
    """One pair of axes. `kind` is the class of its lines."""

    kind: str
    title: str
    top: int
    height: int
    lines: list[list[Point]]
    low: float
    high: float

    def y(self, value: float) -> float:
        return self.top + self.height * (1 - (value - self.low) / (self.high - self.low))


def write_picture(
    file: Path,
    training: Training,
    reference: Sequence[Record],
    front: str,
    checked: str,
    memory: Mapping[str, Memory] | None = None,
) -> None:
    """`checked` is the sentence below the title that says how the run compares with one process. `memory`: by mode."""
    steps = len(training.records[0])
    height = HEIGHT + (BARS_TOP + BAR * len(memory) if memory else 0)
    svg = Picture(WIDTH, height)
    facts = training.facts
    noun = "rank" if facts.ranks == 1 else "ranks"
    spread = "sharded over" if facts.mode == "fully_shard" else "replicated on"
    title = f"A byte-level GPT {spread} {facts.ranks} {noun} from {front}"
    svg.text(LEFT, 38, title, font_size=20, fill=INK, font_weight="600")
    shape = f"{facts.parameters:,} parameters, {steps} steps of {facts.batch} x {facts.context} bytes a rank"
    svg.text(LEFT, 60, f"{shape}. {checked}", fill=FAINT)
    for panel in _panels(training):
        _draw(svg, panel, steps)
        if panel.kind == "loss":
            mean = list(enumerate(training.mean_losses, start=1))
            _line(svg, panel, mean, steps, tip="mean loss", class_="mean", stroke=INK, stroke_width=1.6)
            for record in reference:
                _mark(svg, _x(record["step"], steps), panel.y(record["loss"]))
    _legend(svg, facts.ranks, len(reference))
    svg.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, "step", text_anchor="middle", fill=FAINT)
    if memory:
        _bars(svg, memory)
    file.write_text(f"{svg}\n")


def _panels(training: Training) -> list[Panel]:
    on_device = all("device_mib" in record for rank in training.records for record in rank)
    memory = "device_mib" if on_device else "rss_mib"
    place = "device" if on_device else "resident"
    losses, mebibytes = ([[(r["step"], r[key]) for r in rank] for rank in training.records] for key in ("loss", memory))
    low, high = _range(losses)
    _, most = _range(mebibytes)
    return [
        Panel("loss", "loss, nats a byte", 132, 272, losses, low - (high - low) * 0.05, high + (high - low) * 0.05),
        Panel("memory", f"{place} memory, MiB", 466, 116, mebibytes, 0, most * 1.15),
    ]


def _bars(svg: Picture, memory: Mapping[str, Memory]) -> None:
    """A bar for each mode: what a rank holds between steps, and beyond it up to the peak of a step."""
    top = HEIGHT + 26
    svg.text(LEFT, top, "tensors that a rank holds, MiB", fill=INK, font_weight="600")
    x = LEFT + 250.0
    for part, colour in PARTS.items():
        svg.add("rect", x=x, y=top - 11, width=12, height=12, fill=colour)
        svg.text(x + 18, top, part, fill=INK)
        x += 32 + width_of(part)
    scale = (WIDTH - RIGHT - LEFT - 190) / max(held.peak for held in memory.values())
    for row, (mode, held) in enumerate(memory.items()):
        y = HEIGHT + BARS_TOP + BAR * row - 14
        svg.text(LEFT, y + 16, mode, fill=INK)
        begin = LEFT + 90.0
        values = (held.parameters, held.gradients, held.optimizer, held.other, held.peak - held.all)
        for (part, colour), value in zip(PARTS.items(), values, strict=True):
            width = max(0.0, value) * scale
            facts = {"class_": "held", "data_mode": mode, "data_part": part, "fill": colour}
            svg.add("rect", f"{mode}, {part}: {value:.1f} MiB", x=begin, y=y, width=width, height=22, **facts)
            begin += width
        svg.text(begin + 8, y + 16, f"{held.all:.1f}, peak {held.peak:.1f}", fill=FAINT)


def _range(lines: list[list[Point]]) -> tuple[float, float]:
    """Of the values that are numbers; never empty."""
    values = [value for line in lines for _, value in line if math.isfinite(value)]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    return low, max(high, low + 1e-3)


def _draw(svg: Picture, panel: Panel, steps: int) -> None:
    svg.text(LEFT, panel.top - 12, panel.title, fill=INK, font_weight="600")
    for tick in _ticks(panel.low, panel.high, panel.height / 36):
        y = panel.y(tick)
        svg.add("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, stroke=GRID)
        svg.text(LEFT - 10, y + 4.5, f"{tick:g}", text_anchor="end", fill=FAINT)
    bottom = panel.top + panel.height
    svg.add("line", x1=LEFT, x2=WIDTH - RIGHT, y1=bottom, y2=bottom, stroke=FAINT)
    for tick in [1.0, *(t for t in _ticks(1, steps, 10) if t >= 1 + steps / 20 and t == int(t))]:
        x = _x(tick, steps)
        svg.add("line", x1=x, x2=x, y1=bottom, y2=bottom + 5, stroke=FAINT)
        svg.text(x, bottom + 20, f"{tick:g}", text_anchor="middle", fill=FAINT)
    for rank, line in enumerate(panel.lines):
        style = {"class_": panel.kind, "data_rank": str(rank), "stroke": _colour(rank), "stroke_opacity": 0.7}
        _line(svg, panel, line, steps, tip=f"{panel.kind} of rank {rank}", **style)


def _line(svg: Picture, panel: Panel, line: Sequence[Point], steps: int, **style: Any) -> None:
    points = " ".join(f"{_x(x, steps):.1f},{panel.y(y):.1f}" for x, y in line if math.isfinite(y))
    look = {"fill": "none", "stroke_width": 1.4, "stroke_linejoin": "round", **style}
    svg.add("polyline", points=points, **look)


def _legend(svg: Picture, ranks: int, checked_steps: int) -> None:
    x, y = float(LEFT), 86
    room = min(88, 520 / ranks)
    for rank in range(ranks):
        svg.add("line", x1=x, x2=x + 22, y1=y - 4, y2=y - 4, stroke=_colour(rank), stroke_width=3)
        svg.text(x + 28, y, f"rank {rank}" if room > 80 else f"{rank}", fill=INK)
        x += room
    svg.add("line", x1=x, x2=x + 22, y1=y - 4, y2=y - 4, stroke=INK, stroke_width=1.6)
    svg.text(x + 28, y, "mean", fill=INK)
    x += 88
    _mark(svg, x + 11, y - 4)
    svg.text(x + 28, y, f"one process, first {checked_steps} steps", fill=INK)


def _mark(svg: Picture, x: float, y: float) -> None:
    if math.isfinite(y):
        svg.add("circle", cx=x, cy=y, r=3.2, fill="#ffffff", stroke=INK, stroke_width=1.4)


def _colour(rank: int) -> str:
    return COLOURS[rank % len(COLOURS)]


def _x(step: float, steps: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (step - 1) / max(1, steps - 1)


def _ticks(low: float, high: float, most: float) -> list[float]:
    """Round values from low to high, about `most` of them at the most."""
    rough = (high - low) / most
    if rough <= 0:
        return []
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [round(i * step, 10) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
