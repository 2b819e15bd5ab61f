"""Checks the documentation: links between files resolve, and the commands shown exist.

A command is a line of a code block for a shell, or a piece of inline code: `make NAME`, or a program of this
repository, such as `python examples/demo.py`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import house_rules

ROOT = Path(__file__).resolve().parent.parent


def pages() -> list[Path]:
    return [ROOT / name for name in house_rules.files() if name.endswith(".md")]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def block_commands(text: str) -> list[str]:
    """The commands in shell code blocks."""
    blocks = re.findall(r"^ *```(?:sh|bash|shell|console)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    lines = [line.split(" #")[0].removeprefix("$ ").strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def inline_commands(text: str) -> list[str]:
    outside = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", outside)]


def command_problems(commands: list[str], targets: set[str]) -> Iterator[str]:
    for command in commands:
        words = command.split()
        if words[0] == "make":
            for word in words[1:]:
                if re.fullmatch(r"[a-z][a-z-]*", word) and word not in targets:
                    yield f"`{command}`: the Makefile has no target {word}"
        for word in words[1 if words[0] in ("python", "python3", "scripts/python", "bash", "sh") else 0 :][:1]:
            is_ours = re.fullmatch(r"[\w.-]+(/[\w.-]+)+", word) and (ROOT / word.split("/")[0]).is_dir()
            if is_ours and not (ROOT / word).exists() and word.split("/")[0] not in ("build", "dist"):
                yield f"`{command}`: there is no {word}"


def link_problems(page: Path, text: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        if not linked.exists():
            yield f"links to {target}, which is not there"
        elif anchor and linked.suffix == ".md" and anchor not in anchors(linked.read_text()):
            yield f"links to {target}, which has no such heading"


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def problems() -> Iterator[str]:
    targets = make_targets()
    for page in pages():
        text = page.read_text()
        found = [*link_problems(page, text), *command_problems(block_commands(text) + inline_commands(text), targets)]
        yield from (f"{page.relative_to(ROOT)}: {problem}" for problem in found)


def main() -> int:
    found = list(problems())
    print("\n".join(found or [f"docs: the links and commands of {len(pages())} pages are right"]))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
