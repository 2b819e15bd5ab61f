"""python -m shardwise timeline: draws what ranks recorded."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shardwise import _chrome_trace, _record_files, _timeline

ABOUT = "draws what ranks recorded (SHARDWISE_RECORD, shardwise.record()) as one page that opens in any browser"


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", type=Path, help="where the ranks' files are")
    command.add_argument("--out", type=Path, help="the page; one that ends in .svg is the picture alone")
    command.add_argument("--last", type=int, default=2, metavar="STEPS", help="how many of the last steps (default: 2)")
    command.add_argument(
        "--chrome", type=Path, metavar="FILE", help="also all steps in Chrome's trace format, for ui.perfetto.dev"
    )


def run(arguments: argparse.Namespace) -> int:
    out = arguments.out or arguments.folder / "timeline.html"
    try:
        recorded = _record_files.read(arguments.folder)
        events = _timeline.last_steps(recorded, max(arguments.last, 1))
        picture = _timeline.svg(events) if out.suffix == ".svg" else _timeline.page(events)
        _write(out, picture, "--out")
        if arguments.chrome:
            _write(arguments.chrome, _chrome_trace.trace(recorded), "--chrome")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    for rank in sorted({event.rank for event in events}):
        print(f"rank {rank}: {_timeline.hidden(events, rank):.0%} of the time on the wire was not waited for")
    print(out)
    if arguments.chrome:
        print(arguments.chrome)
    return 0


def _write(file: Path, text: str, option: str) -> None:
    try:
        file.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ValueError(
            f"shardwise: the timeline could not be written: {error}. Name another file with {option}."
        ) from None
