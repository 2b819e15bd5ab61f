"""The wheel, the sources and the C++ archive, used as a user would: their contents, what works, what is refused."""

from __future__ import annotations

import importlib.machinery
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import first_use
import pytest
from installation import BUILD_DIR, ROOT, TORCH, Environment, cached_options, run
from probe_python import torch_versions

from shardwise import _build_info

VERSION = (ROOT / "VERSION").read_text().strip()
EXTENSION = f"shardwise/_C{importlib.machinery.EXTENSION_SUFFIXES[0]}"
BUILT_MINOR = ".".join(_build_info.TORCH_VERSION.split(".")[:2])
REQUIRED = "torch<{0}.{2},>={0}.{1}".format(*BUILT_MINOR.split("."), int(BUILT_MINOR.split(".")[1]) + 1)

SHOW = "import shardwise; print(shardwise.__file__, shardwise.__version__, shardwise.cmake_prefix_path)"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", folder]
    before, python_folder = cached_options(), set((ROOT / "python").iterdir())
    command = [sys.executable, "-m", "pip", "wheel", *options, ROOT]
    run(*command, environment={**os.environ, "SHARDWISE_BUILD_DIR": str(BUILD_DIR)})
    assert {**cached_options(), **before, "SHARDWISE_BUILD_PYTHON": "ON"} == cached_options(), "options were changed"
    assert set((ROOT / "python").iterdir()) == python_folder, "the source folder stays as it is"
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory) -> Environment:
    environment = Environment.create(tmp_path_factory.mktemp("installed"))
    environment.pip_install(wheel)
    return environment


@pytest.fixture(scope="session")
def prefix_path(installed) -> str:
    return installed.run(installed.python, "-c", "import shardwise; print(shardwise.cmake_prefix_path)").strip()


def exported(library: Path) -> list[str]:
    """The names of a library's own symbols. Weak ones are parts of headers, alike in every library that uses them."""
    lines = run("nm", "-DC", "--defined-only", library).splitlines()
    symbols = [line.split(maxsplit=2)[1:] for line in lines]
    return [name.partition("(")[0].replace("[abi:cxx11]", "") for kind, name in symbols if kind in "TDBRG"]


