"""One picture of a training run as SVG: the loss and the memory of every rank over the steps, and what fills memory."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from training import Memory, Record, Training

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
    svg = ET.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {WIDTH} {height}",
            "width": str(WIDTH),
            "height": str(height),
            "font-family": "system-ui, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif",
            "font-size": "13",
        },
    )
    _add(svg, "rect", width=WIDTH, height=height, fill="#ffffff")
    facts = training.facts
    noun = "rank" if facts.ranks == 1 else "ranks"
    spread = "sharded over" if facts.mode == "fully_shard" else "replicated on"
    title = f"A byte-level GPT {spread} {facts.ranks} {noun} from {front}"
    _text(svg, LEFT, 38, title, size=20, fill=INK, weight="600")
    shape = f"{facts.parameters:,} parameters, {steps} steps of {facts.batch} x {facts.context} bytes a rank"
    _text(svg, LEFT, 60, f"{shape}. {checked}", fill=FAINT)
    for panel in _panels(training):
        _draw(svg, panel, steps)
        if panel.kind == "loss":
            mean = list(enumerate(training.mean_losses, start=1))
            _line(svg, panel, mean, steps, {"class": "mean", "stroke": INK, "stroke-width": "1.6"}, "mean loss")
            for record in reference:
                _mark(svg, _x(record["step"], steps), panel.y(record["loss"]))
    _legend(svg, facts.ranks, len(reference))
    _text(svg, (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, "step", anchor="middle", fill=FAINT)
    if memory:
        _bars(svg, memory)
    ET.indent(svg)
    file.write_text(ET.tostring(svg, encoding="unicode") + "\n")


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


def _bars(svg: ET.Element, memory: Mapping[str, Memory]) -> None:
    """A bar for each mode: what a rank holds between steps, and beyond it up to the peak of a step."""
    top = HEIGHT + 26
    _text(svg, LEFT, top, "tensors that a rank holds, MiB", fill=INK, weight="600")
    x = LEFT + 250.0
    for part, colour in PARTS.items():
        _add(svg, "rect", x=x, y=top - 11, width=12, height=12, fill=colour)
        _text(svg, x + 18, top, part, fill=INK)
        x += 32 + 7.5 * len(part)
    scale = (WIDTH - RIGHT - LEFT - 190) / max(held.peak for held in memory.values())
    for row, (mode, held) in enumerate(memory.items()):
        y = HEIGHT + BARS_TOP + BAR * row - 14
        _text(svg, LEFT, y + 16, mode, fill=INK)
        begin = LEFT + 90.0
        values = (held.parameters, held.gradients, held.optimizer, held.other, held.peak - held.all)
        for (part, colour), value in zip(PARTS.items(), values, strict=True):
            bar = _add(svg, "rect", x=begin, y=y, width=max(0.0, value) * scale, height=22, fill=colour)
            bar.set("class", "held")
            bar.set("data-mode", mode)
            bar.set("data-part", part)
            _add(bar, "title").text = f"{mode}, {part}: {value:.1f} MiB"
            begin += max(0.0, value) * scale
        _text(svg, begin + 8, y + 16, f"{held.all:.1f}, peak {held.peak:.1f}", fill=FAINT)


def _range(lines: list[list[Point]]) -> tuple[float, float]:
    """Of the values that are numbers; never empty."""
    values = [value for line in lines for _, value in line if math.isfinite(value)]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    return low, max(high, low + 1e-3)


def _draw(svg: ET.Element, panel: Panel, steps: int) -> None:
    _text(svg, LEFT, panel.top - 12, panel.title, fill=INK, weight="600")
    for tick in _ticks(panel.low, panel.high, panel.height / 36):
        y = panel.y(tick)
        _add(svg, "line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, stroke=GRID)
        _text(svg, LEFT - 10, y + 4.5, f"{tick:g}", anchor="end", fill=FAINT)
    bottom = panel.top + panel.height
    _add(svg, "line", x1=LEFT, x2=WIDTH - RIGHT, y1=bottom, y2=bottom, stroke=FAINT)
    for tick in [1.0, *(t for t in _ticks(1, steps, 10) if t >= 1 + steps / 20 and t == int(t))]:
        x = _x(tick, steps)
        _add(svg, "line", x1=x, x2=x, y1=bottom, y2=bottom + 5, stroke=FAINT)
        _text(svg, x, bottom + 20, f"{tick:g}", anchor="middle", fill=FAINT)
    for rank, line in enumerate(panel.lines):
        style = {"class": panel.kind, "data-rank": str(rank), "stroke": _colour(rank), "stroke-opacity": "0.7"}
        _line(svg, panel, line, steps, style, f"{panel.kind} of rank {rank}")


def _line(svg: ET.Element, panel: Panel, line: Sequence[Point], steps: int, style: dict[str, str], name: str) -> None:
    points = " ".join(f"{_x(x, steps):.1f},{panel.y(y):.1f}" for x, y in line if math.isfinite(y))
    common = {"fill": "none", "stroke-width": "1.4", "stroke-linejoin": "round", "points": points}
    _add(ET.SubElement(svg, "polyline", common | style), "title").text = name


def _legend(svg: ET.Element, ranks: int, checked_steps: int) -> None:
    x, y = float(LEFT), 86
    room = min(88, 520 / ranks)
    for rank in range(ranks):
        _add(svg, "line", x1=x, x2=x + 22, y1=y - 4, y2=y - 4, stroke=_colour(rank), stroke_width=3)
        _text(svg, x + 28, y, f"rank {rank}" if room > 80 else f"{rank}", fill=INK)
        x += room
    _add(svg, "line", x1=x, x2=x + 22, y1=y - 4, y2=y - 4, stroke=INK, stroke_width=1.6)
    _text(svg, x + 28, y, "mean", fill=INK)
    x += 88
    _mark(svg, x + 11, y - 4)
    _text(svg, x + 28, y, f"one process, first {checked_steps} steps", fill=INK)


def _mark(svg: ET.Element, x: float, y: float) -> None:
    if math.isfinite(y):
        _add(svg, "circle", cx=x, cy=y, r=3.2, fill="#ffffff", stroke=INK, stroke_width=1.4)


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


def _text(
    parent: ET.Element,
    x: float,
    y: float,
    text: str,
    *,
    fill: str,
    anchor: str = "start",
    size: int = 13,
    weight: str = "400",
) -> None:
    element = _add(parent, "text", x=x, y=y, fill=fill, text_anchor=anchor, font_size=size, font_weight=weight)
    element.text = text


def _add(parent: ET.Element, tag: str, **attributes: str | float) -> ET.Element:
    def shown(value: str | float) -> str:
        return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")

    return ET.SubElement(parent, tag, {name.replace("_", "-"): shown(value) for name, value in attributes.items()})
