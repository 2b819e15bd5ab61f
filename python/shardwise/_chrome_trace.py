"""What ranks recorded, in Chrome's trace format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from shardwise._record_files import Event
from shardwise._timeline import lanes


def trace(events: Sequence[Event]) -> str:
    """JSON with a process for each rank, and rows for what it computes, waits for, gathers and sums.

    Times are microseconds since the first event. The format wants the spans of a row to be nested or disjoint. If two
    overlap otherwise, the later one goes into another row.
    """
    begin = min(event.begin for event in events)
    names: list[dict[str, Any]] = []
    spans: list[dict[str, Any]] = []
    for rank in sorted({event.rank for event in events}):
        names += _named(rank, 0, "process", f"rank {rank}", rank)
        number = 0
        for lane, own in lanes(events, rank):
            for place, row in enumerate(nested_rows(own), start=1):
                number += 1
                names += _named(rank, number, "thread", lane if place == 1 else f"{lane} {place}", number)
                spans += (_span(event, number, begin) for event in row)
    spans.sort(key=lambda span: (span["ts"], -span["dur"]))
    return json.dumps({"traceEvents": [*names, *spans], "displayTimeUnit": "ms"}) + "\n"


def nested_rows(events: Sequence[Event]) -> list[list[Event]]:
    """Rows in which each span ends before the next begins, or contains it."""
    rows: list[list[Event]] = []
    #: For each row, the ends of the spans that are open, the innermost last.
    ends: list[list[int]] = []
    for event in sorted(events, key=lambda event: (event.begin, -event.end)):
        for open_ends in ends:
            while open_ends and open_ends[-1] <= event.begin:
                open_ends.pop()
        place = next((n for n, open_ends in enumerate(ends) if not open_ends or event.end <= open_ends[-1]), len(rows))
        if place == len(rows):
            rows.append([])
            ends.append([])
        rows[place].append(event)
        ends[place].append(event.end)
    return rows


def _named(process: int, thread: int, what: str, name: str, place: int) -> Iterator[dict[str, Any]]:
    """Metadata in terms of the format: a name, and its position among the others."""
    for key, value in ((f"{what}_name", {"name": name}), (f"{what}_sort_index", {"sort_index": place})):
        yield {"ph": "M", "pid": process, "tid": thread, "name": key, "args": value}


def _span(event: Event, thread: int, begin: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": event.rank,
        "tid": thread,
        "name": event.name,
        "cat": event.kind,
        "ts": (event.begin - begin) / 1000,
        "dur": (event.end - event.begin) / 1000,
        "args": {"kind": event.kind, "bytes": event.bytes},
    }
