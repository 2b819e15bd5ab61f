"""What ranks recorded, as one page: spans of time for each rank, and how much of what travelled nobody waited for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

#: Kinds of events, with the colours of their spans.
COLORS = {
    "forward": "#4c78a8",
    "backward": "#3f8f5f",
    "wait": "#d6455d",
    "all-gather": "#e39b3b",
    "reduce-scatter": "#8e6bb0",
    "all-reduce": "#946b4f",
    "broadcast": "#7a7a7a",
}
COMPUTE = ("forward", "backward")
WIRE = ("all-gather", "reduce-scatter", "all-reduce", "broadcast")
#: The rows of a rank.
LANES = {"compute": COMPUTE, "waits": ("wait",), "gathers": ("all-gather", "broadcast"), "sums": WIRE[1:3]}

LEFT, WIDTH, RIGHT, ROW, GAP = 110, 1180, 60, 18, 10


@dataclass(frozen=True)
class Event:
    kind: str
    name: str
    rank: int
    #: Nanoseconds.
    begin: int
    end: int
    bytes: int


#: What a file has of an event.
_KINDS = {"kind": str, "name": str, "rank": int, "begin": int, "end": int, "bytes": int}


def read(folder: Path) -> list[Event]:
    """Of all files that programs wrote there, the earliest first. ValueError for a file that is no record."""
    events: list[Event] = []
    for file in sorted(folder.glob("shardwise-*.json")):
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(found, list):
                raise ValueError(f"it has a {type(found).__name__} in the place of a list")
            events += (_event(each) for each in found)
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(
                f"shardwise: {file} is not a record that a program wrote: {error}. Remove it, or record anew."
            ) from None
    if not events:
        raise ValueError(
            f"shardwise: nothing was recorded in {folder}: run the program with SHARDWISE_RECORD={folder}, or its "
            "steps inside of shardwise.record()."
        )
    return sorted(events, key=lambda event: event.begin)


def _event(found: Any) -> Event:
    """One that a file tells of, which anybody may have written."""
    if not isinstance(found, dict) or set(found) != _KINDS.keys():
        raise ValueError(f"an event has {sorted(_KINDS)}, and one is {found!r:.200}")
    for name, kind in _KINDS.items():
        if type(found[name]) is not kind:
            raise ValueError(f"'{name}' of an event is {found[name]!r:.200}, and not a {kind.__name__}")
    numbers_fit = (
        0 <= found["begin"] <= found["end"] < 2**63 and 0 <= found["rank"] < 2**31 and 0 <= found["bytes"] < 2**63
    )
    if found["kind"] not in COLORS or not numbers_fit:
        raise ValueError(f"there is an event {found!r:.200}, of a kind or with numbers that no program writes")
    return Event(**found)


def steps(events: Sequence[Event], rank: int) -> list[int]:
    """When the outermost unit of a rank began its forwards."""
    own = [event for event in events if event.kind == "forward" and event.rank == rank]
    return [event.begin for event in own if event.name == own[0].name]


def last_steps(events: Sequence[Event], number: int) -> list[Event]:
    """Those of the last few steps, which ranks begin each at its own time."""
    first: dict[int, int] = {}
    for rank in {event.rank for event in events}:
        begins = steps(events, rank)
        first[rank] = begins[-number] if len(begins) > number else 0
    return [event for event in events if event.begin >= first[event.rank]]


def union(events: Iterable[Event]) -> int:
    """Nanoseconds in which at least one of them was under way."""
    total, until = 0, 0
    for event in sorted(events, key=lambda event: event.begin):
        total += max(0, event.end - max(event.begin, until))
        until = max(until, event.end)
    return total


def hidden(events: Sequence[Event], rank: int) -> float:
    """The part of the time on the wire in which this rank did not wait."""
    wire = union(event for event in events if event.rank == rank and event.kind in WIRE)
    waited = union(event for event in events if event.rank == rank and event.kind == "wait")
    return max(0.0, 1 - waited / wire) if wire else 1.0


def rows(events: Sequence[Event]) -> list[list[Event]]:
    """Those that overlap lie in rows of their own. A span that holds others lies above them."""
    found: list[list[Event]] = []
    for event in sorted(events, key=lambda event: (event.begin, -event.end)):
        row = next((row for row in found if row[-1].end <= event.begin), None)
        found.append([event]) if row is None else row.append(event)
    return found


def page(events: Sequence[Event]) -> str:
    """HTML that needs nothing else."""
    picture = svg(events)
    lines = "".join(table(events))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>shardwise timeline</title>\n'
        "<style>body{font:14px sans-serif;margin:16px;color:#222;background:#fff}"
        "table{border-collapse:collapse;margin-top:16px}td,th{padding:3px 12px;text-align:right;"
        "border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}</style></head>\n"
        f"<body><h1>shardwise timeline</h1>\n{picture}\n<table>{lines}</table></body></html>\n"
    )


def table(events: Sequence[Event]) -> Iterator[str]:
    heads = ("rank", "ms", "computed", "waited", "gathers", "sums", "on the wire and not waited for")
    yield f"<tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>\n"
    for rank in sorted({event.rank for event in events}):
        own = [event for event in events if event.rank == rank]
        spans = [own, *([event for event in own if event.kind in kinds] for kinds in LANES.values())]
        times = "".join(f"<td>{union(each) / 1e6:.2f}</td>" for each in spans)
        yield f"<tr><td>{rank}</td>{times}<td>{hidden(events, rank):.0%}</td></tr>\n"


def svg(events: Sequence[Event]) -> str:
    begin, end = min(event.begin for event in events), max(event.end for event in events)
    end = max(end, begin + 1)
    scale = WIDTH / (end - begin)
    parts: list[str] = []
    y = 34
    for rank in sorted({event.rank for event in events}):
        parts.append(f'<text x="0" y="{y + 13}" font-weight="bold">rank {rank}</text>')
        for lane, kinds in LANES.items():
            own = [event for event in events if event.rank == rank and event.kind in kinds]
            if not own:
                continue
            parts.append(f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end" class="lane">{lane}</text>')
            for row in rows(own):
                parts += (span(event, LEFT + (event.begin - begin) * scale, y, scale) for event in row)
                y += ROW
        y += GAP
    height = y + 8
    axis = "".join(ticks((end - begin) / 1e6, height))
    legend = "".join(
        f'<rect x="{LEFT + 130 * place}" y="0" width="12" height="12" fill="{color}"/>'
        f'<text x="{LEFT + 130 * place + 17}" y="11">{kind}</text>'
        for place, (kind, color) in enumerate(COLORS.items())
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + RIGHT}" height="{height}" '
        f'font-family="sans-serif" font-size="12"><style>.lane{{fill:#666}}.in{{fill:#fff;font-size:11px}}'
        f"line{{stroke:#ddd}}</style>{axis}{legend}{''.join(parts)}</svg>"
    )


def span(event: Event, x: float, y: int, scale: float) -> str:
    width = max((event.end - event.begin) * scale, 0.5)
    size = f", {event.bytes / 1e6:.3g} MB" if event.bytes else ""
    about = escape(f"{event.kind}: {event.name}: {(event.end - event.begin) / 1e6:.3f} ms{size}")
    text = (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW - 3}" fill="{COLORS[event.kind]}">'
        f"<title>{about}</title></rect>"
    )
    if event.kind in COMPUTE and len(event.name) * 7 < width:
        text += f'<text x="{x + 3:.2f}" y="{y + 12}" class="in" pointer-events="none">{escape(event.name)}</text>'
    return text


def ticks(milliseconds: float, height: int) -> Iterator[str]:
    """Ten or so, at round numbers."""
    step = 10.0 ** len(str(int(milliseconds / 10))) / 10 if milliseconds >= 10 else 0.1
    while milliseconds / step > 12:
        step *= 2
    for number in range(int(milliseconds / step) + 1):
        x = LEFT + number * step / milliseconds * WIDTH
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="30" y2="{height}"/>'
        yield f'<text x="{x:.1f}" y="27" fill="#666" font-size="10">{number * step:g} ms</text>'
