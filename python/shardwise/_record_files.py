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
KINDS = ("step", "stage", *COMPUTE, "wait", *WIRE)


@dataclass(frozen=True)
class Event:
    """A span of time of one rank: a computation, a wait or a collective."""

    kind: str
    name: str
    rank: int
    #: In nanoseconds, like `end`.
    begin: int
    end: int
    bytes: int


#: The fields of an event in a file.
_FIELDS = {"kind": str, "name": str, "rank": int, "begin": int, "end": int, "bytes": int}


_SPACE = re.compile(r"\s*")


def read(folder: Path) -> list[Event]:
    """The events in all files of a folder, the earliest first. Raises ValueError for a file that is not a record."""
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
    """The events in a file, which is one JSON list. An error names the line and the event at fault."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"line {data.count(10, 0, error.start) + 1}: {error}") from None
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("line 1: lists are nested too deeply") from None
    if not isinstance(found, list):
        raise ValueError(f"line 1: expected a list, found a {type(found).__name__}")
    for number, each in enumerate(found):
        try:
            yield _event(each)
        except ValueError as error:
            raise ValueError(f"line {_line_of(text, number)}, event {number + 1}: {error}") from None


def _line_of(text: str, number: int) -> int:
    """The line on which item `number` of the list begins, counting from 0."""
    at = text.index("[")
    for _ in range(number):
        at = json.JSONDecoder().raw_decode(text, _next(text, at))[1]
        at = text.index(",", at)
    return text.count("\n", 0, _next(text, at)) + 1


def _next(text: str, at: int) -> int:
    """The position of the first non-space character after `at`."""
    found = _SPACE.match(text, at + 1)
    return found.end() if found else at


def _event(found: Any) -> Event:
    """An event from a file, checked, because anybody may have written the file."""
    if not isinstance(found, dict) or set(found) != _FIELDS.keys():
        raise ValueError(f"an event must have the fields {sorted(_FIELDS)}, but one is {found!r:.200}")
    for name, kind in _FIELDS.items():
        if type(found[name]) is not kind:
            raise ValueError(f"'{name}' of an event must be a {kind.__name__}, not {found[name]!r:.200}")
    numbers_fit = (
        0 <= found["begin"] <= found["end"] < 2**63 and 0 <= found["rank"] < 2**31 and 0 <= found["bytes"] < 2**63
    )
    if found["kind"] not in KINDS or not numbers_fit:
        raise ValueError(f"there is an event with an unknown kind or impossible numbers, {found!r:.200}")
    return Event(**found)


def _forwards_ended(events: Sequence[Event]) -> list[Event]:
    """The same events, but a forward ends at the latest when a backward of its rank begins.

    If a module is called directly, nobody sees its end. Its forward is then recorded until its unit closes, which is
    when something else is used. `events` are sorted, the earliest first.
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
