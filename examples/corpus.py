"""The text of the demo: what every machine with Python has, Python's own sources."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from training import DemoError

LIMIT = 4_000_000


def write_corpus(file: Path) -> int:
    """Writes the standard library's top modules one after the other, by name, and returns the number of bytes."""
    library = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for source in sorted(library.glob("*.py")):
        text += source.read_bytes()
        if len(text) >= LIMIT:
            break
    if not text:
        raise DemoError(
            f"demo: the standard library in {library} has no .py files to train on (is it zipped?). "
            "Use a Python with sources, or run the example itself with --corpus and any text."
        )
    del text[LIMIT:]
    file.write_bytes(text)
    return len(text)
