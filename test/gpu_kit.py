"""Makes a kit for a machine that has a GPU and nothing else: what `make gpu` would build there, built here and packed.

usage: gpu_kit.py [--python PYTHON] [--torch 2.11.0] [--arch 90] [--folder .gpukit]

The machine needs the Python and torch that the kit was built for, and these sources; `make gpu KIT=FOLDER` unpacks it:
build/kit is then the build folder, and python/shardwise has the kit's library. The kit has NCCL too, with its code for
this one architecture, in a version that lets several ranks share a GPU. When it is made it is tried: unpacked beside a
copy of the sources, with a Python that has torch and nothing of ours, the steps that need no GPU run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import mmap
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from programs import ROOT, copy_sources, git

sys.path.append(str(ROOT / "benchmarks"))
from machine import first_line

#: The build folder of what was unpacked.
KIT = ROOT / "build" / "kit"
TARGETS = ("shardwise", "shardwise_python", "unit_tests", "rank_tests", "bound_models", "bound_late",
           "meters", "host_cost", "memory_steps", "rank_steps", "modelled_peers", "moves", "gpt")  # fmt: skip
#: What a build leaves that the steps use.
BUILT = ("build.ninja", "test/cpp/unit_tests", "test/cpp/rank_tests", "test/cpp/bound_*.so", "benchmarks/cpp/host_cost",
         "benchmarks/cpp/memory_steps", "benchmarks/cpp/rank_steps", "benchmarks/cpp/moves",
         "benchmarks/cpp/libmeters.so", "benchmarks/cpp/modelled_peers*.so", "examples/cpp/gpt")  # fmt: skip
PACKAGE = ("_build_info.py", "*.so", "lib/*.so")
#: What the built files depend on: a kit of other sources says so.
SOURCES = ("CMakeLists.txt", "cmake", "csrc", "test/cpp", "test/late_device", "test/stream_group",
           "test/thread_group", "benchmarks/cpp", "examples/cpp")  # fmt: skip
#: What a container of code for GPUs begins with.
MARK = b"\x50\xed\x55\xba"
NCCL = "2.30.7"
MOST_MIB = 64
#: Tried when a kit is made: one of each kind of step.
TRIED = ("build", "unit_tests", "nccl", "direct", "rank_tests", "graph", "python_on_device", "moves", "profile")
TRIED_ROWS = "ReplicateGradients.*:FullyShardSizes.*"


def sources_of(root: Path) -> str:
    """Says whether two trees have the same sources."""
    found = hashlib.sha256()
    paths = [path for name in SOURCES for path in (root / name, *(root / name).rglob("*")) if path.is_file()]
    for path in sorted(paths):
        found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def run(command: Sequence[object], folder: Path = ROOT, **environment: str) -> str:
    words = [str(word) for word in command]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SHARDWISE_", "MAKE", "MFLAGS"))}
    done = subprocess.run(words, cwd=folder, env={**kept, **environment}, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"gpu-kit: {' '.join(words)} ended with status {done.returncode}.\n{done.stdout[-3000:]}")
    return done.stdout


# Making


def find_python(version: str) -> str:
    """The first that runs: pyenv puts a python3.12 on the path that does not, while none of its versions is chosen."""
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"), reverse=True)
    for found in filter(None, [shutil.which(f"python{version}"), *pyenv]):
        if subprocess.run([found, "--version"], capture_output=True).returncode == 0:
            return str(found)
    sys.exit(f"gpu-kit: there is no python{version} that runs; name one: PYTHON=...")


def build(source: Path, python: str, torch: str, arch: str) -> None:
    run(["sh", "scripts/prepare.sh", "test", python], source, TORCH=torch)
    options = [f"-DSHARDWISE_BUILD_{part}=ON" for part in ("TESTS", "EXAMPLES", "BENCHMARKS")]
    command = ["scripts/python", "scripts/build.py", "dev", *options, f"-DCMAKE_CUDA_ARCHITECTURES={arch}"]
    run([*command, "--install", "--target", *TARGETS], source, TORCH=torch)


def built_files(source: Path, build: Path) -> dict[str, Path]:
    """By their names in the kit."""
    names: dict[str, Path] = {}
    kinds = ((build, KIT.relative_to(ROOT), BUILT), (source / "python/shardwise", Path("python/shardwise"), PACKAGE))
    for folder, name, patterns in kinds:
        for pattern in patterns:
            found = sorted(folder.glob(pattern))
            if not found:
                sys.exit(f"gpu-kit: the build left no {pattern} in {folder}.")
            names |= {str(name / path.relative_to(folder)): path for path in found}
    return names


def pack(files: dict[str, Path], archive: Path) -> None:
    with tarfile.open(archive, "w:xz") as packed:
        for name, path in files.items():
            packed.add(path, name)


def least_versions(files: Sequence[Path]) -> str:
    symbols = "".join(run(["objdump", "-T", path]) for path in files)
    found = {name: re.findall(rf"{name}_([\d.]+)", symbols) for name in ("GLIBC", "GLIBCXX")}
    return ", ".join(f"{name} {max(all_of, key=numbers)}" for name, all_of in found.items())


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def is_program(path: Path) -> bool:
    return path.suffix == ".so" or os.access(path, os.X_OK)


def keep_one_architecture(library: Path, arch: int) -> None:
    """Overwrites the code for all other GPUs with zeros, so that the file packs small.

    A library for CUDA has containers (a header of 16 bytes: a mark, two numbers, the size of what follows) of entries,
    each with a header of its own: what it is, the sizes of header and code, and at byte 28 the architecture.
    """
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as code:
        at = code.find(MARK)
        while at >= 0:
            version, header, size = struct.unpack_from("<HHQ", code, at + 4)
            entry = at + header
            end = entry + size if (version, header) == (1, 16) else at + 4
            while entry < end:
                length, payload = struct.unpack_from("<IQ", code, entry + 4)
                (made_for,) = struct.unpack_from("<I", code, entry + 28)
                if made_for != arch:
                    code[entry + length : entry + length + payload] = bytes(payload)
                entry += length + payload
            at = code.find(MARK, end)


def make_nccl(python: Path, arch: int, archive: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run([python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, f"nvidia-nccl-cu13=={NCCL}"])
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            library = Path(wheel.extract("nvidia/nccl/lib/libnccl.so.2", folder))
        keep_one_architecture(library, arch)
        pack({"build/kit/libnccl.so.2": library}, archive)


def make(python: str, torch: str, arch: str, folder: Path) -> None:
    begin = time.monotonic()
    source = ROOT / "build" / "kit_source"
    copy_sources(source)
    build(source, python or find_python("3.12"), torch, arch)
    # A kit for another GPU is beside this one.
    nccl = folder / f"nccl-{NCCL}-sm_{arch}.tar.xz"
    folder.mkdir(parents=True, exist_ok=True)
    if not nccl.exists():
        make_nccl(source / ".venv/bin/python", int(arch), nccl)
    size = pack_kit(source, source / "build/dev", folder, arch, [nccl])
    if size > MOST_MIB:
        sys.exit(f"gpu-kit: the kit has {size:.0f} MiB, and may have {MOST_MIB}.")
    made = time.monotonic() - begin
    print(f"gpu-kit: {size:.1f} MiB in {folder}, made in {made:.0f} s", flush=True)
    try_kit(folder, source)
    print(f"gpu-kit: tried in {time.monotonic() - begin - made:.0f} s", flush=True)


def pack_kit(source: Path, build: Path, folder: Path, arch: str, others: Sequence[Path] = ()) -> float:
    """What was built there, stripped, and the manifest; in MiB, with other archives of the kit."""
    with tempfile.TemporaryDirectory() as name:
        files = {}
        for kept, path in built_files(source, build).items():
            files[kept] = staged = Path(name) / kept
            staged.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, staged)
            if is_program(staged):
                run(["strip", "--strip-unneeded", staged])
        pack(files, folder / "kit.tar.xz")
        needs = least_versions(list(filter(is_program, files.values())))
        info = files["python/shardwise/_build_info.py"].read_text()
    archives = [folder / "kit.tar.xz", *others]
    manifest = {
        "commit": git("rev-parse", "HEAD"),
        "sources": sources_of(source),
        "Python": ".".join(re.findall(r"_C\.cpython-(\d)(\d+)", " ".join(files))[0]),
        "torch": re.findall(r'TORCH_VERSION = "(.*)"', info)[0],
        "NCCL": NCCL,
        "nvcc": first_line("sh", "-c", "nvcc --version | tail -1"),
        "compiler": first_line("c++", "--version"),
        "architecture": arch,
        "least": needs,
        "sha256": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in archives},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return sum(path.stat().st_size for path in archives) / 2**20


def try_kit(folder: Path, source: Path) -> None:
    """In an empty folder, with an environment of its own that has torch, but nothing of ours. What was built is out of
    the way meanwhile, where the kit's programs may still look for it."""
    built = [source / "build", source / "python/shardwise/lib"]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as aside:
        for path in built:
            aside.callback(path.with_suffix(".aside").rename, path)
            path.rename(path.with_suffix(".aside"))
        copy_sources(Path(name) / "sources")
        environment = Path(name) / "environment"
        run([source / ".venv/bin/python", "-m", "venv", "--without-pip", environment])
        (site,) = environment.glob("lib/python*/site-packages")
        (torchs,) = source.glob(".venv/lib/python*/site-packages")
        (site / "torch.pth").write_text(f"{torchs}\n")
        command = [environment / "bin/python", "test/on_gpu.py", *TRIED, "--device", "late", "--only", TRIED_ROWS]
        print(run([*command, "--kit", folder.resolve()], Path(name) / "sources"), end="")


