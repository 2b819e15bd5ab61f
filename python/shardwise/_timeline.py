"""What ranks recorded, as a page: a picture, and how much of the time on the wire nobody waited for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from shardwise._record_files import COMPUTE, GATHERS, SUMS, WIRE, Event
from shardwise._svg import Picture, width_of

#: Kinds of events, with the colours of their spans.
COLORS = {
    "step": "#b3bccd",
    "stage": "#5b6b8c",
    "forward": "#4c78a8",
    "backward": "#3f8f5f",
    "wait": "#d6455d",
    "all-gather": "#e39b3b",
    "reduce-scatter": "#8e6bb0",
    "all-reduce": "#946b4f",
    "broadcast": "#7a7a7a",
}
#: The rows of a rank, with their kinds of events.
LANES = {"stages": ("step", "stage"), "compute": COMPUTE, "waits": ("wait",), "gathers": GATHERS, "sums": SUMS}

LEFT, WIDTH, RIGHT, TOP, ROW, GAP = 110, 1180, 60, 34, 18, 10
#: Font sizes: in the picture, inside spans, and at the axis.
SIZE, INSIDE, AXIS = 12, 11, 10


def steps(events: Sequence[Event], rank: int) -> list[int]:
    """The times at which a rank's pipeline began its steps, or else its outermost unit its forwards."""
    if own := [event for event in events if event.kind == "step" and event.rank == rank]:
        return [event.begin for event in own]
    own = [event for event in events if event.kind == "forward" and event.rank == rank]
    return [event.begin for event in own if event.name == own[0].name]


def last_steps(events: Sequence[Event], number: int) -> list[Event]:
    """The events of the last few steps, which each rank begins at its own time."""
    first: dict[int, int] = {}
    for rank in {event.rank for event in events}:
        begins = steps(events, rank)
        first[rank] = begins[-number] if len(begins) > number else 0
    return [event for event in events if event.begin >= first[event.rank]]


def union(events: Iterable[Event]) -> int:
    """Nanoseconds during which at least one of them was running."""
    total, until = 0, 0
    for event in sorted(events, key=lambda event: event.begin):
        total += max(0, event.end - max(event.begin, until))
        until = max(until, event.end)
    return total


def hidden(events: Sequence[Event], rank: int) -> float:
    """The fraction of the time on the wire in which this rank did not wait."""
    wire = union(event for event in events if event.rank == rank and event.kind in WIRE)
    waited = union(event for event in events if event.rank == rank and event.kind == "wait")
    return max(0.0, 1 - waited / wire) if wire else 1.0


def lanes(events: Sequence[Event], rank: int) -> Iterator[tuple[str, list[Event]]]:
    """The events of a rank by lane, without empty lanes."""
    for lane, kinds in LANES.items():
        own = [event for event in events if event.rank == rank and event.kind in kinds]
        if own:
            yield lane, own


def rows(events: Sequence[Event]) -> list[list[Event]]:
    """Puts events that overlap into different rows. A span that contains others lies above them."""
    found: list[list[Event]] = []
    for event in sorted(events, key=lambda event: (event.begin, -event.end)):
        row = next((row for row in found if row[-1].end <= event.begin), None)
        found.append([event]) if row is None else row.append(event)
    return found


def page(events: Sequence[Event]) -> str:
    """A self-contained HTML page."""
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
    """Lines of an HTML table: how many milliseconds each rank spent on what."""
    heads = ("rank", "ms", "stages", "computed", "waited", "gathers", "sums", "on the wire and not waited for")
    yield f"<tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>\n"
    for rank in sorted({event.rank for event in events}):
        own = [event for event in events if event.rank == rank]
        spans = [own, *([event for event in own if event.kind in kinds] for kinds in LANES.values())]
        times = "".join(f"<td>{union(each) / 1e6:.2f}</td>" for each in spans)
        yield f"<tr><td>{rank}</td>{times}<td>{hidden(events, rank):.0%}</td></tr>\n"


def svg(events: Sequence[Event]) -> str:
    """The picture alone."""
    begin, end = min(event.begin for event in events), max(event.end for event in events)
    end = max(end, begin + 1)
    scale = WIDTH / (end - begin)
    ranks = {rank: [(lane, rows(own)) for lane, own in lanes(events, rank)] for rank in {e.rank for e in events}}
    lines = sum(len(found) for of_rank in ranks.values() for _, found in of_rank)
    height = TOP + ROW * lines + GAP * len(ranks) + 8
    picture = Picture(LEFT + WIDTH + RIGHT, height, SIZE)
    _axis(picture, (end - begin) / 1e6, height)
    _legend(picture)
    y = TOP
    for rank, of_rank in sorted(ranks.items()):
        picture.text(0, y + 13, f"rank {rank}", font_weight="bold")
        for lane, found in of_rank:
            picture.text(LEFT - 8, y + 13, lane, text_anchor="end", fill="#666666")
            for row in found:
                for event in row:
                    _span(picture, event, LEFT + (event.begin - begin) * scale, y, scale)
                y += ROW
        y += GAP
    return str(picture)


def _legend(picture: Picture) -> None:
    for place, (kind, color) in enumerate(COLORS.items()):
        x = LEFT + 130 * place
        picture.add("rect", x=x, y=0, width=12, height=12, fill=color)
        picture.text(x + 17, 11, kind)


def _span(picture: Picture, event: Event, x: float, y: int, scale: float) -> None:
    width = max((event.end - event.begin) * scale, 0.5)
    size = f", {event.bytes / 1e6:.3g} MB" if event.bytes else ""
    about = f"{event.kind}: {event.name}: {(event.end - event.begin) / 1e6:.3f} ms{size}"
    picture.add("rect", about, x=x, y=y, width=width, height=ROW - 3, fill=COLORS[event.kind])
    if event.kind in ("stage", *COMPUTE) and width_of(event.name, INSIDE) < width:
        picture.text(x + 3, y + 12, event.name, fill="#ffffff", font_size=INSIDE, pointer_events="none")


def _axis(picture: Picture, milliseconds: float, height: int) -> None:
    """Draws about ten lines, at round numbers."""
    step = 10.0 ** len(str(int(milliseconds / 10))) / 10 if milliseconds >= 10 else 0.1
    while milliseconds / step > 12:
        step *= 2
    for number in range(int(milliseconds / step) + 1):
        x = LEFT + number * step / milliseconds * WIDTH
        picture.add("line", x1=x, x2=x, y1=30, y2=height, stroke="#dddddd")
        picture.text(x, 27, f"{number * step:g} ms", fill="#666666", font_size=AXIS)
