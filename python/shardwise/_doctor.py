"""What shardwise finds on this machine: versions, back ends, devices, and what works, with a remedy for what does not.

>>> print(examine().text())
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from shardwise import _compatibility

_FOLDER = Path(__file__).parent
_LAUNCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OTHERS = (
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "SHARDWISE_INSTALL",
    "SHARDWISE_SHARED_MEMORY",
    "SHARDWISE_TRANSPORT",
)


@dataclass(frozen=True)
class Ability:
    """Something that works here, or does not for a reason; `needed` when shardwise is of no use without it."""

    name: str
    needed: bool
    reason: str | None = None
    remedy: str = ""

    @property
    def works(self) -> bool:
        return self.reason is None


@dataclass(frozen=True)
class Report:
    """Facts by section, and what works."""

    facts: dict[str, dict[str, str]]
    abilities: list[Ability]

    @property
    def usable(self) -> bool:
        return all(ability.works for ability in self.abilities if ability.needed)

    def text(self) -> str:
        lines = []
        for section, facts in self.facts.items():
            lines += [section, *(f"  {name:<20} {value}" for name, value in facts.items())]
        lines.append("what works here")
        for ability in self.abilities:
            lines.append(f"  {'yes' if ability.works else 'NO ':<4}{ability.name}")
            if not ability.works:
                lines += [f"        why:    {ability.reason}", f"        remedy: {ability.remedy}"]
        return "\n".join(lines)

    def json(self) -> str:
        abilities = [{**dataclasses.asdict(ability), "works": ability.works} for ability in self.abilities]
        return json.dumps({"usable": self.usable, **self.facts, "abilities": abilities}, indent=2)


def examine() -> Report:
    """Looks at this process's Python, torch, machine and environment. Starts no process group."""
    facts = {
        "versions": _versions(),
        "back ends": _back_ends(),
        "devices": _devices(),
        "environment": _environment(),
    }
    return Report(facts, [_extension(), _gloo(), _launch(), _gpus(), _cpp_programs()])


def _ask(question: Callable[[], object]) -> str:
    """An answer for the report, whatever the state of torch."""
    try:
        return str(question())
    except Exception as error:
        return f"unknown ({type(error).__name__}: {error})"


def _versions() -> dict[str, str]:
    def built(name: str) -> object:
        from shardwise import _build_info

        return getattr(_build_info, name)

    def torch_version() -> str:
        import torch

        return f"{torch.__version__} in {Path(torch.__file__).parent}"

    return {
        "shardwise": f"{_ask(lambda: built('VERSION'))} in {_FOLDER}",
        "built against torch": _ask(lambda: built("TORCH_VERSION")),
        "torch": _ask(torch_version),
        "Python": f"{platform.python_version()} at {sys.executable}",
        "system": platform.platform(),
        "C++ compiler": _ask(lambda: _first_line(_compiler(), "--version")),
        "CMake": _ask(lambda: _first_line(_tool("cmake"), "--version")),
    }


def _back_ends() -> dict[str, str]:
    def gloo() -> str:
        import torch.distributed as dist

        return "in torch" if dist.is_gloo_available() else "not in torch"

    def nccl() -> str:
        import torch
        import torch.distributed as dist

        if not dist.is_nccl_available():
            return "not in torch"
        from shardwise import _build_info

        version = ".".join(str(number) for number in torch.cuda.nccl.version())
        return f"{version} in torch; shardwise was built {'with' if _build_info.WITH_NCCL else 'without'} it"

    return {"Gloo": _ask(gloo), "NCCL": _ask(nccl), "gathers and sums": _transport()}


def _transport() -> str:
    """What units use for CPU tensors, whichever back end the program's own process group has."""
    if os.environ.get("SHARDWISE_TRANSPORT") == "gloo":
        return "of CPU tensors over Gloo, as SHARDWISE_TRANSPORT=gloo says"
    way = "over TCP" if os.environ.get("SHARDWISE_SHARED_MEMORY") == "off" else "shared memory on one host, else TCP"
    return f"of CPU tensors over shardwise's transport ({way})"


