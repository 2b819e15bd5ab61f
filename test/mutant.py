"""The ways to break the engine on purpose (mutants.tsv), and their places in the sources.

A mutant replaces `old`, which stands once in the function or class of that name, wherever this is in csrc or
python/shardwise; a space stands for any white space. `cpp` and `python` are the tests that noticed it last: it is for
the languages that have one. A new mutant has a `?` there, with ` (late)` if only ranks on the late device notice it.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import tables
from programs import ROOT

TABLE = ROOT / "test" / "mutants.tsv"
NOT_NOTICED = "(not noticed)"


class PlaceError(Exception):
    """A mutant whose place is not there once."""


@dataclass(frozen=True)
class Mutant:
    """One line of the table."""

    name: str
    function: str
    old: str
    new: str
    cpp: str
    python: str

    @functools.cached_property
    def _place(self) -> tuple[str, int, int]:
        code = re.compile(r"\s+".join(map(re.escape, self.old.split())))
        files = [file for file, text in sources().items() if code.search(text)]
        spans = [(file, span) for file in files for span in spans_of(self.function, sources()[file])]
        found = {(file, *at.span()) for file, span in spans for at in code.finditer(sources()[file], *span)}
        if len(found) != 1:
            raise PlaceError(f"{self.name}: `{self.old}` is there {len(found)} times in {self.function}, not once")
        return found.pop()

    @property
    def file(self) -> str:
        return self._place[0]

    def changed(self) -> str:
        """The text of its file with the change."""
        file, begin, end = self._place
        return sources()[file][:begin] + self.new + sources()[file][end:]

    @property
    def is_late(self) -> bool:
        """Whether only ranks on the late device notice it: a test of late_tests, or one with a word of it."""
        return self.cpp.startswith("Late") or self.cpp.endswith("late)")

    @property
    def is_in_package(self) -> bool:
        """Whether nothing is to be built."""
        return self.file.startswith("python/")

    @property
    def is_in_extension(self) -> bool:
        """Whether the extension module has to be built, and only Python's tests can notice."""
        return self.file.startswith(("csrc/python_front/", "csrc/bindings/"))


def read_table() -> list[Mutant]:
    return [Mutant(*row.values()) for row in tables.read(TABLE)]


def places_of(title: str) -> list[str]:
    """A test of Python as pytest takes it, with its file; nothing if there is none."""
    group, _, name = title.partition("[")[0].rpartition("::")
    found = []
    test = re.compile(rf"\bdef {name}\(|\b{name} = on_ranks\(")
    for file in sorted((ROOT / "test" / "python").glob("*/test_*.py")) if name else ():
        text = file.read_text()
        if test.search(text) and (not group or f"class {group}" in text):
            found.append("::".join(filter(None, (str(file.relative_to(ROOT)), group, name))))
    return found


@functools.cache
def sources() -> dict[str, str]:
    files = itertools.chain((ROOT / "csrc").rglob("*.[ch]*"), (ROOT / "python" / "shardwise").glob("*.py"))
    return {str(file.relative_to(ROOT)): file.read_text() for file in sorted(files)}


def spans_of(function: str, text: str, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, int]]:
    """Where functions or classes of this name stand: a line that has it, and those below that are further in."""
    block = rf"^( *)(?:\S.*)?(?<![\w~.>]){function}\b.*(?:\n(?:\1 .*|\1\).*|#.*)?)*(?:\n\1\}}.*)?"
    for found in re.compile(block, re.MULTILINE).finditer(text, begin, len(text) if end is None else end):
        yield found.span()
    owner, _, member = function.replace(".", "::").rpartition("::")
    for span in spans_of(owner, text, begin, end) if owner else ():
        yield from spans_of(member, text, *span)
