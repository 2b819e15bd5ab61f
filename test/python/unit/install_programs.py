"""Programs that look at what shardwise.install() shows, for its tests."""

from __future__ import annotations

import contextlib
import io
import sys

from checkout import python

from shardwise.testing import run_ranks

# What every program below starts with.
COMMON = """
import importlib, os, sys, tempfile, warnings
import torch
warnings.simplefilter("error")

PLACES = {
    "torch.distributed.fsdp": "FSDPModule fully_shard register_fsdp_forward_method share_comm_ctx",
    "torch.distributed.fsdp._fully_shard": "FSDPModule fully_shard register_fsdp_forward_method share_comm_ctx",
    "torch.distributed.fsdp._fully_shard._fully_shard":
        "FSDPModule fully_shard register_fsdp_forward_method share_comm_ctx",
    "torch.distributed._composable.fsdp": "FSDPModule fully_shard register_fsdp_forward_method",
    "torch.distributed._composable.fsdp.fully_shard": "FSDPModule fully_shard register_fsdp_forward_method",
    "torch.distributed._composable.replicate_with_fsdp": "replicate ReplicateModule FSDPModule",
}

def shown():
    # As `from module import name` sees it, and as an attribute.
    found = {}
    for module, names in PLACES.items():
        for name in names.split():
            scope = {}
            exec(f"from {module} import {name}", scope)
            assert scope[name] is getattr(sys.modules[module], name)
            found[module, name] = scope[name]
    return found

def check_ours():
    import shardwise
    from shardwise import _isinstance_shims
    for (module, name), value in shown().items():
        assert value.__name__ == name
        assert value.__module__.split(".")[0] == "shardwise", (module, name, value)
        assert value is (getattr(_isinstance_shims, name) if isinstance(value, type) else getattr(shardwise, name))
    check_originals()

def check_torchs():
    for (module, name), value in shown().items():
        assert value.__name__ == name
        assert value.__module__.split(".")[0] == "torch", (module, name, value)
    check_originals()

def check_originals():
    import shardwise
    from shardwise import _torch_api
    for name, value in _torch_api.ALL.items():
        assert value.__module__.split(".")[0] == "torch", (name, value)
    assert _torch_api.ReplicateModule.__mro__ == (_torch_api.ReplicateModule, _torch_api.FSDPModule, object)
    *ours, theirs, last = shardwise.FSDPModule.__mro__
    assert all(each.__module__.split(".")[0] == "shardwise" for each in ours)
    assert (theirs, last) == (_torch_api.FSDPModule, object)
    import torch.distributed._composable
    import torch.distributed._composable.replicate
    assert torch.distributed._composable.replicate.__module__ == "torch.distributed._composable.replicate"

def start_one_rank():
    store = torch.distributed.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
"""


TOLD = (
    "shardwise: as SHARDWISE_INSTALL says, these are shardwise's, not torch's: FSDPModule, ReplicateModule, "
    "fully_shard, register_fsdp_forward_method, replicate, share_comm_ctx"
)


def run(program: str, *, common: bool = True, told: int = 0, **environment: str) -> str:
    """The output of a program that must succeed, and write nothing else but so many lines of what the variable did."""
    result = python("-c", (COMMON if common else "") + program, **environment)
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines() == [TOLD] * told
    return result.stdout


def _execute(_: int, program: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(COMMON + program, "<string>", "exec"), sys.modules["__main__"].__dict__)
    return output.getvalue()


def run_here(program: str, **environment: str) -> str:
    """Of a program in a process that has imported torch and shardwise, and nothing of FSDP."""
    (output,) = run_ranks(1, _execute, program, backend=None, environment=environment)
    return output
