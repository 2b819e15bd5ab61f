"""Sets up what the Makefile's targets need, and writes the paths to build/tools.sh; does nothing twice.

usage: prepare.py build|test|lint|docs. It runs with the Python that prepare.sh chose. If that Python has a supported
torch, it is used as it is and nothing is downloaded; otherwise .venv is made with it, with pinned versions.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from probe_python import found_torch, is_supported, minor, missing_parts, torch_versions

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
VENV = ROOT / ".venv"
TOOLS = ROOT / "build" / "tools.sh"
OLDEST_CMAKE = (3, 22)
OLDEST_NINJA = (1, 10)
#: The oldest Python that a minor version of torch runs with, where that is not ours.
OLDEST_PYTHON = {"2.15": (3, 11)}

LEVELS = ("build", "test", "lint", "docs")
MODULES: dict[str, dict[str, str]] = {
    "build": {},
    "test": {"pybind11-stubgen": "2.5", "pytest": "7.0", "safetensors": "0.5", "setuptools": "77.0"},
    "lint": {},
    "docs": {"pdoc": "15.0", "zensical": "0.0.70"},
}
HEADERS = {"catch2/catch.hpp": "catch2", "gtest/gtest.h": "libgtest-dev", "valgrind/callgrind.h": "valgrind"}
#: Headers that the folder SHARDWISE_TEST_DEPS may provide.
FROM_FOLDER = ("catch2/catch.hpp", "gtest/gtest.h")
#: Those of csrc/files. The folder SHARDWISE_DEPS may provide them too; where neither does, CMake fetches them.
LIBRARY_HEADERS = {"nlohmann/json.hpp": "nlohmann-json3-dev", "xxhash.h": "libxxhash-dev"}


def fail(text: str) -> None:
    sys.exit(f"shardwise: {text}")


def say(text: str) -> None:
    print(f"shardwise: {text}", flush=True)


def quiet(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def install_debian(packages: list[str]) -> bool:
    """Installs Debian packages if that needs no password."""
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if shutil.which("apt-get") is None or (sudo and quiet(*sudo, "true").returncode != 0):
        return False
    say(f"installing the Debian packages {' '.join(packages)}")
    apt = [*sudo, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq"]
    quiet(*apt, "update")
    done = quiet(*apt, "install", "-y", "--no-install-recommends", *packages)
    if done.returncode != 0:
        print(done.stdout + done.stderr, file=sys.stderr)
    return done.returncode == 0


def wanted_torch() -> str:
    """What TORCH asks for, or the newest version that runs with this Python."""
    wanted, known = os.environ.get("TORCH", ""), torch_versions()
    running = [version for version in known if OLDEST_PYTHON.get(minor(version), (3, 0)) <= sys.version_info[:2]]
    if not wanted:
        return running[-1]
    if minor(wanted) not in [minor(version) for version in known]:
        fail(f"TORCH={wanted} is no version of torch that shardwise works with; these are: {', '.join(known)}.")
    if minor(wanted) not in [minor(version) for version in running]:
        oldest = ".".join(map(str, OLDEST_PYTHON[minor(wanted)]))
        fail(f"torch {wanted} needs Python {oldest} or newer. Name one, PYTHON=..., or take TORCH={running[-1]}.")
    return wanted


# The interpreter


def choose_interpreter() -> tuple[str, bool]:
    """The interpreter to develop with, and whether it is our .venv's (otherwise it is used as it is)."""
    if Path(sys.prefix).resolve() == VENV.resolve():
        return str(VENV / "bin" / "python"), True
    found = found_torch()
    if is_supported(found):
        return sys.executable, False
    if found:
        say(f"{sys.executable} has torch {found}; torch {wanted_torch()} is needed, so .venv gets that one")
    return make_venv(), True


def make_venv() -> str:
    python = VENV / "bin" / "python"
    wanted = "{}.{}".format(*sys.version_info)
    present = quiet(str(python), "-c", "import sys; print('{}.{}'.format(*sys.version_info))").stdout.strip()
    if present == wanted:
        return str(python)
    require_parts(f"python{wanted}")
    say(f"making .venv with Python {wanted}" + (f" in the place of Python {present}" if present else ""))
    shutil.rmtree(VENV, ignore_errors=True)
    made = quiet(sys.executable, "-m", "venv", str(VENV))
    if made.returncode != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        fail(f"{sys.executable} -m venv failed: {made.stdout.strip()} {made.stderr.strip()}")
    return str(python)


