"""What rank 0 shows of all ranks."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence


class Progress:
    """A line that is drawn anew on a terminal, a line now and then elsewhere."""

    def __init__(self, label: str, steps: int) -> None:
        self._label = label
        self._steps = steps
        self._terminal = sys.stdout.isatty()
        self._shown = 0
        self._begin = time.monotonic()

    def due(self, step: int) -> bool:
        """Whether there is something to show after this step. Depends on the step alone, so that ranks agree."""
        return step in (1, self._steps) or step % max(1, self._steps // 100) == 0

    def show(self, step: int, loss: float, tokens_per_second: float, memory_mib: Sequence[float]) -> None:
        twelfth = max(1, self._steps // 12)
        if not self._terminal and step not in (1, self._steps) and step // twelfth == self._shown // twelfth:
            return
        self._shown = step
        left = f"{self._label} {step:{len(str(self._steps))}}/{self._steps} "
        right = f"  loss {loss:.3f}  {tokens_per_second:.0f} tokens/s  {_memory(memory_mib)}  {self._time_left(step)}"
        if not self._terminal:
            print(left + right, flush=True)
            return
        bar = self._bar(step, shutil.get_terminal_size().columns - len(left) - len(right) - 1)
        print(f"\r{left}{bar}{right}\x1b[K", end="\n" if step == self._steps else "", flush=True)

    def _time_left(self, step: int) -> str:
        passed = time.monotonic() - self._begin
        if step == self._steps:
            return f"{passed:.0f} s in all"
        return f"{passed / step * (self._steps - step):.0f} s left"

    def _bar(self, step: int, room: int) -> str:
        width = min(max(room, 0), 40)
        filled = width * step // self._steps
        full, empty = ("━", "─") if _unicode() else ("#", ".")
        return full * filled + empty * (width - filled)


def _memory(mib: Sequence[float]) -> str:
    """Each rank's memory, or their range where there are many."""
    if len(mib) <= 4:
        return " | ".join(f"{value:.0f}" for value in mib) + " MiB"
    return f"{len(mib)} x {min(mib):.0f}-{max(mib):.0f} MiB"


def _unicode() -> bool:
    values = (os.environ.get(name, "") for name in ("LC_ALL", "LC_CTYPE", "LANG"))
    return "UTF-8" in next((value for value in values if value), "")
