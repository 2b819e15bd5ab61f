"""Runs a program with a time limit, its output in a log."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path


def run_program(command: list[str], log: Path, limit: float, cwd: Path, environment: dict[str, str]) -> str:
    """Returns how the program failed; empty if its exit status was 0. Past the limit, all its processes are ended."""
    with log.open("a") as output:
        output.write(f"$ {' '.join(command)}\n")
        output.flush()
        try:
            program = subprocess.Popen(command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                                       stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
        except OSError as error:
            return f"it could not be started: {error}"
        try:
            status = program.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return f"it was ended after {limit:g} s"
        finally:
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGKILL)
                program.wait()
    if status < 0:
        return f"it crashed with {signal.Signals(-status).name}"
    return f"it ended with status {status}" if status else ""


def last_lines(log: Path, number: int) -> str:
    if not log.exists():
        return "It left no output."
    return "\n".join(["The last lines of its output:", *log.read_text(errors="replace").splitlines()[-number:]])
