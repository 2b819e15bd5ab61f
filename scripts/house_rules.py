"""Checks the rules of this repository that a program can check: what must not be in files."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import python_rules

ROOT = Path(__file__).resolve().parent.parent
# Files that are not ours or that a program makes, and tables that grow.
EXCEPT = (
    "third_party/", "benchmarks/results/", "LICENSE", "CHANGELOG.md", "test/rows.tsv", "test/row_exceptions.tsv",
    "python/shardwise/_C.pyi", "scripts/renamed.tsv",
)  # fmt: skip
OUTSIDE = {
    "a path of one machine": re.compile(r"(?<![\w.)}\]>-])/(?:home|root|work|Users|mnt)/\w"),
    "a path of one machine below /tmp": re.compile(r"(?<![\w.)}\]>-])/tmp/\w"),
    "a note of something undone": re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b"),
    "an old name, for which scripts/renamed.tsv has another": re.compile(
        rf"\b(?:{'|'.join(line.split()[0] for line in (ROOT / 'scripts/renamed.tsv').read_text().splitlines())})\b"
    ),
}


def files() -> list[str]:
    shown = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [name for name in shown.stdout.split("\0") if name and (ROOT / name).is_file()]


def text_problems(text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), start=1):
        yield from (f"line {number} has {what}" for what, pattern in OUTSIDE.items() if pattern.search(line))


def problems() -> Iterator[str]:
    for name in files():
        if not name.startswith(EXCEPT):
            try:
                text = (ROOT / name).read_text()
            except UnicodeDecodeError:
                yield f"{name}: no text; a file that is made by a program stays out"
                continue
            yield from (f"{name}: {problem}" for problem in text_problems(text))
            if name.endswith(".py"):
                yield from (f"{name}: {problem}" for problem in python_rules.function_problems(name, text))
    yield from python_rules.circle_problems(ROOT / "python" / "shardwise")


def main() -> int:
    found = list(problems())
    print("\n".join(found or [f"house rules: {len(files())} files keep them"]))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
