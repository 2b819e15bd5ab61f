"""What works on this machine. Each ability is tried; one that does not work has a reason and a remedy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from shardwise import _compatibility

#: The variables that a launcher sets for each rank.
LAUNCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: The oldest g++ that the README asks for.
OLDEST_GCC = 12

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Ability:
    """Something that works here, or does not for a reason. `needed`: shardwise is of no use without it."""

    name: str
    needed: bool
    reason: str | None = None
    remedy: str = ""
    #: Nothing is known to be wrong, but it has never been seen to work.
    untried: bool = False

    @property
    def works(self) -> bool:
        """Whether it is known to work, and nothing here prevents it."""
        return self.reason is None

    @property
    def answer(self) -> str:
        """A word for the report."""
        return "yes" if self.works else "?" if self.untried else "NO"


def examine() -> list[Ability]:
    """Tries everything. Does not touch the program's own process groups."""
    return [_extension(), _gloo(), _launch(), _install_variable(), _gpus(), _cpp_programs()]


def _extension() -> Ability:
    problem = _compatibility.find_problem()
    return Ability("import shardwise", True, problem, "do what the reason says, then run the doctor again")


def _gloo() -> Ability:
    """Gloo must find this machine's own address, which fails if the host name does not resolve."""
    name = "replicate() on CPUs (Gloo)"
    try:
        import torch

        dist: Any = torch.distributed
        group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
        group.allreduce([torch.ones(1)]).wait()
    except Exception as error:
        remedy = "name a network interface of this machine: export GLOO_SOCKET_IFNAME=lo (one machine) or eth0 or ..."
        return Ability(name, True, f"Gloo could not be set up: {error}", remedy)
    return Ability(name, True)


def _launch() -> Ability:
    """Checks the rules that Mesh::from_env() has in C++."""
    name = "ranks from the environment"
    remedy = f"start the program with torchrun, or set {', '.join(LAUNCH)} on every rank, or none of them"
    given = {key: os.environ[key] for key in LAUNCH if os.environ.get(key)}
    missing = [key for key in LAUNCH if key not in given]
    if given and missing:
        return Ability(name, True, f"{', '.join(given)} set, but not {', '.join(missing)}", remedy)
    largest = 2**31 - 1
    limits = {"RANK": (0, largest), "WORLD_SIZE": (1, largest), "MASTER_PORT": (1, 65535), "LOCAL_RANK": (0, largest)}
    for key, (low, high) in limits.items():
        value = os.environ.get(key)
        if given and value and not (value.isascii() and value.isdigit() and low <= int(value) <= high):
            return Ability(name, True, f"{key} is '{value}'; it must be a whole number from {low} to {high}", remedy)
    if given and int(given["RANK"]) >= int(given["WORLD_SIZE"]):
        reason = f"RANK is {given['RANK']}, but WORLD_SIZE is {given['WORLD_SIZE']}"
        return Ability(name, True, reason, "RANK counts from 0 to WORLD_SIZE - 1")
    return Ability(name, True)


def _gpus() -> Ability:
    name = "replicate() on GPUs (NCCL)"
    try:
        import torch

        from shardwise import _build_info

        if torch.version.cuda is None:
            remedy = "install a CUDA build of torch"
            return Ability(name, False, "this torch is a build without CUDA", remedy)
        if not _build_info.WITH_NCCL:
            remedy = "build shardwise again with CMAKE_ARGS=-DSHARDWISE_CUDA=on, which says what is missing"
            return Ability(name, False, "this shardwise was built without NCCL", remedy)
        if not torch.cuda.is_available():
            remedy = "on a machine with an NVIDIA GPU: check nvidia-smi, the driver, and CUDA_VISIBLE_DEVICES"
            return Ability(name, False, "torch sees no GPU", remedy)
        local_rank = os.environ.get("LOCAL_RANK", "")
        if local_rank.isdigit() and int(local_rank) >= torch.cuda.device_count() > 1:
            remedy = "start no more ranks on a machine than it has GPUs"
            return Ability(name, False, f"LOCAL_RANK is {local_rank}; GPUs: {torch.cuda.device_count()}", remedy)
    except Exception as error:
        return Ability(name, False, f"{type(error).__name__}: {error}", "make `import shardwise` work first")
    remedy = "compare a few steps on GPUs with the same steps on CPUs before you rely on it"
    return Ability(name, False, "it is built, but shardwise ran on one kind of GPU only, an H100", remedy, untried=True)


def _cpp_programs() -> Ability:
    name = "C++ programs with find_package(shardwise)"
    config = _FOLDER / "share" / "cmake" / "shardwise" / "shardwiseConfig.cmake"
    if not config.exists():
        return Ability(name, False, f"{config} is missing", "install the package, or build it with CMake")
    if tool("cmake") is None:
        return Ability(name, False, "there is no CMake", f"{sys.executable} -m pip install cmake")
    found = _gcc_version(compiler())
    if found is None or found < OLDEST_GCC:
        remedy = f"install g++ {OLDEST_GCC} or newer, or name it with CXX"
        if shutil.which(compiler()) is None:
            return Ability(name, False, f"'{compiler()}' was not found", remedy)
        what = "is not g++" if found is None else f"is g++ {found}"
        return Ability(name, False, f"'{compiler()}' {what}; shardwise is built and tested with g++", remedy)
    return Ability(name, False)


def _gcc_version(command: str) -> int | None:
    """The major version of a g++; None if the command is missing or another compiler."""
    try:
        test = [command, "-dM", "-E", "-x", "c++", os.devnull]
        shown = subprocess.run(test, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    macros = dict(line.split(" ", 2)[1:] for line in shown.stdout.splitlines() if line.count(" ") >= 2)
    return int(macros["__GNUC__"]) if "__clang__" not in macros and macros.get("__GNUC__", "").isdigit() else None


def _install_variable() -> Ability:
    """Checks the .pth file that reads the variable when Python starts. If it is missing, nothing else can say so."""
    name = "SHARDWISE_INSTALL=1 (torch's functions are replaced)"
    program = "import sys; print(getattr(sys.modules.get('_shardwise_install'), '__file__', ''))"
    environment = {**os.environ, "SHARDWISE_INSTALL": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    found = done.stdout.strip()
    if done.returncode == 0 and found and Path(found).resolve().parent == _FOLDER.parent.resolve():
        return Ability(name, False)
    if found:
        reason = f"{found} is read, which belongs to another shardwise than the one in {_FOLDER}"
    else:
        reason = f"no shardwise_install.pth is read when {sys.executable} starts, so the variable does nothing"
    if said := done.stderr.strip():
        reason += f" ({said})"
    remedy = "install the package with pip into this environment, or call shardwise.install() first in the program"
    return Ability(name, False, reason, remedy)


def compiler() -> str:
    return os.environ.get("CXX") or tool("c++") or tool("g++") or "c++"


def tool(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))
