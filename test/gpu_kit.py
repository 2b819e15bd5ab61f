"""Makes a kit for a machine that has a GPU and nothing else: what `make gpu` would build there, built here and packed.

usage: gpu_kit.py [--python PYTHON] [--torch 2.11.0] [--arch 90] [--folder .gpukit]

The machine needs the Python and torch that the kit was built for, and these sources; `make gpu KIT=FOLDER` unpacks it
into them. The kit has NCCL too, with its code for this one architecture, in a version that lets several ranks share a
GPU. When it is made it is tried: unpacked beside a copy of the sources, with a Python that has torch and nothing of
ours, the steps that need no GPU run.
"""

from __future__ import annotations

import argparse
import hashlib
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
from collections.abc import Iterator, Sequence
from pathlib import Path

from programs import ROOT, copy_sources, git

BUILD = "build/dev"
TARGETS = ("shardwise", "shardwise_python", "unit_tests", "rank_tests", "bound_models", "bound_late",
           "meters", "host_cost", "memory_steps", "rank_steps", "modelled_peers", "moves", "gpt")  # fmt: skip
#: What a build leaves that the steps use.
BUILT = ("build.ninja", "test/cpp/unit_tests", "test/cpp/rank_tests", "test/cpp/bound_*.so", "benchmarks/cpp/host_cost",
         "benchmarks/cpp/memory_steps", "benchmarks/cpp/rank_steps", "benchmarks/cpp/moves",
         "benchmarks/cpp/libmeters.so", "benchmarks/cpp/modelled_peers*.so", "examples/cpp/gpt")  # fmt: skip
PACKAGE = ("_build_info.py", "*.so", "lib/*.so")
#: What the built files depend on: a kit of other sources says so.
SOURCES = ("csrc", "test/cpp", "test/late_device", "test/stream_group", "test/thread_group", "benchmarks/cpp",
           "examples/cpp")  # fmt: skip
#: What a container of code for GPUs begins with.
MARK = b"\x50\xed\x55\xba"
NCCL = "nvidia-nccl-cu13==2.30.7"
MOST_MIB = 64
#: Tried when a kit is made.
TRIED = ("unit_tests", "nccl", "rank_tests", "moves", "profile")
TRIED_ROWS = "ReplicateGradients.*:FullyShardSizes.*"


def sources_of(root: Path) -> str:
    """Says whether two trees have the same sources."""
    found = hashlib.sha256()
    for path in sorted(path for folder in SOURCES for path in (root / folder).rglob("*") if path.is_file()):
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


def built_files(source: Path) -> Iterator[Path]:
    for folder, patterns in ((source / BUILD, BUILT), (source / "python/shardwise", PACKAGE)):
        for pattern in patterns:
            found = sorted(folder.glob(pattern))
            if not found:
                sys.exit(f"gpu-kit: the build left no {pattern} in {folder}.")
            yield from found


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
        run([python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, NCCL])
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            library = Path(wheel.extract("nvidia/nccl/lib/libnccl.so.2", folder))
        keep_one_architecture(library, arch)
        pack({"build/kit/libnccl.so.2": library}, archive)


def make(python: str, torch: str, arch: str, folder: Path) -> None:
    begin = time.monotonic()
    source = ROOT / "build" / "kit_source"
    copy_sources(source)
    build(source, python or find_python("3.12"), torch, arch)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        files = {str(path.relative_to(source)): Path(name) / path.relative_to(source) for path in built_files(source)}
        for relative, staged in files.items():
            staged.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / relative, staged)
            if is_program(staged):
                run(["strip", "--strip-unneeded", staged])
        pack(files, folder / "kit.tar.xz")
        needs = least_versions(list(filter(is_program, files.values())))
    if not (folder / "nccl.tar.xz").exists():
        make_nccl(source / ".venv/bin/python", int(arch), folder / "nccl.tar.xz")
    archives = [folder / "kit.tar.xz", folder / "nccl.tar.xz"]
    version = run([source / ".venv/bin/python", "-c", "import sys; print('{}.{}'.format(*sys.version_info))"])
    manifest = {
        "commit": git("rev-parse", "HEAD"),
        "sources": sources_of(source),
        "Python": version.strip(),
        "torch": torch,
        "architecture": arch,
        "least": needs,
        "sha256": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in archives},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    size = sum(path.stat().st_size for path in archives) / 2**20
    if size > MOST_MIB:
        sys.exit(f"gpu-kit: the kit has {size:.0f} MiB, and may have {MOST_MIB}.")
    made = time.monotonic() - begin
    print(f"gpu-kit: {size:.1f} MiB in {folder}, made in {made:.0f} s; it needs {needs}", flush=True)
    try_kit(folder, source)
    print(f"gpu-kit: tried in {time.monotonic() - begin - made:.0f} s", flush=True)


def try_kit(folder: Path, source: Path) -> None:
    """In an empty folder, with an environment of its own that has torch, but nothing of ours."""
    with tempfile.TemporaryDirectory() as name:
        copy_sources(Path(name) / "sources")
        environment = Path(name) / "environment"
        run([source / ".venv/bin/python", "-m", "venv", "--without-pip", environment])
        (site,) = environment.glob("lib/python*/site-packages")
        (torchs,) = source.glob(".venv/lib/python*/site-packages")
        (site / "torch.pth").write_text(f"{torchs}\n")
        command = [environment / "bin/python", "test/on_gpu.py", *TRIED, "--device", "late", "--only", TRIED_ROWS]
        print(run([*command, "--kit", folder.resolve()], Path(name) / "sources"), end="")


# Using


def unpack(folder: Path) -> None:
    """Into this tree; programs that are started from now on find what the kit brought."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, wanted in manifest["sha256"].items():
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != wanted:
            sys.exit(f"on_gpu: {folder / name} is not the file that the kit was made with.")
    here = "{}.{}".format(*sys.version_info)
    torch = importlib.util.find_spec("torch")
    if here != manifest["Python"] or torch is None:
        sys.exit(f"on_gpu: the kit is for Python {manifest['Python']} with torch {manifest['torch']}; this is {here}"
                 f"{'' if torch else ', without torch'}. Name another one: PYTHON=...")  # fmt: skip
    if sources_of(ROOT) != manifest["sources"]:
        print(f"on_gpu: THE KIT IS OF OTHER SOURCES than these: of commit {manifest['commit'][:9]}", flush=True)
    for name in manifest["sha256"]:
        with tarfile.open(folder / name) as archive:
            archive.extractall(ROOT, filter="tar")
    (torch_folder,) = torch.submodule_search_locations or [""]
    # The programs were linked for the machine that made them.
    libraries = [str(ROOT / "python/shardwise/lib"), f"{torch_folder}/lib", os.environ.get("LD_LIBRARY_PATH", "")]
    os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, libraries))
    os.environ["PYTHONPATH"] = ":".join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]))


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
