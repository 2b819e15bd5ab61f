"""The ways to break the engine on purpose (mutants.tsv), and their places in the sources.

A mutant replaces `old`, which stands once in the function or class of that name, wherever this is in csrc or
python/shardwise; a space stands for any white space. `cpp` and `python` are the tests that noticed it last: it is for
the languages that have one. A new mutant has a `?` there, with ` (late)` if only ranks on the late device notice it.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import astuple, dataclass

from programs import ROOT

TABLE = ROOT / "test" / "mutants.tsv"
COLUMNS = ["mutant", "function", "old", "new", "cpp", "python"]
NOT_NOTICED = "(not noticed)"

#: What may hold brackets that are none.
SPOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|R"\w*\(.*?\)\w*"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', re.DOTALL)
#: Between the parameters of a function and its body or its members' values; a value, before its brackets.
BEHIND = re.compile(r"(?:\s|const\b|noexcept\b|override\b|final\b|&|->\s*[\w:<>,&* ]+?(?=\s*\{))*")
MEMBER = re.compile(r"\s*[,:](?!:)\s*[\w:<>]+\s*(?=[({])")


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
        spans = [(file, span) for file in files for span in spans_of(self.function, file)]
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
    header, *rows = [line.split("\t") for line in TABLE.read_text().splitlines()]
    assert header == COLUMNS, f"{TABLE.name}: the first line must be {COLUMNS}"
    return [Mutant(*row) for row in rows]


def write_table(mutants: list[Mutant]) -> None:
    TABLE.write_text("".join("\t".join(row) + "\n" for row in [COLUMNS, *map(astuple, mutants)]))


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


def spans_of(function: str, file: str) -> Iterator[tuple[int, int]]:
    """Where functions or classes of this name begin and end."""
    text = sources()[file]
    if re.split(r"::|\.", function)[-1] not in text:
        return
    if not file.endswith(".py"):
        yield from _spans_in_cpp(function, _code_of(file))
        return
    starts = list(itertools.accumulate(map(len, text.splitlines(keepends=True)), initial=0))
    for node in _nodes_of(file, function):
        yield starts[node.lineno - 1], starts[node.end_lineno or node.lineno]


def _nodes_of(file: str, function: str) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    owner, _, name = function.rpartition(".")
    within = _nodes_of(file, owner) if owner else [_tree_of(file)]
    for node in (node for tree in within for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            yield node


@functools.cache
def _tree_of(file: str) -> ast.Module:
    return ast.parse(sources()[file])


@functools.cache
def _code_of(file: str) -> str:
    """With spaces for comments and strings."""
    return SPOKEN.sub(lambda spoken: " " * len(spoken[0]), sources()[file])


def _spans_in_cpp(function: str, code: str, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, int]]:
    end = len(code) if end is None else end
    name = re.escape(function)
    for found in re.compile(rf"(?<![\w~.>]){name}(?=\()").finditer(code, begin, end):
        at = _behind(BEHIND, code, _end_of_brackets(code, found.end()))
        while member := MEMBER.match(code, at):
            at = _end_of_brackets(code, member.end())
        at = _behind(BEHIND, code, at)
        if code[at : at + 1] == "{":
            yield found.start(), _end_of_brackets(code, at)
    for found in re.compile(rf"\b(?:class|struct) (?:[A-Z_]+ )?{name}\b[^;(){{]*(?={{)").finditer(code, begin, end):
        yield found.start(), _end_of_brackets(code, found.end())
    owner, _, member_name = function.rpartition("::")
    for span in _spans_in_cpp(owner, code, begin, end) if owner else ():
        yield from _spans_in_cpp(member_name, code, *span)


def _behind(pattern: re.Pattern[str], code: str, at: int) -> int:
    match = pattern.match(code, at)
    return match.end() if match else at


def _end_of_brackets(code: str, at: int) -> int:
    depth = 0
    for bracket in re.compile(r"[(){}]").finditer(code, at):
        depth += 1 if bracket[0] in "({" else -1
        if depth == 0:
            return bracket.end()
    return len(code)