def require_parts(name: str) -> None:
    missing = missing_parts()
    if not missing:
        return
    packages = [f"{name}-{part}" for part in missing]
    debian = os.path.realpath(sys.executable).startswith("/usr/bin/")
    if debian and install_debian(packages) and not missing_parts():
        return
    what = {"venv": "the modules venv and ensurepip", "dev": "the header Python.h"}
    fail(
        f"{sys.executable} lacks {' and '.join(what[part] for part in missing)}. Install "
        f"{' and '.join(packages)} (Debian, Ubuntu: apt-get install), or name another Python: PYTHON=..."
    )


# Packages


def install_pinned(python: str, name: str, requirements: Iterable[str], note: str = "") -> None:
    """Installs requirements into .venv; a stamp there records what was installed last."""
    lines = [line for line in requirements if line and not line.startswith("#")]
    stamp = VENV / f"shardwise-{name}.stamp"
    key = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == key:
        return
    say(f"installing {', '.join(line.replace('==', ' ') for line in lines)} into .venv{note}")
    options = [] if sys.stdout.isatty() else ["--quiet", "--progress-bar", "off"]
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", *options, *lines]
    if subprocess.run(command).returncode != 0:
        fail(f"pip could not install scripts/{name}.txt; see its output above. No network? PYTHON=... names one "
             f"that has torch {wanted_torch()}.")  # fmt: skip
    stamp.write_text(key)


def read_requirements(name: str) -> list[str]:
    return (SCRIPTS / f"{name}.txt").read_text().splitlines()


def missing_modules(python: str, oldest: dict[str, str]) -> list[str]:
    code = (
        "import importlib.metadata as m, sys\n"
        "number = lambda text: [int(part) for part in text.split('.')[:2]]\n"
        "for wanted in sys.argv[1:]:\n"
        "    name, _, oldest = wanted.partition('>=')\n"
        "    found = [d.version for d in m.distributions(name=name)]\n"
        "    if not found or number(found[0]) < number(oldest): print(wanted)"
    )
    return quiet(python, "-c", code, *(f"{name}>={version}" for name, version in oldest.items())).stdout.splitlines()


# Programs


def version_of(program: str) -> tuple[int, ...]:
    shown = quiet(program, "--version")
    numbers = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", shown.stdout) if shown.returncode == 0 else None
    return tuple(int(number) for number in numbers.groups("0")) if numbers else ()


def find_program(python: str, name: str, oldest: tuple[int, ...]) -> str:
    """A program beside the interpreter, or else on the PATH, that runs and is new enough; empty if there is none."""
    for candidate in (os.path.join(os.path.dirname(python), name), shutil.which(name)):
        if candidate and version_of(candidate) >= oldest:
            return candidate
    return ""


def require_program(python: str, own: bool, name: str, oldest: tuple[int, ...]) -> str:
    found = find_program(python, name, oldest)
    if not found and own:
        pins = [line for line in read_requirements("requirements-build") if line.startswith(f"{name}==")]
        install_pinned(python, f"requirements-build-{name}", pins, f", for the machine's {name} is missing or too old")
        found = find_program(python, name, oldest)
    return found


def missing_programs(python: str, pins: Iterable[str]) -> list[str]:
    """The pinned packages (each a program of the same name) that are missing or older than the pin."""
    pinned = [re.fullmatch(r"([\w-]+?)(?:-py)?==(\d+)\.(\d+).*", line) for line in pins]
    found = [(match[1], (int(match[2]), int(match[3]))) for match in pinned if match]
    return [f"{name}>={oldest[0]}.{oldest[1]}" for name, oldest in found if not find_program(python, name, oldest)]


def compiler() -> list[str]:
    named = os.environ.get("CXX")
    found = shlex.split(named) if named else ["c++" if shutil.which("c++") else "g++"]
    if shutil.which(found[0]) is None:
        fail(f"no C++ compiler {found[0]}. Install g++ (Debian, Ubuntu: apt-get install g++), or name one with CXX.")
    return found


