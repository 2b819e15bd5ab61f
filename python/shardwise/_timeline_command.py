"""python -m shardwise timeline: draws what ranks recorded."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shardwise import _timeline

ABOUT = "draws what ranks recorded (SHARDWISE_RECORD, shardwise.record()) as one page that opens in any browser"


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", type=Path, help="where the ranks' files are")
    command.add_argument("--out", type=Path, help="the page; one that ends in .svg is the picture alone")
    command.add_argument("--last", type=int, default=2, metavar="STEPS", help="how many of the last steps (default: 2)")


def run(arguments: argparse.Namespace) -> int:
    out = arguments.out or arguments.folder / "timeline.html"
    try:
        events = _timeline.last_steps(_timeline.read(arguments.folder), max(arguments.last, 1))
        picture = _timeline.svg(events) if out.suffix == ".svg" else _timeline.page(events)
        out.write_text(picture, encoding="utf-8", errors="backslashreplace")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"shardwise: the timeline could not be written: {error}. Name another file with --out.", file=sys.stderr)
        return 1
    for rank in sorted({event.rank for event in events}):
        print(f"rank {rank}: {_timeline.hidden(events, rank):.0%} of the time on the wire was not waited for")
    print(out)
    return 0
