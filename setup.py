"""Packages what CMake builds. The build is described in CMakeLists.txt; this file only drives it.

Environment: SHARDWISE_BUILD_DIR, the build folder (default: build/<python tag>; an existing one keeps its options);
CMAKE_ARGS, more arguments for CMake, such as -DSHARDWISE_CUDA=off. For scripts/wheels.py: SHARDWISE_TORCH_DIR, a torch
of another Python; SHARDWISE_LOCAL_VERSION, which stands behind the version.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import setuptools
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

# After setuptools, which brings a distutils of its own.
from distutils.command.install_data import install_data  # isort: skip

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "python" / "shardwise"
BUILD_DIR = ROOT / (os.environ.get("SHARDWISE_BUILD_DIR") or "build/cp{}{}".format(*sys.version_info))
# setuptools' own folders, which would else lie about in the source folder.
SCRATCH = BUILD_DIR / "package"


def torch_dir() -> Path:
    """The folder of the torch that the package will run with."""
    if os.environ.get("SHARDWISE_TORCH_DIR"):
        return Path(os.environ["SHARDWISE_TORCH_DIR"])
    # In a process without variables: pip's isolated build hides the packages of the environment by PYTHONPATH.
    find = "import importlib.util as u; print((u.find_spec('torch') or u).submodule_search_locations[0])"
    for options in ([], ["-E"]):
        found = subprocess.run([sys.executable, *options, "-c", find], cwd=SCRATCH, capture_output=True, text=True)
        if found.returncode == 0:
            return Path(found.stdout.strip())
    sys.exit(
        f"shardwise: there is no torch for {sys.executable}. shardwise is built against the torch that it will run "
        "with: install torch, then repeat. What builds in a Python of its own needs an option: "
        "`uv pip install --no-build-isolation`, `python -m build --no-isolation`."
    )


def torch_requirement() -> str:
    """The torch that the package will accept: the minor version that it is built against. Sources accept more."""
    if {"egg_info", "sdist"} & set(sys.argv):
        minors = re.findall(r"^\d+\.(\d+)", (ROOT / "cmake" / "torch_versions.txt").read_text(), re.MULTILINE)
        return f"torch>=2.{minors[0]},<2.{int(minors[-1]) + 1}"
    text = (torch_dir() / "include" / "torch" / "headeronly" / "version.h").read_text()
    numbers = dict(re.findall(r"^#define TORCH_VERSION_(MAJOR|MINOR) (\d+)", text, re.MULTILINE))
    major, minor = int(numbers["MAJOR"]), int(numbers["MINOR"])
    return f"torch>={major}.{minor},<{major}.{minor + 1}"


def check_python() -> None:
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        sys.exit(
            f"shardwise: {sys.executable} is a free-threaded Python, which shardwise does not support. Use another."
        )


def check_setuptools() -> None:
    if int(setuptools.__version__.split(".")[0]) < 77:
        sys.exit(
            f"shardwise: setuptools {setuptools.__version__} does not know all of pyproject.toml. "
            "Install a newer one: python -m pip install 'setuptools>=77,<82'"
        )


def cmake_cache() -> dict[str, str]:
    cache = BUILD_DIR / "CMakeCache.txt"
    if not cache.exists():
        return {}
    return dict(re.findall(r"^([A-Za-z]\w*):\w+=(.*)$", cache.read_text(), re.MULTILINE))


def tool(name: str) -> str | None:
    """A program of this environment, or else on the PATH, that starts: pip may hide the module of a script."""
    for found in (shutil.which(name, path=sysconfig.get_path("scripts")), shutil.which(name)):
        if found and subprocess.run([found, "--version"], capture_output=True).returncode == 0:
            return found
    return None


def run_cmake(*arguments: str) -> None:
    cmake = cmake_cache().get("CMAKE_COMMAND", "")
    command = cmake if os.access(cmake, os.X_OK) else tool("cmake")
    if command is None:
        sys.exit("shardwise: CMake 3.22 or newer is needed: python -m pip install cmake")
    print("shardwise:", shlex.join([command, *arguments]), flush=True)
    if subprocess.run([command, *arguments], cwd=ROOT).returncode != 0:
        sys.exit("shardwise: CMake failed; see its output above.")


def configure() -> None:
    cache = cmake_cache()
    options = ["-DSHARDWISE_BUILD_PYTHON=ON", f"-DSHARDWISE_TORCH_DIR={torch_dir()}"]
    # Another environment of the same interpreter has the same headers: it need not take the folder over.
    if os.path.realpath(cache.get("Python_EXECUTABLE", "")) != os.path.realpath(sys.executable):
        # What CMake found of the one before is forgotten.
        options += ["-U_Python_*", "-UPython_*", f"-DPython_EXECUTABLE={sys.executable}"]
    if not cache:
        options += ["-DCMAKE_BUILD_TYPE=Release", *(["-GNinja"] if tool("ninja") else [])]
    # That of an isolated build is gone when the next one begins.
    if not os.access(cache.get("CMAKE_MAKE_PROGRAM", ""), os.X_OK) and (ninja := tool("ninja")):
        options.append(f"-DCMAKE_MAKE_PROGRAM={ninja}")
    run_cmake("-S", str(ROOT), "-B", str(BUILD_DIR), *options, *shlex.split(os.environ.get("CMAKE_ARGS", "")))


class Build(build):
    """Starts a wheel from an empty folder, so that nothing of an earlier one is left in it."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BuildExtension(build_ext):
    """Builds and installs into the package: the wheel's, or the source folder's for -e."""

    def run(self) -> None:
        configure()
        run_cmake("--build", str(BUILD_DIR), "--target", "shardwise", "shardwise_python")
        prefix = PACKAGE if self.inplace else Path(self.build_lib).resolve() / "shardwise"
        for component in ("shardwise", "shardwise_python"):
            run_cmake("--install", str(BUILD_DIR), "--component", component, "--prefix", str(prefix))
        if self.editable_mode:
            # setuptools itself leaves data files out of -e.
            self.run_command("install_data")


class InstallData(install_data):
    """Places data files beside the package, where Python looks for .pth files."""

    def finalize_options(self) -> None:
        self.set_undefined_options("install", ("install_lib", "install_dir"))
        super().finalize_options()


check_python()
check_setuptools()
SCRATCH.mkdir(parents=True, exist_ok=True)
setuptools.setup(
    version="+".join(filter(None, [(ROOT / "VERSION").read_text().strip(), os.environ.get("SHARDWISE_LOCAL_VERSION")])),
    install_requires=[torch_requirement()],
    # Only says that the package has an extension module; CMake knows its sources.
    ext_modules=[setuptools.Extension("shardwise._C", sources=[])],
    # Lets SHARDWISE_INSTALL=1 put shardwise in the place of torch's functions.
    data_files=[("", ["python/shardwise_install.pth"])],
    cmdclass={"build": Build, "build_ext": BuildExtension, "install_data": InstallData},
    options={"build": {"build_base": str(SCRATCH)}, "egg_info": {"egg_base": str(SCRATCH)}},
)
