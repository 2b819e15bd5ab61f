"""python -m shardwise checkpoint: what a checkpoint has, whether it is what was saved, and its tensors in whole."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# The engine is imported only when a checkpoint is read, so that other commands can say what is wrong with it.
if TYPE_CHECKING:
    from shardwise import _C

ABOUT = "lists what a sharded checkpoint has, verifies it, merges it into one of Hugging Face's, or removes leftovers"
GIGABYTE = 10**9


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "folder", type=Path, help="a checkpoint, or a folder with step-N: then the newest complete one"
    )
    command.add_argument("--verify", action="store_true", help="read all of it and compare checksums")
    command.add_argument(
        "--merge", type=Path, metavar="FOLDER",
        help="write the model's tensors whole to a new folder, for from_pretrained() and other readers of safetensors",
    )  # fmt: skip
    command.add_argument(
        "--file-size", type=float, default=5, metavar="GB", help="how large a file of --merge may be (default: 5)"
    )
    command.add_argument(
        "--leftovers", action="store_true", help="list what saves that died left beside the checkpoints in FOLDER"
    )
    command.add_argument(
        "--remove-leftovers", action="store_true", help="remove those whose processes have ended, as the next save does"
    )


def run(arguments: argparse.Namespace) -> int:
    from shardwise import _C

    folder = str(arguments.folder)
    try:
        if arguments.leftovers or arguments.remove_leftovers:
            print("\n".join(_leftovers(folder, arguments.remove_leftovers)))
            return 0
        if newest := _C.newest_step(folder):
            folder = newest[1]
        if arguments.merge:
            files = _C.merge_checkpoint(folder, str(arguments.merge), max(1, int(arguments.file_size * GIGABYTE)))
            print("\n".join(str(arguments.merge / name) for name in files))
        elif arguments.verify:
            return _verify(folder)
        else:
            print("\n".join(_listed(_C.SavedFolder(folder))))
    except (_C.Error, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _verify(folder: str) -> int:
    from shardwise import _C

    problems = _C.verify_checkpoint(folder)
    print("\n".join(problems) if problems else f"{folder} is what was saved.")
    return 1 if problems else 0


def _leftovers(root: str, remove: bool) -> Iterator[str]:
    from shardwise import _C

    if (Path(root) / "shardwise.json").exists():
        root = str(Path(root).parent)  # they lie beside a checkpoint
    if remove:
        yield from (f"removed {path}" for path in _C.remove_dead_leftovers(root))
    left = _C.leftovers(root)
    for path, is_dead in left:
        yield f"{path}: its process {'has ended' if is_dead else 'runs, or ran on another host'}"
    if not left:
        yield f"{root} has no leftovers."


def _listed(saved: _C.SavedFolder) -> Iterator[str]:
    by = (
        f"by {saved.world} rank{'s' if saved.world != 1 else ''}"
        if saved.world
        else "by another program than shardwise"
    )
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in saved.tensors.items()}
    yield f"{saved.path}: {_bytes(sum(sizes.values()))} in {len(saved.files)} files, written {by}"
    for name, value in saved.values.items():
        yield f"  {name} = {value!r}"
    for name, unknown in saved.unknown.items():
        yield f"  {name} has the dtype {unknown}, which torch does not have"
    width = max(map(len, saved.tensors), default=0)
    for name, (dtype, shape) in saved.tensors.items():
        kind = str(dtype).removeprefix("torch.")
        yield f"  {name:<{width}}  {kind:<8}  {shape}  {_bytes(sizes[name])}"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