def _devices() -> dict[str, str]:
    def cpu() -> str:
        import torch

        cores = len(os.sched_getaffinity(0))
        return f"{cores} cores for this process; torch computes with {torch.get_num_threads()} threads"

    def gpus() -> dict[str, str]:
        import torch

        found = {}
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            found[f"cuda:{index}"] = f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"
        return found or {"GPU": "none"}

    try:
        return {"CPU": _ask(cpu), **gpus()}
    except Exception as error:
        return {"CPU": _ask(cpu), "GPU": f"unknown ({type(error).__name__}: {error})"}


def _environment() -> dict[str, str]:
    others = {name: os.environ[name] for name in _OTHERS if os.environ.get(name)}
    return {**{name: os.environ.get(name) or "not set" for name in _LAUNCH}, **others}


def _extension() -> Ability:
    problem = _compatibility.find_problem()
    return Ability("import shardwise", True, problem, "as the reason says; then run the doctor again")


def _gloo() -> Ability:
    """Gloo has to find this machine's own address, which fails where the host name leads nowhere."""
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
    """The rules of Mesh::from_env() in C++."""
    name = "ranks from the environment"
    remedy = f"start the program with torchrun, or set {', '.join(_LAUNCH)} on every rank, or none of them"
    given = {key: os.environ[key] for key in _LAUNCH if os.environ.get(key)}
    missing = [key for key in _LAUNCH if key not in given]
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
            remedy = "install a CUDA build of torch, then build shardwise against it"
            return Ability(name, False, "this torch is a build without CUDA", remedy)
        if not _build_info.WITH_NCCL:
            remedy = "build shardwise again with CMAKE_ARGS=-DSHARDWISE_CUDA=on, which says what is missing"
            return Ability(name, False, "this shardwise was built without NCCL", remedy)
        if not torch.cuda.is_available():
            remedy = "on a machine with an NVIDIA GPU: check nvidia-smi, the driver, and CUDA_VISIBLE_DEVICES"
            return Ability(name, False, "torch sees no GPU", remedy)
        local_rank = os.environ.get("LOCAL_RANK", "")
        if local_rank.isdigit() and int(local_rank) >= torch.cuda.device_count():
            remedy = "start no more ranks on a machine than it has GPUs"
            return Ability(name, False, f"LOCAL_RANK is {local_rank}; GPUs: {torch.cuda.device_count()}", remedy)
    except Exception as error:
        return Ability(name, False, f"{type(error).__name__}: {error}", "make `import shardwise` work first")
    return Ability(name, False)


def _cpp_programs() -> Ability:
    name = "C++ programs with find_package(shardwise)"
    config = _FOLDER / "share" / "cmake" / "shardwise" / "shardwiseConfig.cmake"
    if not config.exists():
        return Ability(name, False, f"{config} is missing", "install the package, or build it with CMake")
    if _tool("cmake") is None:
        return Ability(name, False, "there is no CMake", f"{sys.executable} -m pip install cmake")
    test = [_compiler(), "-std=c++20", "-fsyntax-only", "-x", "c++", os.devnull]
    try:
        works = subprocess.run(test, capture_output=True, check=False).returncode == 0
    except OSError:
        works = False
    if not works:
        remedy = "install g++ 11 or newer, or name a compiler with CXX"
        return Ability(name, False, f"'{_compiler()}' is missing or knows no C++20", remedy)
    return Ability(name, False)


def _compiler() -> str:
    return os.environ.get("CXX") or _tool("c++") or _tool("g++") or "c++"


def _tool(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))


def _first_line(command: str | None, option: str) -> str:
    if command is None:
        return "none"
    return subprocess.run([command, option], capture_output=True, text=True, check=True).stdout.splitlines()[0]
