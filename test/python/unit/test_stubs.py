"""The types that the package gives to type checkers are those of the extension module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_stubs_are_what_the_bindings_say() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "make_stubs.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
