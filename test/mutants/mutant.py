"""One way to break the engine on purpose."""

from __future__ import annotations

from dataclasses import dataclass

BOTH = ("C++", "Python")


@dataclass(frozen=True)
class Mutant:
    """One change of one place: `old` stands exactly once in `file`. Tests must fail in each of the languages."""

    name: str
    file: str
    old: str
    new: str
    languages: tuple[str, ...] = ("C++",)
    # C++ suites that are asked first, where the usual ones would be asked for long. Of the package: files.
    suites: str = ""

    @property
    def is_in_package(self) -> bool:
        """Whether nothing is to be built."""
        return self.file.startswith("python/")
