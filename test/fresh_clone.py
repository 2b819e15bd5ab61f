"""Clones the repository into an empty folder and runs the README's commands there, in a short form.

The clone is of the current commit: what is not committed is not in it. It uses the Python of this run, so nothing is
fetched. Each command counts as a test.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from programs import last_lines, run_program
from reports import FAILED, PASSED, SKIPPED, Result

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "scripts"))
from check_docs import block_commands  # noqa: E402

SUITE = "fresh_clone"
INSIDE = "SHARDWISE_INSIDE_FRESH_CLONE"
LIMIT = 900
# What stands in for a command of the README: the same way through the Makefile, but short.
SHORT_FORMS = {
    "make demo": "make demo SHORT=1",
    "make test": "make test SUITES=unit_tests",
}


def readme_commands(text: str) -> list[str]:
    """The make commands of the README's code blocks, each once."""
    return list(dict.fromkeys(line for line in block_commands(text) if line.startswith("make ")))


def environment() -> dict[str, str]:
    """That of a user who has just opened a shell: nothing of this run's make, build folder or package."""
    dropped = ("MAKE", "MFLAGS", "SHARDWISE_", "PYTHONPATH", "VIRTUAL_ENV", "GIT_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    deps = {name: os.environ[name] for name in ("SHARDWISE_DEPS", "SHARDWISE_TEST_DEPS") if os.environ.get(name)}
    return {**kept, **deps, "PYTHON": sys.executable, INSIDE: "1"}


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)


def run(log: Path) -> list[Result]:
    log.unlink(missing_ok=True)
    if os.environ.get(INSIDE):
        return [Result(SUITE, "", "clone", SKIPPED, "this is the fresh clone")]
    if git("rev-parse", "HEAD").returncode != 0:
        return [Result(SUITE, "", "clone", FAILED, "there is no git repository here, so nothing can be cloned")]
    if git("status", "--porcelain").stdout:
        print(f"{SUITE}: the clone is of the last commit, without the changes that are not committed", flush=True)
    with tempfile.TemporaryDirectory(prefix="shardwise-clone-") as folder:
        clone = Path(folder) / "shardwise"
        cloned = git("clone", "--quiet", str(ROOT), str(clone))
        if cloned.returncode != 0:
            return [Result(SUITE, "", "clone", FAILED, cloned.stderr)]
        commands = readme_commands((clone / "README.md").read_text())
        missing = [command for command in SHORT_FORMS if command not in commands]
        results = [Result(SUITE, "", name, FAILED, "the README does not show this command") for name in missing]
        for command in commands:
            short = SHORT_FORMS.get(command, command)
            began = time.monotonic()
            problem = run_program(shlex.split(short), log, LIMIT, cwd=clone, environment=environment())
            print(f"{SUITE}: {short}: {problem or 'good'} in {time.monotonic() - began:.0f} s", flush=True)
            message = f"{problem}\n{last_lines(log, 60)}" if problem else ""
            results.append(Result(SUITE, "", short, FAILED if problem else PASSED, message))
    return results
