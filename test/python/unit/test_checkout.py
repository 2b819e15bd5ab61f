"""The .venv that make makes has what was built, and what the README shows works with it as it stands."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from checkout import ROOT
from installation import Environment

import build

IMPORT = "import shardwise, torch.distributed.fsdp as fsdp; print(shardwise.__file__, fsdp.fully_shard.__module__)"
FIND = "import importlib.util as u; print(getattr(u.find_spec('shardwise'), 'origin', None))"


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """A .venv as prepare.py leaves it, with a torch."""
    monkeypatch.setattr(build, "ROOT", tmp_path)
    environment = Environment.create(tmp_path / ".venv")
    (environment.folder / "shardwise-requirements.stamp").write_text("")
    return environment


def shown(
    environment: Environment, folder: Path, program: str = IMPORT, **variables: str
) -> subprocess.CompletedProcess[str]:
    everything = {**environment.variables, **variables}
    command = [environment.python, "-c", program]
    return subprocess.run(command, cwd=folder, env=everything, capture_output=True, text=True, timeout=300, check=False)


def test_the_venv_finds_what_was_built_from_any_folder(made: Environment, tmp_path: Path) -> None:
    assert shown(made, tmp_path, FIND).stdout == "None\n"
    for _ in range(2):
        build.show_to(made.python)
    package = ROOT / "python" / "shardwise" / "__init__.py"
    assert shown(made, tmp_path, FIND).stdout == f"{package}\n"
    done = shown(made, Path("/"), SHARDWISE_INSTALL="1")
    assert done.stdout.split() == [str(package), "shardwise._fully_shard"], done.stderr
    # A checkout that is gone is no concern of a Python that stays.
    (file,) = made.site.glob("shardwise-*.pth")
    file.write_text(file.read_text().replace(str(ROOT), str(tmp_path / "gone")))
    done = shown(made, tmp_path, FIND)
    assert (done.stdout, done.stderr) == ("None\n", "")


def test_another_python_stays_as_it_is(made: Environment, tmp_path: Path) -> None:
    users = Environment.create(tmp_path / "users")
    build.show_to(users.python)
    (made.folder / "shardwise-requirements.stamp").unlink()
    build.show_to(made.python)
    assert not list(tmp_path.rglob("shardwise-*.pth"))


def test_the_cmake_line_of_the_readme_finds_the_package_and_its_torch(made: Environment, tmp_path: Path) -> None:
    build.show_to(made.python)
    (line,) = re.findall(r"^cmake -B build (-DCMAKE_PREFIX_PATH=.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    # The machine's own python3, which CMake would ask for a torch, has none.
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python").write_text(f'#!/bin/sh\nexec {made.python} "$@"\n')
    (programs / "python3").write_text("#!/bin/sh\nexit 1\n")
    for each in programs.iterdir():
        each.chmod(0o755)
    variables = {**made.variables, "PATH": f"{programs}:{made.variables['PATH']}"}
    command = f"cmake -S '{ROOT}/examples/train' -B '{tmp_path}/build' {line}"
    done = subprocess.run(
        ["sh", "-c", command], env=variables, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(
        r"^SHARDWISE_TORCH_DIR:\w+=(.*)$", (tmp_path / "build" / "CMakeCache.txt").read_text(), re.MULTILINE
    )
    assert found and os.path.isdir(Path(found[1]) / "lib")
