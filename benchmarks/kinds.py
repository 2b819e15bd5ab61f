"""Kinds of functions, which a profile is told by."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """Of functions whose file, the library or program, and whose name fit these patterns."""

    name: str
    file: str
    function: str


def kind_of(kinds: Sequence[Kind], file: str, function: str) -> str:
    """The first that fits."""
    return next(each.name for each in kinds if re.search(each.file, file) and re.search(each.function, function))
