"""record(): what the ranks do and when, for `python -m shardwise timeline`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwise import _C


@contextmanager
def record(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Writes down what the ranks of this process do inside of it, to a file of this process in `folder`.

    Forwards and backwards of units, collectives from their start until they are done, and how long this rank waited for
    them. `python -m shardwise timeline FOLDER` draws it. The environment variable SHARDWISE_RECORD, a folder, does it
    for a whole program.

    >>> with shardwise.record("timeline"):
    ...     train_step()
    """
    _C.start_record()
    try:
        yield
    finally:
        events = _C.stop_record()
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        (target / f"shardwise-{os.getpid()}.json").write_text(events)
