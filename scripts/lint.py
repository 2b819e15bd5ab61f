"""Checks formatting, types and rules without changing anything. With --fix: formats the files instead."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import arrows
import check_docs
import house_rules
from probe_python import torch_folder

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
STAMPS = ROOT / "build" / "lint"
PYTHON_CHECKED = ("scripts", "test/run.py")
# clang-tidy takes over a minute for a file that includes one of these.
COSTLY = re.compile(r"torch/(torch|extension|python)\.h|torch/csrc/api/|torch/csrc/utils/pybind\.h|pybind11/")
BATCH = 24


def program(name: str) -> str:
    """The program that prepare.py found: beside the interpreter, or else on the PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name) or name


def sources(*endings: str) -> list[str]:
    return [name for name in house_rules.files() if name.endswith(endings) and not name.startswith("third_party/")]


def run(*command: str) -> bool:
    return subprocess.run([program(command[0]), *command[1:]], cwd=ROOT).returncode == 0


# clang-tidy


def own_headers(source: Path) -> tuple[set[Path], set[str]]:
    """The files of csrc that a file includes, at any depth, with itself; and the other headers that these include."""
    own, others, waiting = set(), set(), [source]
    while waiting:
        file = waiting.pop()
        if file in own:
            continue
        own.add(file)
        for name in re.findall(r'^#include ["<]([^">]+)[">]', file.read_text(), re.MULTILINE):
            places = [folder / name for folder in (file.parent, CSRC, CSRC / "include")]
            found = [place.resolve() for place in places if place.exists()]
            waiting += found[:1]
            others |= set() if found else {name}
    return own, others


def tidy_flags() -> list[str]:
    torch = Path(torch_folder())
    return ["-std=c++20", "-I", str(CSRC), "-I", str(CSRC / "include"), "-isystem", str(torch / "include"),
            "-isystem", str(torch / "include" / "torch" / "csrc" / "api" / "include"),
            "-isystem", str(CSRC / "comm" / "mesh" / "gloo_headers"), "-I", str(STAMPS / "include"),
            *(["-isystem", os.environ["SHARDWISE_DEPS"]] if os.environ.get("SHARDWISE_DEPS") else []),
            "-DNDEBUG", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO", "-DSHARDWISE_BUILD"]  # fmt: skip


def write_version_header() -> None:
    text = (CSRC / "version.h.in").read_text()
    header = STAMPS / "include" / "shardwise" / "version.h"
    header.parent.mkdir(parents=True, exist_ok=True)
    header.write_text(re.sub(r"@\w+@", "0.0.0", text))


def batches() -> list[list[Path]]:
    """Groups of files with cheap headers: most of the time goes into the headers that they share. Those of csrc/cuda
    need headers of CUDA."""
    checked = [source for source in sorted(CSRC.rglob("*.cpp")) if source.parent != CSRC / "cuda"]
    cheap = [source for source in checked if not any(map(COSTLY.match, own_headers(source)[1]))]
    return [cheap[first : first + BATCH] for first in range(0, len(cheap), BATCH)]


def clang_tidy() -> bool:
    """Checks a batch again only if one of its files, a header of ours or a rule changed."""
    write_version_header()
    flags = tidy_flags()
    common = [(ROOT / ".clang-tidy").read_text(), (ROOT / "scripts" / "requirements-lint.txt").read_text(), *flags]

    def check(sources: list[Path]) -> subprocess.CompletedProcess[str] | None:
        own = set[Path]().union(*(own_headers(source)[0] for source in sources))
        key = hashlib.sha256("\0".join([*common, *(file.read_text() for file in sorted(own))]).encode()).hexdigest()
        batch = STAMPS / f"{sources[0].relative_to(CSRC).as_posix().replace('/', '-')}"
        stamp = batch.with_suffix(".stamp")
        if stamp.exists() and stamp.read_text() == key:
            return None
        batch.write_text("".join(f'#include "{source}" // NOLINT(bugprone-suspicious-include)\n' for source in sources))
        command = [program("clang-tidy"), "--quiet", str(batch), "--", *flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode == 0:
            stamp.write_text(key)
        return done

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        done = [result for result in pool.map(check, batches()) if result]
    for result in done:
        if result.returncode != 0:
            print(result.stdout + result.stderr)
    return all(result.returncode == 0 for result in done)


def clang_format(*options: str) -> bool:
    return run("clang-format", *options, *sources(".h", ".cpp"))


def shell_scripts() -> list[str]:
    return ["scripts/python", ".ci/run", *sources(".sh")]


def main() -> int:
    if sys.argv[1:] == ["--fix"]:
        return int(not all([clang_format("-i"), run("ruff", "check", "--fix", "."), run("ruff", "format", ".")]))
    checks: dict[str, Callable[[], bool]] = {
        "clang-format": lambda: clang_format("--dry-run", "-Werror"),
        "ruff check": lambda: run("ruff", "check", "."),
        "ruff format": lambda: run("ruff", "format", "--check", "."),
        "mypy": lambda: run("mypy"),
        "mypy of the scripts": lambda: run("mypy", "--strict", *PYTHON_CHECKED),
        "shellcheck": lambda: run("shellcheck", *shell_scripts()),
        "clang-tidy": clang_tidy,
        "house rules": lambda: house_rules.main() == 0,
        "arrows": lambda: arrows.main() == 0,
        "docs": lambda: check_docs.main() == 0,
    }
    failed = []
    for name, check in checks.items():
        began = time.monotonic()
        good = check()
        print(f"lint: {name}: {'good' if good else 'FAILED'} ({time.monotonic() - began:.1f} s)", flush=True)
        failed += [] if good else [name]
    print(f"lint: {', '.join(failed)} failed" if failed else "lint: all good", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
