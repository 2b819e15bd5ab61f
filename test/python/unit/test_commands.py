"""The commands: what make offers, what the documentation shows, and how the Python and the tools are chosen."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ROOT / "scripts"
TARGETS = [
    "demo",
    "test",
    "test-torches",
    "test-all",
    "test-parts",
    "gpu",
    "gpu-kit",
    "bench",
    "lint",
    "format",
    "docs",
    "wheel",
    "clean",
]


def load(name: str) -> ModuleType:
    """A script of this repository as a module."""
    if str(SCRIPTS) not in sys.path:
        sys.path.append(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location(f"shardwise_{name}", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_docs = load("check_docs")
house_rules = load("house_rules")
python_rules = load("python_rules")
prepare = load("prepare")
build = load("build")


def test_help_lists_every_target_and_is_the_default():
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown == subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in TARGETS:
        assert f"  make {target} " in shown, f"make help does not list {target}"
    for variable in ("RANKS", "FRONT", "PYTHON", "SHARDWISE_TEST_DEPS", "SHARDWISE_DEPS", "JOBS"):
        assert variable in shown


def test_make_knows_every_target():
    for target in TARGETS:
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, check=True)
    assert set(TARGETS) <= check_docs.make_targets()


# Documentation


def test_commands_and_links_of_the_documentation_exist():
    assert list(check_docs.problems()) == []


def test_the_readme_shows_the_two_commands():
    shown = check_docs.block_commands((ROOT / "README.md").read_text())
    assert {"make demo", "make test"} <= set(shown)


def test_workflows_call_what_the_makefile_has():
    texts = [path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    commands = re.findall(r"- run: (.+)", "\n".join(texts))
    assert {"make lint", "make docs", "make demo SHORT=1", "make test"} <= set(commands)
    assert not list(check_docs.command_problems(commands, check_docs.make_targets()))


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("make demo RANKS=4", ""),
        ("make nothing", "no target nothing"),
        ("make test noting", "no target noting"),
        ("python examples/demo.py --short", ""),
        ("python examples/none.py", "there is no examples/none.py"),
        (".ci/none", "there is no .ci/none"),
        ("python -m shardwise doctor", ""),
    ],
)
def test_a_command_that_does_not_exist_is_found(command, problem):
    found = list(check_docs.command_problems([command], check_docs.make_targets()))
    assert bool(found) == bool(problem)
    assert problem in "".join(found)


@pytest.mark.parametrize(
    ("link", "problem"),
    [
        ("other.md", ""),
        ("other.md#a-heading-1", ""),
        ("#here", ""),
        ("https://example.org/none", ""),
        ("none.md", "is not there"),
        ("other.md#none", "no such heading"),
    ],
)
def test_a_link_that_leads_nowhere_is_found(tmp_path, link, problem):
    (tmp_path / "other.md").write_text("# A heading, 1\n")
    page = tmp_path / "page.md"
    page.write_text(f"# Here\n[text]({link})\n")
    assert problem in "".join(check_docs.link_problems(page, page.read_text()))
    assert bool(problem) == bool(list(check_docs.link_problems(page, page.read_text())))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("line\n" * 1000, ""),
        ("#include </usr/include/x.h>", ""),
        ("a = '/" + "home/me/x'", "a path of one machine"),
        ("cd /" + "tmp/x", "a path of one machine"),
        ("$(root)/" + "home/x", ""),
        ("# TO" + "DO: more", "undone"),
    ],
)
def test_house_rules(text, problem):
    found = list(house_rules.text_problems(text))
    assert bool(found) == bool(problem)
    assert problem in "".join(found)


def function(lines: int = 2, parameters: str = "") -> str:
    return f"def f({parameters}):\n" + "    pass\n" * (lines - 1)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (function(lines=60), ""),
        (function(lines=61), "f() has 61 lines"),
        (function(lines=60).replace("    pass", '    """A text\n    of two lines."""', 1), ""),
        (function(parameters="self, a, b, c, *, d, e, f"), ""),
        (function(parameters="a, b, c, *, d, e, f, g"), "f() takes 7 parameters"),
    ],
)
def test_functions_are_short_and_take_few_things(text, problem):
    found = list(python_rules.function_problems("file.py", text))
    assert bool(found) == bool(problem)
    assert problem in "".join(found)


@pytest.mark.parametrize(
    "back",
    [
        "import package.one",
        "from package import one",
        "from package.one import thing",
        "def f():\n    from package import one",
        "importlib.import_module('package.one')",
    ],
)
def test_a_circle_of_imports_is_named(tmp_path, back):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from package.one import thing\n")
    (package / "one.py").write_text("import package.two\n")
    (package / "two.py").write_text("from package import three\n")
    (package / "three.py").write_text("import torch\n")
    assert list(python_rules.circle_problems(package)) == []
    (package / "three.py").write_text(f"{back}\n")
    (problem,) = python_rules.circle_problems(package)
    assert problem.endswith("one -> two -> three -> one")


# The choice of the Python


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


def add_python(path: Path, words: str) -> None:
    """A program that answers as a Python would: to the probe with words, to anything else with its own name."""
    add_program(path, f'case "$1" in */probe_python.py) echo "{words}" ;; *) echo "chosen: $0" ;; esac')


def choose(place: Path, *given: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(place / "scripts" / "prepare.sh"), "build", *given],
        env={"PATH": str(place / "bin"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def chosen(place: Path, *given: str, **environment: str) -> str:
    done = choose(place, *given, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.removeprefix("chosen: ").strip()


def test_the_active_python_with_torch_is_taken(place):
    add_python(place / "bin" / "python3", "3.11 suitable complete torch")
    add_python(place / ".venv" / "bin" / "python", "3.11 suitable complete torch")
    assert chosen(place) == str(place / "bin" / "python3")


def test_the_active_environment_comes_before_the_path(place):
    add_python(place / "bin" / "python3", "3.11 suitable complete torch")
    add_python(place / "env" / "bin" / "python", "3.12 suitable torch")
    assert chosen(place, VIRTUAL_ENV=str(place / "env")) == str(place / "env" / "bin" / "python")


def test_our_venv_is_taken_before_a_python_without_torch(place):
    add_python(place / "bin" / "python3", "3.11 suitable complete")
    add_python(place / ".venv" / "bin" / "python", "3.11 suitable complete")
    assert Path(chosen(place)).resolve() == (place / ".venv" / "bin" / "python").resolve()


def test_a_complete_python_is_taken_before_one_that_is_not(place):
    add_python(place / "bin" / "python3", "3.13")
    add_python(place / "bin" / "python3.12", "3.12 suitable")
    add_python(place / "bin" / "python3.10", "3.10 suitable complete")
    assert chosen(place) == str(place / "bin" / "python3.10")
    add_python(place / "bin" / "python3.10", "3.10")
    assert chosen(place) == str(place / "bin" / "python3.12")


def test_the_python_given_is_taken(place):
    add_python(place / "bin" / "python3", "3.11 suitable complete torch")
    add_python(place / "mine", "3.12 suitable complete")
    assert chosen(place, str(place / "mine")) == str(place / "mine")


@pytest.mark.parametrize(
    ("words", "said"), [("3.9", "is Python 3.9; give a Python 3.10"), ("", "is no Python that runs")]
)
def test_a_python_given_that_does_not_do_is_refused(place, words, said):
    add_python(place / "bin" / "python3", "3.11 suitable complete torch")
    add_python(place / "mine", words)
    done = choose(place, str(place / "mine"))
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_any_python_one_line_tells_what_to_install(place):
    add_python(place / "bin" / "python3", "3.9")
    done = choose(place)
    assert done.returncode == 1
    assert "no Python 3.10, 3.11 or 3.12" in done.stderr
    assert "python3-venv" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_probe_tells_what_this_python_is():
    shown = subprocess.run(
        [sys.executable, str(SCRIPTS / "probe_python.py")], capture_output=True, text=True, check=True
    )
    assert shown.stdout.split()[:2] == ["{}.{}".format(*sys.version_info), "suitable"]
    assert "torch" in shown.stdout.split()


# The tools


def test_a_module_that_is_missing_or_too_old_is_named():
    wanted = {"pytest": "7.0", "torch": "99.0", "no-such-thing": "1.0"}
    assert prepare.missing_modules(sys.executable, wanted) == ["torch>=99.0", "no-such-thing>=1.0"]


def test_a_program_beside_the_interpreter_comes_first_if_it_is_new_enough(place, monkeypatch):
    monkeypatch.setenv("PATH", f"{place / 'bin'}:/usr/bin:/bin")
    python = str(place / "env" / "bin" / "python")
    add_program(place / "bin" / "cmake", "echo cmake version 3.25.1")
    assert prepare.find_program(python, "cmake", (3, 22)) == str(place / "bin" / "cmake")
    add_program(place / "env" / "bin" / "cmake", "echo cmake version 3.22.0")
    assert prepare.find_program(python, "cmake", (3, 22)) == str(place / "env" / "bin" / "cmake")
    add_program(place / "env" / "bin" / "cmake", "echo cmake version 3.21.7")
    assert prepare.find_program(python, "cmake", (3, 22)) == str(place / "bin" / "cmake")
    add_program(place / "bin" / "cmake", "echo cmake version 99.0; exit 1")
    assert prepare.find_program(python, "cmake", (3, 22)) == ""


def test_a_missing_doxygen_is_named_where_it_cannot_be_installed(monkeypatch):
    monkeypatch.setattr(prepare.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"doxygen is missing.*apt-get install doxygen"):
        prepare.require_doxygen(own=True)
    monkeypatch.setattr(prepare, "install_debian", lambda packages: packages == ["doxygen"])
    prepare.require_doxygen(own=True)
    with pytest.raises(SystemExit, match="doxygen is missing"):
        prepare.require_doxygen(own=False)


def test_for_a_python_with_a_torch_of_its_own_nothing_is_fetched(monkeypatch):
    monkeypatch.delenv("SHARDWISE_DEPS", raising=False)
    monkeypatch.setattr(prepare, "missing_headers", lambda wanted: wanted)
    monkeypatch.setattr(prepare, "install_debian", lambda packages: pytest.fail(f"{packages} were fetched"))
    with pytest.raises(SystemExit, match=r"xxhash\.h.*name a folder that has these headers: SHARDWISE_DEPS"):
        prepare.require_library_headers(own=False)
    with pytest.raises(SystemExit, match=r"gtest/gtest\.h.*SHARDWISE_TEST_DEPS"):
        prepare.require_test_libraries(own=False)


def test_headers_of_the_library_are_installed_where_that_is_possible(monkeypatch, capsys):
    asked: list[list[str]] = []
    monkeypatch.delenv("SHARDWISE_DEPS", raising=False)
    monkeypatch.setattr(prepare, "missing_headers", lambda wanted: [name for name in wanted if name == "xxhash.h"])
    monkeypatch.setattr(prepare, "install_debian", lambda packages: bool(asked.append(packages)))
    prepare.require_library_headers(own=True)
    assert asked == [["libxxhash-dev"]]
    assert "libxxhash-dev are missing; the build fetches what it needs" in capsys.readouterr().out
    monkeypatch.setenv("SHARDWISE_DEPS", "deps")
    prepare.require_library_headers(own=True)
    assert len(asked) == 1, "a folder that is given has them"


def test_a_linter_that_is_missing_or_too_old_is_named(place, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    python = str(place / "env" / "bin" / "python")
    add_program(place / "env" / "bin" / "a-linter", "echo a-linter 2.4.1")
    pins = ["# a comment", "a-linter==2.4.9", "no-such-linter-py==0.11.0.1"]
    assert prepare.missing_programs(python, pins) == ["no-such-linter>=0.11"]
    assert prepare.missing_programs(python, ["a-linter==2.5.0"]) == ["a-linter>=2.5"]


def test_packages_are_installed_only_when_the_pins_change(place, monkeypatch):
    monkeypatch.setattr(prepare, "VENV", place)
    log = place / "log"
    add_program(place / "python", f'echo "$@" >> {log}')
    for pins in (["a==1"], ["a==1"], ["a==2", "# a comment"]):
        prepare.install_pinned(str(place / "python"), "requirements", pins)
    assert [line.split()[-1] for line in log.read_text().splitlines()] == ["a==1", "a==2"]


def test_a_failed_installation_is_an_error_and_is_tried_again(place, monkeypatch):
    monkeypatch.setattr(prepare, "VENV", place)
    add_program(place / "python", "exit 1")
    for _ in range(2):
        with pytest.raises(SystemExit, match="pip could not install"):
            prepare.install_pinned(str(place / "python"), "requirements", ["a==1"])


def test_cmake_runs_only_when_something_changed(place, monkeypatch):
    folder = place / "build"
    log = place / "log"
    known = f"CMAKE_HOME_DIRECTORY:S={ROOT}\\nCMAKE_PROJECT_VERSION:S={(ROOT / 'VERSION').read_text().strip()}\\n"
    lines = [
        f'echo "$@" >> {log}; cd {place}; /bin/mkdir -p build',
        f': > build/build.ninja; printf "{known}" > build/CMakeCache.txt',
        "for word; do case $word in -D*)",
        'word=${word#-D}; echo "${word%%=*}:S=${word#*=}" >> build/CMakeCache.txt;; esac; done',
    ]
    add_program(place / "cmake", "\n".join(lines))
    monkeypatch.setenv("SHARDWISE_CMAKE", str(place / "cmake"))
    monkeypatch.setenv("SHARDWISE_NINJA", "the ninja")
    monkeypatch.setenv("SHARDWISE_PYTHON", "the python")

    def runs(**wanted: str) -> int:
        before = len(log.read_text().splitlines()) if log.exists() else 0
        build.configure(folder, wanted)
        return (len(log.read_text().splitlines()) if log.exists() else 0) - before

    assert runs(TESTS="ON") == 1
    assert runs(TESTS="ON") == 0
    assert runs() == 0
    assert runs(TESTS="ON", DEPS="") == 0
    assert runs(TESTS="OFF") == 1
    monkeypatch.setenv("SHARDWISE_PYTHON", "another python")
    assert runs(TESTS="OFF") == 1
    assert runs(TESTS="OFF") == 0


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
