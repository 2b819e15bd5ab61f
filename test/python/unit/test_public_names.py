"""What editors and readers see of the public names: signatures beside torch's, and docstrings with an example."""

from __future__ import annotations

import doctest
import inspect
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checkout import ROOT, output_of
from torch import nn
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard

import shardwise


def documented() -> Iterator[tuple[str, Any]]:
    """Public names that are ours, and the public methods of those that are classes."""
    for name in shardwise.__all__:
        value = getattr(shardwise, name)
        if isinstance(value, str) or getattr(value, "__module__", "").startswith("torch."):
            continue
        yield name, value
        if isinstance(value, type) and not issubclass(value, Exception):
            for member, function in vars(value).items():
                if inspect.isfunction(function) and not member.startswith("_"):
                    yield f"{name}.{member}", function


DOCUMENTED = dict(documented())


def test_docstrings_have_an_example() -> None:
    assert {"Error", "fully_shard", "replicate", "local_optimizer", "FSDPModule.unshard"} <= set(DOCUMENTED)
    for name, value in DOCUMENTED.items():
        examples = doctest.DocTestParser().get_examples(value.__doc__ or "")
        assert examples, f"{name} has no >>> in its docstring"
        for example in examples:
            compile(example.source, f"<example of {name}>", "single")


@pytest.mark.parametrize("torchs", [fully_shard, replicate_with_fsdp.replicate])
def test_signature_is_torchs(torchs: Any) -> None:
    """torch's of today: those before 2.12 have no dp_mesh_dims, which comes last."""
    mine = list(inspect.signature(getattr(shardwise, torchs.__name__)).parameters.values())
    theirs = list(inspect.signature(torchs).parameters.values())
    assert (mine[-1].name, mine[-1].default) == ("dp_mesh_dims", None)
    if torch.__version__ < "2.12":
        mine.pop()
    assert [(p.name, p.kind) for p in mine] == [(p.name, p.kind) for p in theirs]
    assert [repr(p.default) for p in mine] == [repr(p.default) for p in theirs]
    assert all(p.annotation is not inspect.Parameter.empty for p in mine)


@pytest.mark.parametrize("name", ["fully_shard", "replicate"])
def test_annotations_are_types(name: str) -> None:
    hints = typing.get_type_hints(getattr(shardwise, name))
    assert hints["mp_policy"] is MixedPrecisionPolicy and hints["offload_policy"] is OffloadPolicy
    assert hints["ignored_params"] == set[nn.Parameter] | None


def test_a_plan_is_a_table_and_json() -> None:
    class Unit:
        plan_table = staticmethod(lambda: "unit  parameters\n0     12")
        plan_json = staticmethod(lambda: '{"mesh": "2", "units": []}')

    plan = shardwise.Plan(Unit())  # type: ignore[arg-type]
    assert repr(plan) == str(plan) == "unit  parameters\n0     12"
    assert plan.json() == Unit.plan_json()
    assert (plan.mesh, plan.units) == ("2", [])


@pytest.mark.parametrize("name", ["fully_shard", "replicate"])
def test_unknown_options_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument 'msh'"):
        getattr(shardwise, name)(nn.Linear(2, 2), msh=None)


def test_stubs_are_what_the_bindings_say() -> None:
    output_of(ROOT / "scripts" / "make_stubs.py", "--check")
