"""What the files of CMake decide: where CUDA's headers are (those of torch's own packages may include some that are not
there), what is said where something is missing, and whether warnings are errors."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from checkout import ROOT

PROJECT = f"""
cmake_minimum_required(VERSION 3.22)
project(headers LANGUAGES CXX)
# Of this machine nothing is found.
set(CMAKE_FIND_USE_SYSTEM_ENVIRONMENT_PATH OFF)
set(CMAKE_FIND_USE_CMAKE_SYSTEM_PATH OFF)
set(SHARDWISE_CUDA auto CACHE STRING "")
set(SHARDWISE_KERNELS auto CACHE STRING "")
include("{ROOT}/cmake/torch_cuda.cmake")
include("{ROOT}/cmake/cuda_kernels.cmake")
message(STATUS "with: ${{SHARDWISE_WITH_CUDA}} of ${{SHARDWISE_CUDA_INCLUDE}}, NCCL of ${{SHARDWISE_NCCL_INCLUDE}}")
"""


@pytest.fixture
def place(tmp_path):
    """A torch for CUDA whose packages lack a header, and a toolkit."""
    for name, text in {
        "torch/lib/libtorch_cuda.so": "",
        "nvidia/nccl/include/nccl.h": "",
        "nvidia/cu13/include/cuda_runtime.h": '#include "crt/not_there.h"\n',
        "toolkit/include/cuda_runtime.h": '#include "crt/there.h"\n',
        "toolkit/include/crt/there.h": "",
        "project/CMakeLists.txt": PROJECT,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def configure(place: Path, *options: str) -> str:
    cmake = os.environ.get("SHARDWISE_CMAKE") or shutil.which("cmake")
    folders = ["-S", place / "project", "-B", place / "build", f"-DSHARDWISE_TORCH_DIR={place / 'torch'}"]
    done = subprocess.run(
        [str(word) for word in (cmake, *folders, *options)], capture_output=True, text=True, check=False
    )
    return done.stdout + " ".join(done.stderr.split())


def test_headers_that_lack_others_are_passed_over(place):
    said = configure(place, f"-DSHARDWISE_CUDA_ROOTS={place / 'nowhere'};{place / 'toolkit'}")
    assert f"with: ON of {place / 'toolkit' / 'include'}" in said


def test_the_toolkit_of_an_nvcc_is_one_of_them(place):
    (place / "nvidia/nccl/include/nccl.h").rename(place / "toolkit/include/nccl.h")
    (place / "toolkit/bin").mkdir()
    (place / "toolkit/bin/nvcc").touch(0o755)
    # A link to it is on the path.
    (place / "bin").mkdir()
    (place / "bin/nvcc").symlink_to(place / "toolkit/bin/nvcc")
    said = configure(place, f"-DSHARDWISE_CUDA_ROOTS={place / 'nowhere'}", f"-DCMAKE_PROGRAM_PATH={place / 'bin'}")
    include = place / "toolkit" / "include"
    assert f"with: ON of {include}, NCCL of {include}" in said


def test_without_any_that_compile_the_build_goes_on_and_says_why(place):
    said = configure(place, f"-DSHARDWISE_CUDA_ROOTS={place / 'nowhere'}")
    assert "with: OFF of" in said
    assert "torch is built for CUDA, and shardwise will not be:" in said
    assert "crt/not_there.h" in said
    said = configure(place, f"-DSHARDWISE_CUDA_ROOTS={place / 'nowhere'}", "-DSHARDWISE_CUDA=on")
    assert "SHARDWISE_CUDA=on, but" in said
    assert "nvidia-cuda-crt" in said


def test_without_kernels_the_build_and_its_cache_say_why(place):
    for options, why in (
        ([], "there is no nvcc"),
        ([f"-DCMAKE_CUDA_COMPILER={place}/nvcc"], f"there is no libcudart_static.a for {place}/nvcc"),
    ):
        said = configure(place, f"-DSHARDWISE_CUDA_ROOTS={place / 'toolkit'}", *options)
        assert f"it is built without its CUDA kernels: {why}." in said
        assert f"SHARDWISE_WITHOUT_KERNELS:INTERNAL={why}\n" in (place / "build/CMakeCache.txt").read_text()
    said = configure(place, "-DSHARDWISE_CUDA=off", "-DSHARDWISE_KERNELS=on")
    assert "SHARDWISE_KERNELS=on, but there is no NCCL support: SHARDWISE_CUDA=off." in said


WARNINGS = f"""
cmake_minimum_required(VERSION 3.22)
project(warnings LANGUAGES CXX)
include("{ROOT}/cmake/compile_options.cmake")
add_library(code OBJECT none.cpp)
shardwise_compile_options(code)
get_target_property(options code COMPILE_OPTIONS)
message(FATAL_ERROR "with: ${{options}}")
"""


@pytest.mark.parametrize("asked", ["", "1"])
def test_warnings_are_errors_where_the_environment_says_so_alone(place, monkeypatch, asked):
    monkeypatch.setenv("SHARDWISE_WERROR", asked)
    (place / "project/CMakeLists.txt").write_text(WARNINGS)
    options = configure(place).partition("with: ")[2].split(";")
    assert "-Wall" in options
    assert ("-Werror" in options) == bool(asked)