# Using


def refuse(manifest: Mapping[str, Any], folder: Path) -> None:
    """What the kit is not for."""
    for name, wanted in manifest["sha256"].items():
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != wanted:
            sys.exit(f"on_gpu: {folder / name} is not the file that the kit was made with.")
    python = "{}.{}".format(*sys.version_info)
    torch = importlib.metadata.version("torch").partition("+")[0] if importlib.util.find_spec("torch") else "none"
    if (python, torch) != (manifest["Python"], manifest["torch"]):
        sys.exit(f"on_gpu: the kit is for Python {manifest['Python']} with torch {manifest['torch']}; this is Python "
                 f"{python} with torch {torch}. Name another one: PYTHON=...")  # fmt: skip
    capability = first_line("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader").replace(".", "")
    if capability not in ("none", manifest["architecture"]):
        sys.exit(f"on_gpu: the kit has code for GPUs of the architecture {manifest['architecture']}; this one is of "
                 f"{capability}. Make another kit: make gpu-kit ARCH={capability}")  # fmt: skip
    if sources_of(ROOT) != manifest["sources"]:
        print(f"on_gpu: THE KIT IS OF OTHER SOURCES than these: of commit {manifest['commit'][:9]}", flush=True)


def unpack(folder: Path) -> dict[str, str]:
    """Into this tree. Returns the environment of programs that use it: they were linked for the machine that made
    them."""
    manifest = json.loads((folder / "manifest.json").read_text())
    refuse(manifest, folder)
    shutil.rmtree(KIT, ignore_errors=True)
    # What was installed is the kit's now: the next build installs its own.
    (ROOT / "build/dev/installed.stamp").unlink(missing_ok=True)
    for name in manifest["sha256"]:
        with tarfile.open(folder / name) as archive:
            archive.extractall(ROOT, filter="tar")
    torch_libraries = importlib.metadata.distribution("torch").locate_file("torch/lib")
    paths = {"PYTHONPATH": [ROOT / "python"], "LD_LIBRARY_PATH": [ROOT / "python/shardwise/lib", torch_libraries]}
    before = {name: os.environ.get(name, "") for name in paths}
    found = {name: ":".join(map(str, filter(None, (*added, before[name])))) for name, added in paths.items()}
    return {"SHARDWISE_BUILD_DIR": str(KIT.relative_to(ROOT)), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="", help="that has no torch: .venv gets one; default: a python3.12")
    parser.add_argument("--torch", default="2.11.0")
    parser.add_argument("--arch", default="90", help="of the GPU: 80, 90, 100, ...")
    parser.add_argument("--folder", type=Path, default=ROOT / ".gpukit")
    options = parser.parse_args()
    make(options.python, options.torch, options.arch, options.folder)


if __name__ == "__main__":
    main()
