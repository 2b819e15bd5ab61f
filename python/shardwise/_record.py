"""record(): what the ranks do and when, for `python -m shardwise timeline`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from shardwise import _C


@contextmanager
def record(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Records what the ranks of this process do in the `with` block, in a new file in `folder` named by the rank.

    It records forwards and backwards of units, collectives from start to end, and how long this rank waited for them.
    `python -m shardwise timeline FOLDER` draws the record. The environment variable SHARDWISE_RECORD names a folder in
    which to record a whole program. A folder that cannot be written raises shardwise.Error before anything runs.

    >>> with shardwise.record("timeline"):
    ...     train_step()
    """
    target = Path(_C.make_record_file(os.fspath(folder), _rank()))
    _C.start_record()
    try:
        yield
    finally:
        target.write_text(_C.stop_record())


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else int(os.environ.get("RANK") or 0)
