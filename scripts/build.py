"""Configures, builds and installs a folder below build/; does each only if something changed.

usage: build.py FOLDER [-DNAME=VALUE ...] [--target NAME ...] [--install] [--jobs N]
--install puts library, headers and extension module into python/shardwise, where a checkout is used from.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "shardwise"
GIB_PER_JOB = 2  # what g++ takes for a file that includes torch/torch.h


def read_cache(folder: Path) -> dict[str, str]:
    cache = folder / "CMakeCache.txt"
    if not cache.exists():
        return {}
    return dict(re.findall(r"^([A-Za-z][\w-]*):\w+=(.*)$", cache.read_text(), re.MULTILINE))


def run(*command: str, cwd: Path = ROOT, shown: bool = True) -> None:
    environment = {"CCACHE_BASEDIR": str(ROOT), "CMAKE_COLOR_DIAGNOSTICS": "ON", **os.environ}
    if not sys.stdout.isatty():
        del environment["CMAKE_COLOR_DIAGNOSTICS"]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=not shown, text=True)
    if done.returncode != 0:
        print(*(() if shown else (done.stdout, done.stderr)), sep="\n", end="")
        sys.exit(f"shardwise: {shlex.join(command)} failed with status {done.returncode}; see its output above.")


def configure(folder: Path, wanted: dict[str, str]) -> None:
    """Runs CMake if the folder was configured with other options, for another version, or not at all.

    Only the options named are compared: `make demo` leaves alone what `make test` has set.
    """
    tools = {"CMAKE_MAKE_PROGRAM": os.environ["SHARDWISE_NINJA"], "Python_EXECUTABLE": os.environ["SHARDWISE_PYTHON"]}
    cache = read_cache(folder)
    moved = cache.get("CMAKE_HOME_DIRECTORY") != str(ROOT)
    if cache and (moved or any(cache.get(name) != value for name, value in tools.items())):
        shutil.rmtree(folder)
        cache = {}
    version = (ROOT / "VERSION").read_text().strip()
    wanted = {name: value for name, value in wanted.items() if cache.get(name, "") != value}
    if not wanted and cache.get("CMAKE_PROJECT_VERSION") == version and (folder / "build.ninja").exists():
        return
    options = [f"-D{name}={value}" for name, value in (wanted if cache else {**tools, **wanted}).items()]
    run(os.environ["SHARDWISE_CMAKE"], "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", "--log-level=WARNING",
        *options)  # fmt: skip


def default_jobs() -> int:
    """One job per core, but no more than the free memory allows."""
    free = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) // 2**20
    return max(1, min(len(os.sched_getaffinity(0)), free // GIB_PER_JOB))


def newest(paths: list[Path]) -> float:
    return max((path.stat().st_mtime for path in paths if path.is_file()), default=0.0)


def install(folder: Path) -> None:
    stamp = folder / "installed.stamp"
    made = (folder / "csrc").rglob("*")
    built = [path for path in made if path.suffix in (".so", ".h", ".py", ".cmake") and "CMakeFiles" not in path.parts]
    sources = [*built, *(ROOT / "csrc" / "include").rglob("*"), ROOT / "cmake" / "torch_target.cmake"]
    installed = [PACKAGE / "_build_info.py", PACKAGE / "lib" / "libshardwise.so"]
    fresh = stamp.exists() and all(path.exists() for path in installed)
    if fresh and stamp.stat().st_mtime >= newest(sources) and newest(installed) <= stamp.stat().st_mtime:
        return
    for name in ("lib", "include", "share"):
        shutil.rmtree(PACKAGE / name, ignore_errors=True)
    for component in ("shardwise", "shardwise_python"):
        install = ("--install", str(folder), "--component", component, "--prefix", str(PACKAGE))
        run(os.environ["SHARDWISE_CMAKE"], *install, shown=False)
    stamp.touch()


def show_to(python: Path) -> None:
    """Makes the package importable from any folder in the .venv that prepare.py made; other Pythons are left alone."""
    venv = ROOT / ".venv"
    if python.parent.parent != venv or not list(venv.glob("shardwise-*.stamp")):
        return
    (packages,) = venv.glob("lib/python*/site-packages")
    file = packages / "shardwise-checkout.pth"
    folder = str(PACKAGE.parent)
    # Reads SHARDWISE_INSTALL too, as an installed package does.
    line = f"import os, site; os.path.isdir({folder!r}) and site.addsitedir({folder!r})\n"
    if not file.exists() or file.read_text() != line:
        file.write_text(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("-D", dest="options", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--target", dest="targets", nargs="*", default=[])
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--jobs", type=int, default=0)
    arguments = parser.parse_args()
    folder = ROOT / "build" / arguments.folder
    configure(folder, dict(option.split("=", 1) for option in arguments.options))
    run(os.environ["SHARDWISE_NINJA"], f"-j{arguments.jobs or default_jobs()}", *arguments.targets, cwd=folder)
    if arguments.install:
        install(folder)
        show_to(Path(os.environ["SHARDWISE_PYTHON"]))


if __name__ == "__main__":
    main()
