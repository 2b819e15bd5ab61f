"""shardwise.install(): who gets ours, who keeps torch's, and what the variable SHARDWISE_INSTALL does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from broken_package import PACKAGE, BrokenPackage
from installation import Environment

FOLDER = PACKAGE.parent

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
    assert shardwise.FSDPModule.__mro__ == (shardwise.FSDPModule, _torch_api.FSDPModule, object)
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
    result = subprocess.run(
        [sys.executable, "-c", (COMMON if common else "") + program],
        env={**os.environ, "PYTHONPATH": str(FOLDER), **environment},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines() == [TOLD] * told
    return result.stdout


def test_every_place_shows_ours_until_uninstall():
    run("""
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
    run("""
import shardwise
shardwise.install()
import torch.distributed.pipelining.stage as stage
from torch.distributed.pipelining import schedules
assert stage.fully_shard is shardwise.fully_shard and stage.replicate is shardwise.replicate
shardwise.uninstall()
from shardwise import _torch_api
assert stage.fully_shard is _torch_api.fully_shard and stage.replicate is _torch_api.replicate
assert stage.FSDPModule is schedules.FSDPModule is _torch_api.FSDPModule
assert stage.ReplicateModule is _torch_api.ReplicateModule
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
    said = run(
        """
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
        PYTHONPATH=f"{tmp_path}:{FOLDER}",
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
    run(MODULES_OF_BOTH_ENGINES)


def test_functions_take_modules_of_both_engines():
    run("""
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
    run("""
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


@pytest.fixture
def site(tmp_path) -> Path:
    """A folder in whose place the package seems to be installed: Python reads the .pth file beside it."""
    (tmp_path / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(FOLDER)!r})\n")
    return tmp_path


STATE = """
import sys
print([name for name in ("torch", "shardwise", "_shardwise_install") if name in sys.modules], len(sys.meta_path))
"""


def test_nothing_happens_where_the_variable_is_not_set(site, monkeypatch):
    monkeypatch.delenv("SHARDWISE_INSTALL", raising=False)
    usual = run(STATE, common=False)
    assert usual.startswith("[] ")
    assert run(STATE, common=False, PYTHONPATH=str(site)) == usual
    for value in ("", "0", "false", "No", "off"):
        assert run(STATE, common=False, PYTHONPATH=str(site), SHARDWISE_INSTALL=value) == usual, value
    run("import torch.distributed.fsdp\ncheck_torchs()", PYTHONPATH=str(site), SHARDWISE_INSTALL="0")


def test_the_variable_imports_nothing_at_the_start(site):
    said = run(STATE, common=False, PYTHONPATH=str(site), SHARDWISE_INSTALL="1")
    assert said.startswith("['_shardwise_install'] ")


FIRST_IMPORTS = [
    "import torch.distributed.fsdp",
    "from torch.distributed.fsdp import fully_shard\nassert fully_shard.__module__ == 'shardwise._fully_shard'",
    "import torch.distributed.fsdp._fully_shard._fully_shard",
    "import torch.distributed._composable.fsdp",
    "import torch.distributed._composable.fsdp.fully_shard",
    "from torch.distributed._composable.replicate_with_fsdp import replicate\n"
    "assert replicate.__module__ == 'shardwise._replicate'",
    "import torch.distributed.pipelining",
    "import torch._dynamo",
    "import shardwise\nshardwise.fully_shard",
    "import shardwise\nshardwise.replicate\nshardwise.install()",
    "import shardwise\nshardwise.install()",
]


def test_the_variable_installs_whatever_comes_first(site):
    # Forks, since all of them need torch itself.
    said = run(
        f"""
for first in {FIRST_IMPORTS!r}:
    if os.fork() == 0:
        status = 1
        try:
            assert "torch.distributed.fsdp" not in sys.modules and "shardwise" not in sys.modules
            exec(first, {{}})
            check_ours()
            import shardwise
            shardwise.uninstall()
            check_torchs()
            status = 0
        finally:
            if status:
                import traceback
                traceback.print_exc()
            os._exit(status)
    print(os.wait()[1], first.splitlines()[0])
""",
        # Whoever calls install() knows it.
        told=len(FIRST_IMPORTS) - 1,
        PYTHONPATH=str(site),
        SHARDWISE_INSTALL="1",
    )
    assert said.splitlines() == [f"0 {first.splitlines()[0]}" for first in FIRST_IMPORTS]


def test_the_first_rank_alone_tells(site):
    program = """
import multiprocessing, sys, torch.distributed.fsdp
if __name__ == "__main__" and len(sys.argv) > 1:
    process = multiprocessing.get_context("spawn").Process(target=print, args=("a child",))
    process.start()
    process.join()
"""
    file = site / "program.py"
    file.write_text(program)
    for rank, words, told in (("0", ["with a child"], [TOLD]), ("1", [], [])):
        environment = {**os.environ, "PYTHONPATH": str(site), "SHARDWISE_INSTALL": "1", "RANK": rank}
        command = [sys.executable, file, *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert (done.stdout.splitlines(), done.stderr.splitlines()) == (["a child"][: len(words)], told)


def test_uninstall_before_the_import_lasts(site):
    program = "import shardwise\nshardwise.uninstall()\nimport torch.distributed.fsdp\ncheck_torchs()"
    run(program, PYTHONPATH=str(site), SHARDWISE_INSTALL="1")


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ("not built", "is not built. Build it: "),
        ("only the .pth file", "No module named '_shardwise_install'"),
        ("raises", "of no use"),
    ],
)
def test_a_broken_package_breaks_no_interpreter(tmp_path, broken, told):
    if broken == "not built":
        BrokenPackage(tmp_path, built=False)
    if broken == "raises":
        (tmp_path / "shardwise").mkdir()
        (tmp_path / "shardwise" / "__init__.py").write_text("raise RuntimeError('of\\nno use')\n")
    for name in ("shardwise_install.pth", "_shardwise_install.py")[: 1 if broken == "only the .pth file" else 2]:
        (tmp_path / name).write_text((FOLDER / name).read_text())
    (tmp_path / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(tmp_path)!r})\n")
    # This Python may have the checkout on its path.
    clean = Environment.create(tmp_path / "environment")
    result = subprocess.run(
        [clean.python, "-c", "from torch.distributed.fsdp import fully_shard; print(fully_shard.__module__)"],
        env={**clean.variables, "PYTHONPATH": str(tmp_path), "SHARDWISE_INSTALL": "1"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout == "torch.distributed.fsdp\n"
    (line,) = result.stderr.splitlines()
    assert line.startswith("shardwise: SHARDWISE_INSTALL is set, but torch's own functions stay: ")
    assert told in line
