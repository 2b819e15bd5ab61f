"""Tests have two forms, as in C++ (test/cpp/support/form.h): the short one, of `make test`, shows each rule once, and
the long one, of `make test-all`, takes more ranks, steps and combinations. SHARDWISE_TEST_FORM=long asks for it.
"""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")


def by_form(in_short: T, in_long: T) -> T:
    return in_long if os.environ.get("SHARDWISE_TEST_FORM") == "long" else in_short
