"""Where and when a benchmark ran."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def facts() -> dict[str, str]:
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "machine": f"{len(os.sched_getaffinity(0))} cores of {processor()}, {memory_gib()} GiB, {platform.system()}",
        "load before": f"{os.getloadavg()[0]:.1f}",
        "shardwise": (ROOT / "VERSION").read_text().strip(),
        "torch": importlib.metadata.version("torch"),
        "Python": platform.python_version(),
        "compiler": first_line("c++", "--version"),
        "valgrind": first_line("valgrind", "--version"),
    }


def commit() -> str:
    """With a "+" where files differ from it."""
    name = first_line("git", "-C", str(ROOT), "rev-parse", "--short=9", "HEAD")
    return name + ("+" if first_line("git", "-C", str(ROOT), "status", "--porcelain", "-uno") != "none" else "")


def first_line(*command: str) -> str:
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "none"
    return said.splitlines()[0] if said else "none"


def processor() -> str:
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def memory_gib() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
