"""shardwise.install(): who gets ours, and who keeps torch's."""

from __future__ import annotations

from install_programs import run_here


def test_every_place_shows_ours_until_uninstall():
    run_here("""
import shardwise
import torch.distributed.fsdp
held = torch.distributed.fsdp
shardwise.install()
shardwise.install()
check_ours()
assert held.fully_shard is shardwise.fully_shard
for name in ("CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy", "UnshardHandle", "FullyShardedDataParallel"):
    assert getattr(held, name).__module__.split(".")[0] == "torch"
scope = {}
exec("from torch.distributed.fsdp import *", scope)
assert scope["fully_shard"] is shardwise.fully_shard
shardwise.uninstall()
check_torchs()
assert type(held) is type(sys)
shardwise.uninstall()
shardwise.install()
check_ours()
""")


def test_torchs_modules_that_imported_ours_have_their_own_again():
    run_here("""
import shardwise
shardwise.install()
import torch.distributed.pipelining.stage as stage
from torch.distributed.pipelining import schedules
from shardwise import _torch_api
# Which of them it imports, and whether a class is ours or one for isinstance(), is a matter of torch's version.
held = [name for name in _torch_api.ALL if name in vars(stage)]
assert "FSDPModule" in held and all(vars(stage)[name] is not _torch_api.ALL[name] for name in held)
shardwise.uninstall()
assert all(vars(stage)[name] is _torch_api.ALL[name] for name in held)
assert stage.FSDPModule is schedules.FSDPModule is _torch_api.FSDPModule
check_torchs()
""")


def test_modules_that_hold_torchs_are_named(tmp_path):
    (tmp_path / "early.py").write_text("from torch.distributed.fsdp import FSDPModule, fully_shard as shard\n")
    (tmp_path / "alias.py").write_text("import torch.distributed.fsdp as fsdp\nfrom pathlib import Path\n")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "deep.py").write_text(
        "from torch.distributed._composable.replicate_with_fsdp import replicate\n"
        "from torch.distributed._composable import replicate as ddp\n"
    )
    said = run_here(
        f"sys.path.insert(0, {str(tmp_path)!r})"
        + """
import alias, early, package.deep, shardwise
import torch.distributed.pipelining
from torch.distributed.fsdp import share_comm_ctx
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    shardwise.install()
    shardwise.install()
(warning,) = caught
print(warning.filename)
print(warning.message)
assert alias.fsdp.fully_shard is shardwise.fully_shard
assert early.shard.__module__ == "torch.distributed.fsdp"
""",
    )
    file, text = said.splitlines()
    assert file == "<string>"
    assert text == (
        "shardwise.install(): these modules imported torch's by name before, and keep it: __main__ (share_comm_ctx); "
        "early (FSDPModule, fully_shard); package.deep (replicate). Call install() before they are imported, or set "
        "SHARDWISE_INSTALL=1."
    )