def lacking_library_headers(own: bool) -> str:
    """Installs the headers that the library needs, if that is possible here; the build may still fetch them.

    For a Python that was given with its torch nothing is fetched: there may be no network.
    """
    folder = os.environ.get("SHARDWISE_DEPS", "")
    missing = missing_headers([header for header in LIBRARY_HEADERS if not (folder and Path(folder, header).exists())])
    packages = [LIBRARY_HEADERS[header] for header in missing]
    if packages and not own:
        where = f"neither this machine nor {folder} has" if folder else "this machine lacks"
        return (
            f"the build needs {' and '.join(missing)}, which {where}. Install the packages {' '.join(packages)}, or "
            "name a folder that has these headers: SHARDWISE_DEPS=..."
        )
    if packages and not install_debian(packages):
        say(f"the packages {' '.join(packages)} are missing; the build fetches what it needs of them")
    return ""


def lacking_test_libraries(own: bool) -> str:
    """Catch2, GoogleTest and valgrind (to count instructions). SHARDWISE_TEST_DEPS may have the first two."""
    packages = [HEADERS[header] for header in missing_test_headers()]
    if not packages or (own and install_debian(packages) and not missing_test_headers()):
        return ""
    return (
        f"the tests need {' and '.join(missing_test_headers())}, which this machine lacks. Install the packages "
        f"{' '.join(packages)} (Catch2 of version 2); or name a folder with googletest/ and catch2/catch.hpp, in the "
        "place of those two: SHARDWISE_TEST_DEPS=..."
    )


def missing_test_headers() -> list[str]:
    given = FROM_FOLDER if os.environ.get("SHARDWISE_TEST_DEPS") else ()
    return missing_headers([header for header in HEADERS if header not in given])


def missing_headers(wanted: list[str]) -> list[str]:
    tests = [f"#if __has_include(<{header}>)\nfound {header}\n#endif" for header in wanted]
    shown = subprocess.run(
        [*compiler(), "-E", "-P", "-x", "c++", "-"], input="\n".join(tests), capture_output=True, text=True
    )
    return [header for header in wanted if f"found {header}" not in shown.stdout]


def lacking_doxygen(own: bool) -> str:
    if shutil.which("doxygen") or (own and install_debian(["doxygen"])):
        return ""
    return "doxygen is missing, which makes the C++ reference. Install it (Debian, Ubuntu: apt-get install doxygen)."


def write_tools(**tools: str) -> None:
    text = "".join(f"export SHARDWISE_{name}={shlex.quote(value)}\n" for name, value in tools.items())
    if not TOOLS.exists() or TOOLS.read_text() != text:
        TOOLS.parent.mkdir(exist_ok=True)
        TOOLS.write_text(text)


def main(level: str) -> None:
    compiler()
    python, own = choose_interpreter()
    if own:
        pins = [f"torch=={wanted_torch()}", *read_requirements("requirements")]
        install_pinned(python, "requirements", pins, " (about 5 GB with CUDA's libraries)")
        if level in ("lint", "docs"):
            install_pinned(python, f"requirements-{level}", read_requirements(f"requirements-{level}"))
    tools = {
        "cmake": require_program(python, own, "cmake", OLDEST_CMAKE),
        "ninja": require_program(python, own, "ninja", OLDEST_NINJA),
    }
    missing = [name for name, path in tools.items() if not path]
    missing += missing_modules(python, MODULES[level])
    if level == "lint":
        missing += missing_programs(python, read_requirements("requirements-lint"))
    lacking = []
    if missing:
        lacking.append(
            f"{python} has torch {found_torch()} and is used as it is, but {', '.join(missing)} are missing here: "
            "install them, or name a Python without torch to get a .venv with everything: PYTHON=..."
        )
    lacking.append(lacking_library_headers(own))
    if level == "test":
        lacking.append(lacking_test_libraries(own))
    if level == "docs":
        lacking.append(lacking_doxygen(own))
    if any(lacking):
        fail("\nshardwise: ".join(filter(None, lacking)))
    write_tools(PYTHON=python, CMAKE=tools["cmake"], NINJA=tools["ninja"])


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in LEVELS:
        sys.exit(f"usage: prepare.py {'|'.join(LEVELS)}")
    main(sys.argv[1])
