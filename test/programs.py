"""Runs programs with a time limit, their output in a log; asks git, and copies the sources."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run_program(
    command: list[str], log: Path, limit: float, cwd: Path, environment: dict[str, str]
) -> tuple[str, float]:
    """Returns how the program failed (empty if its exit status was 0), and the seconds of CPU time of it and of all
    that it waited for. Past the limit, all its processes are ended."""
    with log.open("a") as output:
        output.write(f"$ {' '.join(command)}\n")
        output.flush()
        try:
            program = subprocess.Popen(command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                                       stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
        except OSError as error:
            return f"it could not be started: {error}", 0
        began = time.monotonic()
        timer = threading.Timer(limit, os.killpg, (program.pid, signal.SIGKILL))
        timer.start()
        try:
            _, ended, used = os.wait4(program.pid, 0)
        except BaseException:
            os.killpg(program.pid, signal.SIGKILL)
            raise
        finally:
            timer.cancel()
    status = program.returncode = os.waitstatus_to_exitcode(ended)
    how = f"it ended with status {status}" if status else ""
    if time.monotonic() - began >= limit:
        how = f"it was ended after {limit:g} s"
    elif status < 0:
        how = f"it crashed with {signal.Signals(-status).name}"
    return how, used.ru_utime + used.ru_stime


def last_lines(log: Path, number: int) -> str:
    if not log.exists():
        return "It left no output."
    return "\n".join(["The last lines of its output:", *log.read_text(errors="replace").splitlines()[-number:]])


def git(*words: str) -> str:
    """What git says of this checkout; nothing where it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def current_commit() -> str:
    """The commit with a + where files differ from it."""
    return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")


def copy_sources(to: Path) -> None:
    """Makes the sources in a folder those of this checkout; a file that is the same keeps its time, for the build."""
    to.mkdir(parents=True, exist_ok=True)
    listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    wanted = {name for name in listed if name and (ROOT / name).is_file()}
    listing = to / ".sources"
    before = set(listing.read_text().split("\0")) if listing.exists() else set()
    for name in before - wanted:
        (to / name).unlink(missing_ok=True)
    for name in wanted:
        source, target = ROOT / name, to / name
        if not target.exists() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    listing.write_text("\0".join(sorted(wanted)))
