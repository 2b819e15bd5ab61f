"""Checks which folders of csrc include which: only ones below them; and that what anything includes is there."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
#: Where sources are that include headers of ours, which CI does not compile all of.
SOURCES = ("csrc", "test", "benchmarks", "examples")
#: Where their headers are, besides their own folders.
HEADERS = ("csrc", "csrc/include", "test", "test/cpp", "examples/cpp", "benchmarks/cpp", "test/cpp/support")
#: Each folder, and the folders below it that it may include; every folder may include itself and the public headers.
BELOW = {
    "base": "",
    "files": "base",
    "observe": "files",
    "layout": "",
    "kernels": "base",
    "transport": "base kernels",
    "comm": "base observe kernels transport",
    "cuda": "base kernels comm",
    "group": "base observe layout kernels transport comm",
    "engine": "base observe layout comm group",
    "split": "base layout comm",
    "nn": "base comm group engine split",
    "pipeline": "base comm engine nn observe",
    "tensor_parallel": "base layout comm engine nn observe split",
    "optim": "base comm group engine nn",
    "saves": "base layout comm group engine split nn optim files",
    "python_front": "base group engine",
    "bindings": "base comm group engine observe files saves python_front",
}
#: The only headers of a folder that others may include, if not all.
DOORS = {"transport": {"transport/transport.h"}, "engine": {"engine/front_end.h"}}
#: Headers of others that only these sources may include: nobody who includes a header of ours sees them.
KEPT_IN = {"nlohmann/": "files/json.cpp", "xxhash.h": "files/checksum.cpp"}
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


def escaped_headers(path: str, text: str) -> Iterator[str]:
    """Headers of others that this file of csrc includes, and may not."""
    for header, owner in KEPT_IN.items():
        if path != owner and re.search(rf'^#include [<"]{header}', text, re.MULTILINE):
            yield f"includes {header}, which {owner} alone may see"


def problems() -> Iterator[str]:
    for folder in sorted(path.name for path in CSRC.iterdir() if path.is_dir() and path.name != "include"):
        if folder not in BELOW:
            yield f"csrc/{folder}: scripts/arrows.py does not know this folder"
            continue
        for file in sorted((CSRC / folder).rglob("*")):
            if file.suffix in {".h", ".cpp", ".cu"}:
                text, name = file.read_text(), file.relative_to(CSRC)
                found = [*wrong_arrows(folder, text), *escaped_headers(name.as_posix(), text)]
                yield from (f"csrc/{name}: {what}" for what in found)


def missing_headers(file: Path, text: str) -> Iterator[str]:
    for header in re.findall(r'^#include "([^"]+)"', text, re.MULTILINE):
        if not any((folder / header).is_file() for folder in (file.parent, *(ROOT / each for each in HEADERS))):
            yield f"{file.relative_to(ROOT)}: includes {header}, which is not there"


def all_missing() -> Iterator[str]:
    for file in sorted(each for folder in SOURCES for each in (ROOT / folder).rglob("*")):
        if file.suffix in {".h", ".cpp", ".cu"}:
            yield from missing_headers(file, file.read_text())


def main() -> int:
    found = [*problems(), *all_missing()]
    print("\n".join(found or ["arrows: all go down"]))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
