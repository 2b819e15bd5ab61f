"""The commands: what make offers, what the documentation shows, and how the Python and the tools are chosen."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import check_docs
import house_rules
import prepare
import probe_python
import pytest
import python_rules
from checkout import ROOT

SCRIPTS = ROOT / "scripts"


def test_help_lists_every_target_and_is_the_default():
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert len(check_docs.make_targets()) > 12
    for target in check_docs.make_targets() - {"help"}:
        assert f"  make {target} " in shown, f"make help does not list {target}"


def test_commands_of_the_workflows_exist():
    texts = [path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    commands = re.findall(r"- run: (.+)", "\n".join(texts))
    assert {"make lint", "make docs", "make demo SHORT=1", "make test"} <= set(commands)
    assert {"archive", "wheels"} <= {command.split()[1] for command in commands if command.startswith("make ")}
    assert not list(check_docs.command_problems(commands, check_docs.make_targets()))


def test_a_release_has_every_version_of_torch():
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert re.findall(r'torch: "(.*?)"', workflow) == probe_python.torch_versions()


def test_what_the_documentation_must_not_show_is_found(tmp_path):
    good = ["make demo RANKS=4", "python examples/demo.py --short", "python -m shardwise doctor"]
    bad = ["make nothing", "make test noting", "python examples/none.py", ".ci/none"]
    found = list(check_docs.command_problems(good + bad, check_docs.make_targets()))
    assert [any(f"`{command}`" in problem for problem in found) for command in good + bad] == [False] * 3 + [True] * 4
    (tmp_path / "other.md").write_text("# A heading, 1\n")
    text = "[](other.md) [](other.md#a-heading-1) [](https://example.org/none) [](no.md) [](other.md#no)\n"
    assert list(check_docs.link_problems(tmp_path / "page.md", text)) == [
        "links to no.md, which is not there",
        "links to other.md#no, which has no such heading",
    ]


def function(lines: int = 2, parameters: str = "") -> str:
    return f"def f({parameters}):\n" + "    pass\n" * (lines - 1)


def test_what_breaks_a_rule_of_the_sources_is_found():
    assert not list(house_rules.text_problems("#include </usr/include/x.h>"))
    for text, problem in (("cd /" + "tmp/x", "a path of one machine"), ("# TO" + "DO: more", "undone")):
        assert problem in "".join(house_rules.text_problems(text))
    for text, problem in (
        (function(lines=61), "f() has 61 lines"),
        (function(parameters="a, b, c, *, d, e, f, g"), "f() takes 7 parameters"),
    ):
        assert problem in "".join(python_rules.function_problems("file.py", text))
    text = function(lines=60, parameters="self, a, b, c, *, d, e, f")
    assert not list(python_rules.function_problems("file.py", text))


@pytest.mark.parametrize("back", ["import package.one", "def f():\n    from package import one"])
def test_a_circle_of_imports_is_named(tmp_path, back):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from package.one import thing\n")
    (package / "one.py").write_text("import package.two\n")
    (package / "two.py").write_text("import torch\n")
    assert list(python_rules.circle_problems(package)) == []
    (package / "two.py").write_text(f"{back}\n")
    (problem,) = python_rules.circle_problems(package)
    assert problem.endswith("one -> two -> one")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A copy of the scripts with no .venv beside it, and a folder bin/ with the programs that they may use."""
    shutil.copytree(SCRIPTS, tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "bin").mkdir()
    for name in ("sh", "dirname"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    return tmp_path


def add_program(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def choose(place: Path, pythons: dict[str, str], *given: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Among programs that answer as Pythons would: to the probe with these words, to anything else with their names."""
    for name, words in pythons.items():
        script = f'case "$1" in */probe_python.py) echo "{words}" ;; *) echo "chosen: $0" ;; esac'
        add_program(place / name, script)
    command = ["sh", str(place / "scripts" / "prepare.sh"), "build", *given]
    return subprocess.run(
        command, env={"PATH": str(place / "bin"), **environment}, capture_output=True, text=True, check=False
    )


WITH_TORCH, COMPLETE = "3.11 suitable complete torch", "3.11 suitable complete"


@pytest.mark.parametrize(
    ("pythons", "chosen"),
    [
        ({"bin/python3": WITH_TORCH, ".venv/bin/python": WITH_TORCH}, "bin/python3"),
        ({"bin/python3": COMPLETE, ".venv/bin/python": COMPLETE}, ".venv/bin/python"),
        ({"bin/python3": "3.9", "bin/python3.12": "3.12 suitable", "bin/python3.10": COMPLETE}, "bin/python3.10"),
        (
            {"bin/python3": "3.13 free-threaded", "bin/python3.12": "3.12 suitable", "bin/python3.10": "3.9"},
            "bin/python3.12",
        ),
    ],
)
def test_the_best_python_is_taken(place, pythons, chosen):
    done = choose(place, pythons)
    assert Path(done.stdout.removeprefix("chosen: ").strip()).resolve() == (place / chosen).resolve(), done.stderr


def test_the_python_given_and_the_active_environment_come_first(place):
    pythons = {"bin/python3": WITH_TORCH, "env/bin/python": "3.12 suitable torch", "mine": "3.12 suitable complete"}
    assert choose(place, pythons, VIRTUAL_ENV=str(place / "env")).stdout == f"chosen: {place}/env/bin/python\n"
    assert choose(place, pythons, str(place / "mine")).stdout == f"chosen: {place}/mine\n"


@pytest.mark.parametrize(
    ("words", "given", "said"),
    [
        ("3.9", ["mine"], "is Python 3.9; give a Python 3.10"),
        ("", ["mine"], "is no Python that runs"),
        (
            "3.13 free-threaded",
            ["mine"],
            "is Python 3.13 free-threaded; give a Python 3.10 or newer, not",
        ),
        ("3.9", [], "no Python 3.10 or newer"),
    ],
)
def test_where_no_python_does_one_line_says_so(place, words, given, said):
    done = choose(place, {"bin/python3": "3.9", "mine": words}, *[str(place / name) for name in given])
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_for_a_python_with_a_torch_of_its_own_nothing_is_fetched(monkeypatch):
    for name in ("SHARDWISE_DEPS", "SHARDWISE_TEST_DEPS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(prepare, "choose_interpreter", lambda: ("python", False))
    monkeypatch.setattr(prepare, "require_program", lambda python, own, name, oldest: "")
    monkeypatch.setattr(prepare, "missing_modules", lambda python, wanted: ["pytest>=7.0"])
    monkeypatch.setattr(prepare, "missing_headers", lambda wanted: wanted)
    monkeypatch.setattr(prepare, "install_debian", lambda packages: pytest.fail(f"{packages} were fetched"))
    with pytest.raises(SystemExit) as ended:
        prepare.main("test")
    # All that is missing is told at once.
    programs, headers, tests = str(ended.value).splitlines()
    assert "cmake, ninja, pytest>=7.0 are missing here" in programs
    assert re.search(r"xxhash\.h.*name a folder that has these headers: SHARDWISE_DEPS", headers)
    assert re.search(r"gtest/gtest\.h.*SHARDWISE_TEST_DEPS", tests)


def test_a_folder_of_headers_that_lacks_one_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWISE_DEPS", str(tmp_path))
    monkeypatch.setattr(prepare, "missing_headers", lambda wanted: wanted)
    (tmp_path / "xxhash.h").touch()
    said = prepare.lacking_library_headers(own=False)
    assert f"the build needs nlohmann/json.hpp, which neither this machine nor {tmp_path} has" in said
    (tmp_path / "nlohmann").mkdir()
    (tmp_path / "nlohmann/json.hpp").touch()
    assert prepare.lacking_library_headers(own=False) == ""


def test_packages_are_installed_when_the_pins_change_and_after_a_failure(place, monkeypatch):
    monkeypatch.setattr(prepare, "VENV", place)
    log = place / "log"
    add_program(place / "python", "exit 1")
    with pytest.raises(SystemExit, match="pip could not install"):
        prepare.install_pinned(str(place / "python"), "requirements", ["a==1"])
    add_program(place / "python", f'echo "$@" >> {log}')
    for pins in (["a==1"], ["a==1"], ["a==2", "# a comment"]):
        prepare.install_pinned(str(place / "python"), "requirements", pins)
    assert [line.split()[-1] for line in log.read_text().splitlines()] == ["a==1", "a==2"]


def test_the_newest_torch_that_runs_with_this_python_is_fetched(monkeypatch, capsys):
    monkeypatch.setattr(prepare, "torch_versions", lambda: ["2.11.0", "2.14.1", "2.15.0"])
    monkeypatch.delenv("TORCH", raising=False)
    monkeypatch.setattr(prepare.sys, "version_info", (3, 11, 2))
    assert prepare.wanted_torch() == "2.15.0"
    monkeypatch.setattr(prepare.sys, "version_info", (3, 10, 9))
    assert prepare.wanted_torch() == "2.14.1"
    for given, text in (
        ("2.15.0", "torch 2.15.0 needs Python 3.11 or newer. Name one, PYTHON=..., or take TORCH=2.14.1"),
        ("2.16.0", "TORCH=2.16.0 is no version of torch that shardwise works with; these are: 2.11.0, 2.14.1, 2.15.0"),
    ):
        monkeypatch.setenv("TORCH", given)
        with pytest.raises(SystemExit, match=re.escape(text)):
            prepare.wanted_torch()
    monkeypatch.setenv("TORCH", "2.11.3")
    assert prepare.wanted_torch() == "2.11.3"
