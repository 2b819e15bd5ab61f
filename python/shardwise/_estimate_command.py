"""python -m shardwise estimate: a model's memory on a rank, and the time of a step, before anything is allocated."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

# torch is imported only when a model is made, so that other commands can say what is wrong with torch.
if TYPE_CHECKING:
    import torch
    from torch import nn

    from shardwise._estimate import Link, MemoryEstimate, TimeEstimate

ABOUT = "prints what training a model needs on each rank, phase by phase; nothing is allocated"
#: What a size or a rate may end in.
POWERS = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
#: Bytes that an optimizer keeps for each byte of a parameter.
OPTIMIZERS = {"adam": 2.0, "momentum": 1.0, "sgd": 0.0}


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", help="what makes it: package.module:function or file.py:function, without arguments")
    command.add_argument("--world", type=int, required=True, help="the number of ranks")
    command.add_argument("--policy", choices=("fully_shard", "replicate"), default="fully_shard")
    command.add_argument(
        "--units", action="append", default=[], metavar="PATTERN",
        help="names of modules that are wrapped by themselves, as 'layers.*'; may be given again",
    )  # fmt: skip
    command.add_argument(
        "--reshard", type=_reshard, metavar="yes|no|K", help="whether full parameters are freed after forward"
    )
    command.add_argument("--param-dtype", type=_dtype, metavar="DTYPE", help="to compute in, as bfloat16")
    command.add_argument("--reduce-dtype", type=_dtype, metavar="DTYPE", help="to sum gradients in")
    command.add_argument("--copies", type=int, default=1, help="ranks that hold copies of each shard (HSDP)")
    command.add_argument("--rank", type=int, default=0, help="of those that hold shards; the first ones hold most")
    command.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    times = command.add_argument_group("the time of a step", "with --link, and what the step computes")
    times.add_argument(
        "--link", type=_link, metavar="BYTES[,SECONDS]",
        help="what a rank's link carries a second, and its latency, as 450G,10e-6",
    )  # fmt: skip
    times.add_argument(
        "--between", type=_link, metavar="BYTES[,SECONDS]", help="the same for a host's link to other hosts"
    )
    times.add_argument("--ranks-per-host", type=int, default=0)
    times.add_argument("--compute", type=float, metavar="SECONDS", help="of forward and backward without other ranks")
    times.add_argument("--tokens", type=_number, help="instead of --compute: of a rank in a step")
    times.add_argument(
        "--flops", type=_number, help="and what a rank computes a second, as 400T: 6 a parameter and token"
    )
    command.add_argument("--json", action="store_true", help="print the numbers as JSON")


def run(arguments: argparse.Namespace) -> int:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from shardwise._estimate import estimate_memory, estimate_time

    try:
        model = make_model(arguments.model)
        how: dict[str, Any] = {
            "policy": arguments.policy,
            "units": units_of(model, arguments.units),
            "reshard_after_forward": arguments.reshard,
            "mp_policy": MixedPrecisionPolicy(param_dtype=arguments.param_dtype, reduce_dtype=arguments.reduce_dtype),
            "copies": arguments.copies,
            "rank": arguments.rank,
            "optimizer_factor": OPTIMIZERS[arguments.optimizer],
        }
        found: list[MemoryEstimate | TimeEstimate] = [estimate_memory(model, arguments.world, **how)]
        if arguments.link:
            links = {"link": arguments.link, "between": arguments.between, "ranks_per_host": arguments.ranks_per_host}
            found.append(estimate_time(model, arguments.world, compute=_compute(arguments, model), **links, **how))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps({key: value for each in found for key, value in json.loads(each.json()).items()}))
    else:
        print(*found, sep="\n", end="")
    return 0


def _compute(arguments: argparse.Namespace, model: nn.Module) -> float:
    if arguments.compute is not None:
        return float(arguments.compute)
    if arguments.tokens is None or not arguments.flops:
        raise ValueError("shardwise: --link needs what a step computes: give --compute, or --tokens and --flops.")
    return float(6 * sum(each.numel() for each in model.parameters()) * arguments.tokens / arguments.flops)


def make_model(target: str) -> nn.Module:
    """Calls the function that makes the model, on the meta device."""
    import torch
    from torch import nn

    place, colon, name = target.rpartition(":")
    if not colon:
        raise ValueError(
            f"shardwise: '{target}' names no function: write package.module:function, or file.py:function."
        )
    function = getattr(_module(place), name, None)
    if not callable(function):
        raise ValueError(f"shardwise: there is no function '{name}' in {place}.")
    with torch.device("meta"):
        model = function()
    if not isinstance(model, nn.Module):
        raise ValueError(f"shardwise: {target}() must return an nn.Module, not a {type(model).__name__}.")
    return model


def units_of(model: nn.Module, patterns: list[str]) -> list[nn.Module]:
    """The modules that match, inner ones before outer ones, as they are wrapped."""
    named = dict(model.named_modules())
    depths: dict[nn.Module, int] = {}
    for pattern in patterns:
        # `layers.*` means the layers, not what is inside them.
        depth = pattern.count(".")
        fitting = [name for name in named if name and name.count(".") == depth and fnmatchcase(name, pattern)]
        if not fitting:
            raise ValueError(f"shardwise: no module of {type(model).__name__} has a name like '{pattern}'.")
        depths.update((named[name], depth) for name in fitting)
    return sorted(depths, key=lambda module: -depths[module])


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        # Finds modules as `python -m` does.
        sys.path.insert(0, "")
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise ValueError(f"shardwise: {error}; name a module that can be imported from here.") from error
    file = Path(place)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ValueError(f"shardwise: there is no file {place}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.parent))
    spec.loader.exec_module(module)
    return module


def _dtype(text: str) -> torch.dtype:
    import torch

    kind = getattr(torch, text, None)
    if not isinstance(kind, torch.dtype):
        raise argparse.ArgumentTypeError(f"'{text}' is not a dtype of torch")
    return kind


def _number(text: str) -> float:
    power = POWERS.get(text[-1:].upper())
    return float(text[:-1]) * power if power else float(text)


def _link(text: str) -> Link:
    from shardwise._estimate import Link

    size, _, latency = text.partition(",")
    return Link(_number(size), float(latency or 0))


def _reshard(text: str) -> bool | int:
    if text in ("yes", "no"):
        return text == "yes"
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is neither yes nor no nor a number of ranks")
    return int(text)
