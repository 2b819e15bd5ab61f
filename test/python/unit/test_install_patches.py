"""What programs do with the names that install() shows: classes below them, and patches that are taken away again."""

from __future__ import annotations

from install_programs import run_here


def test_classes_below_ours_may_be_abstract_ones():
    run_here("""
from abc import ABC, abstractmethod
from torch import nn
import torch.distributed.fsdp as fsdp
from torch.distributed._composable import replicate_with_fsdp
import shardwise
shardwise.install()
for kind in (fsdp.FSDPModule, replicate_with_fsdp.ReplicateModule):
    class First(ABC, kind):
        @abstractmethod
        def act(self): ...
    class Last(kind, ABC):
        pass
    class Layer(First, nn.Linear):
        def act(self):
            return self(torch.ones(1, 2))
    class Virtual:
        pass
    First.register(Virtual)
    assert First.__abstractmethods__ == {"act"} and not Layer.__abstractmethods__
    assert issubclass(Layer, First) and isinstance(Virtual(), First)
    assert not issubclass(Virtual, kind) and not isinstance(nn.Linear(2, 2), (First, Last, kind))
start_one_rank()
for function in (fsdp.fully_shard, replicate_with_fsdp.replicate):
    wrapped = function(nn.Linear(2, 2))
    assert isinstance(wrapped, fsdp.FSDPModule) and not isinstance(wrapped, (First, Last))
torch.distributed.destroy_process_group()
""")


def test_who_puts_back_what_was_shown_leaves_torchs_own_in_place():
    run_here("""
import shardwise
from shardwise import _torch_api
shardwise.install()
for place, names in PLACES.items():
    module = importlib.import_module(place)
    for name in names.split():
        # As those do who patch a module, and take the patch away.
        before = getattr(module, name)
        setattr(module, name, "patched")
        assert getattr(module, name) == "patched"
        setattr(module, name, before)
        assert vars(module)[name] is _torch_api.ALL[name], (place, name)
check_ours()
shardwise.uninstall()
check_torchs()
""")