MODULES_OF_BOTH_ENGINES = """
import abc
from torch import nn
from torch.distributed._composable import replicate_with_fsdp
import torch.distributed.fsdp as fsdp
import shardwise

class Plain(nn.Linear):
    pass

class WithMetaclass(nn.Linear, metaclass=abc.ABCMeta):
    pass

def wrapped(function, kind=Plain):
    return function(kind(2, 2))

def check_classes():
    for FSDPModule in (torch_class, fsdp.FSDPModule):
        assert [isinstance(each, FSDPModule) for each in modules] == [True] * 4 + [False]
        assert [issubclass(type(each), FSDPModule) for each in modules] == [True] * 4 + [False]
    for ReplicateModule in (torch_replicate_class, replicate_with_fsdp.ReplicateModule):
        assert [isinstance(each, ReplicateModule) for each in modules] == [False, False, True, True, False]
    assert [isinstance(each, shardwise.FSDPModule) for each in modules] == [True, False, True, False, False]
    # What pipelines ask for.
    assert all(fsdp.fully_shard.state(each)._fsdp_param_group is not None for each in modules[:2])
    assert all(replicate_with_fsdp.replicate.state(each)._fsdp_param_group is not None for each in modules[2:4])
    assert [fsdp.fully_shard.state(each) for each in modules[2:]] == [None] * 3

def check_works(module):
    module(torch.ones(1, 2)).sum().backward()
    assert torch.equal(module.weight.grad.full_tensor(), torch.ones(2, 2))
    module.weight.grad = None

start_one_rank()
torch_class, torch_replicate_class = fsdp.FSDPModule, replicate_with_fsdp.ReplicateModule
torchs = {"fully_shard": fsdp.fully_shard, "replicate": replicate_with_fsdp.replicate}
modules = [
    wrapped(function) for function in
    (shardwise.fully_shard, torchs["fully_shard"], shardwise.replicate, torchs["replicate"])
] + [nn.Linear(2, 2)]
check_classes()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    shardwise.install()
check_classes()
# Now ours under torch's names, and torch's by those who kept them.
modules += modules[:0]
modules[0], modules[2] = wrapped(fsdp.fully_shard, WithMetaclass), wrapped(replicate_with_fsdp.replicate, WithMetaclass)
modules[1], modules[3] = wrapped(torchs["fully_shard"]), wrapped(torchs["replicate"])
assert type(modules[0]).__mro__[1] is shardwise.FSDPModule and type(modules[2]).__mro__[1] is shardwise.ReplicateModule
assert type(modules[1]).__mro__[1] is torch_class and type(modules[3]).__mro__[1] is torch_replicate_class
check_classes()
for module in modules[:4]:
    check_works(module)
class Mine(fsdp.FSDPModule):
    pass
assert not isinstance(modules[0], Mine) and not isinstance(modules[1], Mine)
shardwise.uninstall()
check_classes()
for module in modules[:4]:
    check_works(module)
torch.distributed.destroy_process_group()
"""


def test_instances_of_both_engines_are_known_on_both_sides():
    run_here(MODULES_OF_BOTH_ENGINES)


def test_functions_take_modules_of_both_engines():
    run_here("""
from torch import nn
import torch.distributed.fsdp as fsdp
import shardwise

class Model(nn.Linear):
    def generate(self, x):
        assert not isinstance(self.weight, torch.distributed.tensor.DTensor)
        return self(x)

start_one_rank()
torchs, shared = [fsdp.fully_shard(Model(2, 2)) for _ in range(2)]
shardwise.install()
ours = [fsdp.fully_shard(Model(2, 2)) for _ in range(2)]
fsdp.share_comm_ctx([torchs, shared])
assert torchs._get_fsdp_state()._comm_ctx is shared._get_fsdp_state()._comm_ctx
fsdp.share_comm_ctx(ours)
fsdp.share_comm_ctx([])
for wrong in ([torchs, ours[0]], [nn.Linear(2, 2)]):
    try:
        fsdp.share_comm_ctx(wrong)
    except ValueError as error:
        assert "shardwise: Expects list of FSDPModules" in str(error)
    else:
        raise AssertionError(wrong)
fsdp.register_fsdp_forward_method(nn.Linear(2, 2), "generate")
for module in (torchs, ours[0]):
    fsdp.register_fsdp_forward_method(module, "generate")
shardwise.uninstall()
fsdp.register_fsdp_forward_method(ours[1], "generate")
for module in (torchs, *ours):
    assert module.generate(torch.ones(1, 2)).shape == (1, 2)
torch.distributed.destroy_process_group()
""")


def test_who_replaces_or_pickles_the_modules_still_can():
    run_here("""
import copy, pickle, types
from unittest import mock
import torch.distributed.fsdp as fsdp
import shardwise
shardwise.install()
with mock.patch("torch.distributed.fsdp.fully_shard", "mine"):
    from torch.distributed.fsdp import fully_shard
    assert fully_shard == "mine"
assert fsdp.fully_shard is shardwise.fully_shard
fsdp.fully_shard = "mine"
assert fsdp.fully_shard == "mine"
assert pickle.loads(pickle.dumps(fsdp)) is fsdp
assert pickle.loads(pickle.dumps(fsdp.fully_shard)) == "mine"
assert pickle.loads(pickle.dumps([fsdp.FSDPModule, shardwise.fully_shard])) == [fsdp.FSDPModule, shardwise.fully_shard]
assert isinstance(fsdp, types.ModuleType) and "fully_shard" in dir(fsdp)
""")


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
