"""Checks which folders of csrc include which: only ones below them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent / "csrc"
#: Each folder, and the folders below it that it may include; every folder may include itself and the public headers.
BELOW = {
    "base": "",
    "observe": "",
    "layout": "",
    "cuda": "base",
    "transport": "base cuda",
    "comm": "base observe transport",
    "group": "base observe layout cuda transport comm",
    "engine": "base observe layout comm group",
    "nn": "base comm group engine",
    "optim": "base comm group engine nn",
    "python_front": "base group engine",
    "bindings": "base comm group engine observe python_front",
}
#: The only headers of a folder that others may include, if not all.
DOORS = {"transport": {"transport/transport.h"}, "engine": {"engine/front_end.h"}}
INCLUDE = re.compile(r'^#include "([a-z_]+)/([^"]+)"', re.MULTILINE)


def wrong_arrows(folder: str, text: str) -> Iterator[str]:
    """Includes in a file of this folder that are not allowed."""
    for other, rest in INCLUDE.findall(text):
        header = f"{other}/{rest}"
        if other == folder:
            continue
        if other not in BELOW[folder].split():
            yield f"includes {header}, but {folder} may not see {other}"
        elif header not in DOORS.get(other, {header}):
            yield f"includes {header}, but others see {other} by {', '.join(sorted(DOORS[other]))} alone"


def problems() -> Iterator[str]:
    for folder in sorted(path.name for path in CSRC.iterdir() if path.is_dir() and path.name != "include"):
        if folder not in BELOW:
            yield f"csrc/{folder}: scripts/arrows.py does not know this folder"
            continue
        for file in sorted((CSRC / folder).rglob("*")):
            if file.suffix in {".h", ".cpp", ".cu"}:
                yield from (
                    f"{file.relative_to(CSRC.parent)}: {what}" for what in wrong_arrows(folder, file.read_text())
                )


def main() -> int:
    found = list(problems())
    print("\n".join(found or ["arrows: all go down"]))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