def test_wheel_has_library_headers_cmake_package_and_types(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    folder = ROOT / "csrc/include"
    headers = {f"shardwise/include/{path.relative_to(folder)}" for path in folder.rglob("*.h")}
    assert len(headers) > 5
    assert {name for name in names if name.endswith(".h")} == headers | {"shardwise/include/shardwise/version.h"}
    sources = {f"shardwise/{path.name}" for path in (ROOT / "python/shardwise").glob("*.py*")}
    cmake = {
        f"shardwise/share/cmake/shardwise/{name}.cmake"
        for name in ("shardwiseConfig", "shardwiseConfigVersion", "shardwiseTargets", "torch_target")
    }
    assert {"shardwise/lib/libshardwise.so", "shardwise/py.typed", "shardwise/_build_info.py", EXTENSION} < names
    assert sources | cmake < names
    outside = {"_shardwise_install.py", "shardwise_install.pth", f"shardwise-{VERSION}.dist-info"}
    assert {name.split("/")[0] for name in names} == {"shardwise", *outside}
    assert [name for name in names if "__pycache__" in name or name.endswith((".o", ".cpp"))] == []


def test_wheel_names_version_torch_python_and_platform(wheel):
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert wheel.name.startswith(f"shardwise-{VERSION}-{tag}-{tag}-linux_")
    metadata = zipfile.ZipFile(wheel).read(f"shardwise-{VERSION}.dist-info/METADATA").decode().splitlines()
    assert f"Requires-Dist: {REQUIRED}" in metadata
    assert "Requires-Python: >=3.10" in metadata
    assert {"License-Expression: BSD-3-Clause", "License-File: LICENSE", "License-File: NOTICE"} <= set(metadata)


def test_no_path_of_this_machine_is_in_the_wheel(wheel):
    ours = {str(path).encode() for path in (ROOT, BUILD_DIR, TORCH.parent)}
    with zipfile.ZipFile(wheel) as archive:
        found = {(name, path) for name in archive.namelist() for path in ours if path in archive.read(name)}
    assert found == set()


def test_libraries_find_each_other_by_relative_paths(installed):
    package = installed.site / "shardwise"
    for library, folders in {
        package / "lib/libshardwise.so": ["$ORIGIN", "$ORIGIN/../../torch/lib"],
        **({package / "lib/libshardwise_cuda.so": ["$ORIGIN/../../torch/lib"]} if _build_info.WITH_NCCL else {}),
        installed.site / EXTENSION: ["$ORIGIN/lib", "$ORIGIN/../torch/lib"],
    }.items():
        (line,) = [line for line in run("readelf", "-d", library).splitlines() if "PATH)" in line]
        assert line.partition("[")[2].rstrip("]").split(":") == folders


def test_library_needs_no_python_and_shows_nothing_of_others(installed):
    library = installed.site / "shardwise/lib/libshardwise.so"
    needed = [line for line in run("readelf", "-d", library).splitlines() if "(NEEDED)" in line]
    assert any("libtorch_cpu.so" in line for line in needed)
    assert [line for line in needed if "python" in line.lower() or "cuda" in line] == []
    assert exported(installed.site / EXTENSION) == ["PyInit__C"]
    # Everything else is a part of something that a header marks.
    headers = "\n".join(path.read_text() for path in (ROOT / "csrc").rglob("*.h"))
    marked = set(re.findall(r"(?:class|struct) SHARDWISE_API (\w+)|SHARDWISE_API [^(;{]*?(\w+)[(;]", headers))
    names = {name for pair in marked for name in pair if name}
    symbols = exported(library)
    assert {"shardwise::replicate", "shardwise::Mesh::from_env"} <= set(symbols)
    unmarked = [symbol for symbol in symbols if not names & set(symbol.split("::"))]
    assert unmarked + [symbol for symbol in symbols if not symbol.startswith("shardwise::")] == []


@pytest.mark.skipif(not _build_info.WITH_NCCL, reason="this build is without CUDA")
def test_library_for_cuda_finds_all_that_it_needs(installed):
    library = installed.site / "shardwise/lib/libshardwise_cuda.so"
    assert exported(library) == ["shardwise_cuda_library"]
    load = "import ctypes, os, sys, torch; ctypes.CDLL(sys.argv[1], os.RTLD_NOW).shardwise_cuda_library"
    installed.run(installed.python, "-c", load, library)


def test_installed_demo_trains_as_one_process_does(installed):
    first_use.demo(installed, "--steps", "10")


@pytest.mark.parametrize("step", first_use.STEPS)
def test_first_use(wheel, tmp_path_factory, installed, step):
    if step is first_use.uninstalled:
        installed = Environment.create(tmp_path_factory.mktemp("uninstalled"))
        installed.pip_install(wheel)
    step(installed)


def fake_torch(folder: Path, version: str) -> Path:
    """As much of a torch as CMake looks at."""
    header = folder / "include/torch/headeronly/version.h"
    header.parent.mkdir(parents=True)
    numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    header.write_text("".join(f"#define TORCH_VERSION_{name} {number}\n" for name, number in numbers))
    (folder / "lib").mkdir()
    for library in ("libtorch.so", "libtorch_cpu.so", "libc10.so"):
        (folder / "lib" / library).touch()
    return folder


@pytest.mark.parametrize("place", ["beside shardwise", "named"])
def test_cpp_consumer_with_another_minor_version_of_torch_is_refused(installed, prefix_path, tmp_path, place):
    site, options = tmp_path / "site", [f"-DCMAKE_PREFIX_PATH={prefix_path}"]
    if place == "beside shardwise":
        shutil.copytree(installed.site / "shardwise", site / "shardwise")
        options = [f"-DCMAKE_PREFIX_PATH={site / 'shardwise/share/cmake'}"]
    folder = fake_torch(site / "torch", "2.9.0")
    if place == "named":
        options.append(f"-DSHARDWISE_TORCH_DIR={folder}")
    said = first_use.configure(installed, tmp_path / "build", *options)
    assert said is not None
    assert f"shardwise {VERSION} was built against torch {_build_info.TORCH_VERSION}, but torch 2.9.0" in said
    assert f"was found in {folder}." in said
    assert f"Install torch {BUILT_MINOR}, or build shardwise against torch 2.9, or name the folder" in said
    # Once the refused torch is gone, the same build folder works: nothing of it is kept.
    shutil.rmtree(folder)
    assert first_use.configure(installed, tmp_path / "build") is None


def test_another_minor_version_of_shardwise_is_not_accepted(prefix_path, installed, tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    text = (ROOT / "examples/train/CMakeLists.txt").read_text()
    (project / "CMakeLists.txt").write_text(text.replace("shardwise 0.1 CONFIG", "shardwise 0.0 CONFIG"))
    command = ["cmake", "-S", project, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix_path}"]
    result = subprocess.run(command, env=installed.variables, capture_output=True, text=True, timeout=300)
    assert result.returncode != 0
    assert 'compatible with requested version "0.0"' in " ".join(result.stderr.split())


def test_the_cpp_program_runs_with_a_torch_for_cpus(installed, tmp_path):
    site = tmp_path / "site"
    shutil.copytree(installed.site / "shardwise", site / "shardwise")
    torch_lib = site / "torch/lib"
    torch_lib.mkdir(parents=True)
    (site / "torch/include").symlink_to(TORCH / "include")
    # What torch's library for CPUs needs in a build for CUDA.
    if (TORCH.parent / "nvidia").exists():
        (site / "nvidia").symlink_to(TORCH.parent / "nvidia")
    for library in (TORCH / "lib").iterdir():
        if "cuda" not in library.name and library.name != "libtorch.so":
            (torch_lib / library.name).symlink_to(library)
    run("g++", "-shared", "-o", torch_lib / "libtorch.so", "-Wl,--no-as-needed", f"-L{torch_lib}", "-ltorch_cpu")
    build = tmp_path / "build"
    assert first_use.configure(installed, build, f"-DCMAKE_PREFIX_PATH={site / 'shardwise/share/cmake'}") is None
    installed.run("cmake", "--build", build)
    assert f"{torch_lib}/libtorch_cpu.so" in (libraries := run("ldd", build / "train")) and "cuda.so" not in libraries
    assert first_use.torchrun(installed, "--no-python", build / "train") == first_use.SHOWN.splitlines()


def try_pip(environment: Environment, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [environment.python, "-m", "pip", "install", *arguments]
    return subprocess.run(command, env=environment.variables, capture_output=True, text=True, timeout=600)


def test_pip_asks_for_the_torch_that_the_wheel_was_built_against(wheel, tmp_path):
    environment = Environment.create(tmp_path, beside=None)
    other = environment.site / "torch-2.9.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n")
    done = try_pip(environment, "--no-index", wheel)
    assert done.returncode != 0
    assert f"No matching distribution found for {REQUIRED}" in done.stderr


@pytest.fixture(scope="session")
def sdist(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    environment = {**os.environ, "SHARDWISE_BUILD_DIR": str(BUILD_DIR)}
    run(sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", folder, environment=environment, folder=ROOT)
    (made,) = folder.iterdir()
    return made


def test_the_sources_have_what_the_build_needs_and_nothing_that_it_makes(sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / f"shardwise-{VERSION}"
    names = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    here = [path for folder in ("csrc", "cmake", "python") for path in (ROOT / folder).rglob("*") if path.is_file()]
    built = re.compile(r"python/shardwise/((lib|include|share)/|_build_info.py$)|\.so$|__pycache__")
    sources = {name for path in here if not built.search(name := path.relative_to(ROOT).as_posix())}
    others = "CMakeLists.txt LICENSE MANIFEST.in NOTICE README.md VERSION pyproject.toml setup.py scripts/timed.sh"
    assert names == sources | {*others.split(), "PKG-INFO", "setup.cfg"}
    minors = [int(version.split(".")[1]) for version in torch_versions()]
    assert f"Requires-Dist: torch<2.{minors[-1] + 1},>=2.{minors[0]}\n" in (unpacked / "PKG-INFO").read_text()
    build = tmp_path / "build"
    run("cmake", "-S", unpacked, "-B", build, "-GNinja", f"-DSHARDWISE_TORCH_DIR={TORCH}",
        f"-DPython_EXECUTABLE={sys.executable}")  # fmt: skip
    # Every file that is compiled is there.
    run("ninja", "-C", build, "-n", "shardwise", "shardwise_python")


def test_an_isolated_build_takes_the_torch_of_the_environment(sdist, tmp_path):
    """With setuptools, CMake and Ninja from an index: it needs a network."""
    environment, report = Environment.create(tmp_path / "with"), tmp_path / "report.json"
    done = try_pip(environment, "--dry-run", "--no-deps", "--report", report, sdist)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(report.read_text())["install"]
    assert found["metadata"]["requires_dist"] == [REQUIRED]
    without = Environment.create(tmp_path / "without", beside=None)
    done = try_pip(without, "--dry-run", "--no-deps", sdist)
    assert done.returncode != 0
    assert f"shardwise: there is no torch for {without.python}. shardwise is built against" in done.stderr


def test_a_program_without_python_uses_the_archive(tmp_path):
    """Unpacked beside a LibTorch, and built and started where no program finds a Python."""
    environment = {**os.environ, "SHARDWISE_BUILD_DIR": str(BUILD_DIR)}
    run(sys.executable, ROOT / "scripts" / "archive.py", tmp_path, environment=environment)
    (archive,) = tmp_path.glob("*.tar.gz")
    run("tar", "-xf", archive, "-C", tmp_path)
    prefix = tmp_path / archive.name.removesuffix(".tar.gz")
    assert {path.name for path in prefix.iterdir()} == {"LICENSE", "NOTICE", "include", "lib", "share"}
    assert [path for path in prefix.rglob("*") if path.is_file() and str(ROOT).encode() in path.read_bytes()] == []
    (tmp_path / "libtorch").symlink_to(TORCH)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("as", "c++", "cmake", "ld", "ninja", "sh"):
        (tools / name).symlink_to(shutil.which(name))
    project, build, variables = ROOT / "examples" / "train", tmp_path / "build", {"PATH": str(tools)}
    run("cmake", "-S", project, "-B", build, "-GNinja", f"-DCMAKE_PREFIX_PATH={prefix}", environment=variables)
    run("cmake", "--build", build, environment=variables)
    with socket.create_server(("localhost", 0)) as server:
        port = str(server.getsockname()[1])
    variables |= {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen([build / "train"], env={**variables, "RANK": rank}, stdout=subprocess.PIPE, text=True)
        for rank in ("0", "1")
    ]
    assert "".join(rank.communicate(timeout=300)[0] for rank in ranks) == first_use.SHOWN


def test_editable_installation_is_the_source_folder(wheel, tmp_path):
    environment = Environment.create(tmp_path)
    options = cached_options()
    environment.pip_install("--no-build-isolation", "--editable", ROOT)
    file, version, prefix_path = environment.run(environment.python, "-c", SHOW).split()
    assert Path(file) == ROOT / "python/shardwise/__init__.py"
    assert version == VERSION
    place, torchs = prefix_path.split(";")
    assert (Path(place), Path(torchs)) == (ROOT / "python/shardwise/share/cmake", TORCH / "share/cmake")
    whose = "from torch.distributed.fsdp import fully_shard; print(fully_shard.__module__)"
    said = run(environment.python, "-c", whose, environment={**environment.variables, "SHARDWISE_INSTALL": "1"})
    # Before it comes the line that says what the variable did.
    assert said.splitlines()[-1] == "shardwise._fully_shard"
    placed = (BUILD_DIR / "install_manifest_shardwise.txt").read_text().splitlines()
    assert f"{place}/shardwise/shardwiseConfig.cmake" in placed
    assert cached_options() == options, "an environment that goes away must not stand in the build folder"
