"""The files that ranks record to, and the events in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

COMPUTE = ("forward", "backward")
GATHERS = ("all-gather", "broadcast")
SUMS = ("reduce-scatter", "all-reduce")
WIRE = (*GATHERS, *SUMS)
KINDS = (*COMPUTE, "wait", *WIRE)


@dataclass(frozen=True)
class Event:
    """Something that took a rank some time, or that a collective of it took."""

    kind: str
    name: str
    rank: int
    #: Nanoseconds.
    begin: int
    end: int
    bytes: int


#: What a file has of an event.
_FIELDS = {"kind": str, "name": str, "rank": int, "begin": int, "end": int, "bytes": int}


_SPACE = re.compile(r"\s*")


def read(folder: Path) -> list[Event]:
    """Of all files that programs wrote there, the earliest first. ValueError for a file that is no record."""
    events: list[Event] = []
    for file in sorted(folder.glob("shardwise-*.json")):
        try:
            events += _events(file.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(
                f"shardwise: {file} is not a record that a program wrote: {error}. Remove it, or record anew."
            ) from None
    if not events:
        raise ValueError(
            f"shardwise: nothing was recorded in {folder}: run the program with SHARDWISE_RECORD={folder}, or its "
            "steps inside of shardwise.record()."
        )
    return _forwards_ended(sorted(events, key=lambda event: event.begin))


def _events(data: bytes) -> Iterator[Event]:
    """Those of a file, which is one list of them. An error names the line, and which event is wrong."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"line {data.count(10, 0, error.start) + 1}: {error}") from None
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("line 1: there are lists in lists, too many to read") from None
    if not isinstance(found, list):
        raise ValueError(f"line 1: it has a {type(found).__name__} in the place of a list")
    for number, each in enumerate(found):
        try:
            yield _event(each)
        except ValueError as error:
            raise ValueError(f"line {_line_of(text, number)}, event {number + 1}: {error}") from None


def _line_of(text: str, number: int) -> int:
    """The line where an item of a list begins; the first one has the number 0."""
    at = text.index("[")
    for _ in range(number):
        at = json.JSONDecoder().raw_decode(text, _next(text, at))[1]
        at = text.index(",", at)
    return text.count("\n", 0, _next(text, at)) + 1


def _next(text: str, at: int) -> int:
    """Where something begins after the mark that stands there."""
    found = _SPACE.match(text, at + 1)
    return found.end() if found else at


def _event(found: Any) -> Event:
    """One that a file tells of, which anybody may have written."""
    if not isinstance(found, dict) or set(found) != _FIELDS.keys():
        raise ValueError(f"an event has {sorted(_FIELDS)}, and one is {found!r:.200}")
    for name, kind in _FIELDS.items():
        if type(found[name]) is not kind:
            raise ValueError(f"'{name}' of an event is {found[name]!r:.200}, and not a {kind.__name__}")
    numbers_fit = (
        0 <= found["begin"] <= found["end"] < 2**63 and 0 <= found["rank"] < 2**31 and 0 <= found["bytes"] < 2**63
    )
    if found["kind"] not in KINDS or not numbers_fit:
        raise ValueError(f"there is an event {found!r:.200}, of a kind or with numbers that no program writes")
    return Event(**found)


def _forwards_ended(events: Sequence[Event]) -> list[Event]:
    """The same, with each forward at an end where a backward of its rank begins.

    Where a module is called directly nobody sees its end, and its forward is written down as long as its unit stays
    open, which is until something else is used. `events` are the earliest first.
    """
    backwards: dict[int, int] = {}
    ended: list[Event] = []
    for event in reversed(events):
        if event.kind == "backward":
            backwards[event.rank] = event.begin
        if event.kind == "forward":
            event = replace(event, end=min(event.end, backwards.get(event.rank, event.end)))
        ended.append(event)
    return ended[::-1]
