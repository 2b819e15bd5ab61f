"""One way to break the engine on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

BOTH = ("C++", "Python")
PYTHON = ("Python",)


@dataclass(frozen=True)
class Mutant:
    """One change of one place: `old` stands exactly once in `file`. Tests must fail in each of the languages."""

    name: str
    file: str
    old: str
    new: str
    languages: tuple[str, ...] = ("C++",)
    # C++ suites that are asked first, where the usual ones would be asked for long. Of Python alone: files.
    suites: str = ""
    # Where the ranks of C++ train: "late" for what only test/late_device notices, in `suites` alone. Those whose names
    # begin with Late are in late_tests.
    device: str = "cpu"

    @property
    def is_in_package(self) -> bool:
        """Whether nothing is to be built."""
        return self.file.startswith("python/")

    @property
    def is_in_extension(self) -> bool:
        """Whether the extension module has to be built, and only Python's tests can notice."""
        return self.file.startswith(("csrc/python_front/", "csrc/bindings/"))


def python_mutants(folder: str) -> Callable[[str, str, str, str, str], Mutant]:
    """Makes mutants of files of a folder that only Python's tests can notice: name, file, old, new, suites."""
    return lambda name, file, old, new, suites: Mutant(name, f"{folder}/{file}", old, new, PYTHON, suites)
