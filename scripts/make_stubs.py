"""Writes python/shardwise/_C.pyi from the built extension module; with --check it only compares."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "python" / "shardwise"
STUBS = PACKAGE / "_C.pyi"


def made() -> str:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pybind11_stubgen", "shardwise._C", "-o", folder]
        environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"shardwise: pybind11-stubgen failed:\n{done.stdout}{done.stderr}")
        text = (Path(folder) / "shardwise" / "_C.pyi").read_text()
    # The pybind11 that newer versions of torch bring says more of numbers.
    text = text.replace(" | typing.SupportsIndex", "")
    # The version changes with the build, and our ValueError is also one of Python's.
    text = re.sub(r"^__version__: str = .*$", "__version__: str", text, flags=re.MULTILINE)
    text = text.replace("class ValueError(Error, ValueError):", "class ValueError(Error, builtins.ValueError):")
    text = text.replace("import collections.abc\n", "import builtins\nimport collections.abc\n", 1)
    # torch has no type stubs for its C++ modules.
    text = re.sub(r"^import torch\._C\.cpp.*\n", "", text, flags=re.MULTILINE)
    text = text.replace("torch._C.cpp.nn.Module", "typing.Any")
    # Bare dicts and functions.
    text = re.sub(r"\bdict\b(?!\[)", "dict[str, typing.Any]", text)
    text = re.sub(r"\bcollections\.abc\.Callable\b(?!\[)", "collections.abc.Callable[..., typing.Any]", text)
    return "# Made by scripts/make_stubs.py from csrc/bindings.\n" + text


def main(check: bool) -> None:
    text = made()
    if check and STUBS.read_text() != text:
        sys.exit(f"shardwise: {STUBS.name} is not what the bindings say. Run scripts/python scripts/make_stubs.py.")
    if not check:
        STUBS.write_text(text)


if __name__ == "__main__":
    main("--check" in sys.argv[1:])
