"""The rows of fully_shard_training about shard placement functions."""

from __future__ import annotations

from typing import Any

import torch
from engine import Engine
from language import blocks_of, text_program, wrap_blocks
from parity import Parity, Wrapping
from pool import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from training_models import largest, mlp_program


def last(parameter: nn.Parameter) -> Shard | None:
    """None, which is the first, for those that have no other."""
    return Shard(1) if parameter.ndim == 2 else None


def assert_full(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """By full_tensor(), and by what unshard() registers."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        torch.testing.assert_close(parameter.full_tensor().detach(), values[name], rtol=1e-5, atol=1e-6)
    units: list[Any] = [*blocks_of(model), model]  # type: ignore[arg-type]
    for unit in units:
        unit.unshard()
    for name, parameter in model.named_parameters():
        assert not isinstance(parameter, DTensor), name
        torch.testing.assert_close(parameter.detach(), values[name], rtol=1e-5, atol=1e-6)
    for unit in units:
        unit.reshard()


def along_the_largest_dimension(rank: int) -> None:
    parity = Parity(text_program(vocabulary=12))

    def wrap(engine: Engine, model: Any) -> None:
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
        wrap_blocks(model, lambda part: engine.fully_shard(part, shard_placement_fn=largest))
        assert_full(model, values)

    mine = parity.both(wrap)
    assert mine.model.blocks[0].down.weight.placements == (Shard(1),)
    assert mine.model.blocks[0].up.weight.placements == (Shard(0),)
    assert_full(mine.model, parity.expected[-1].values)


def contiguous(rank: int) -> None:
    parity = Parity(mlp_program((16, 24, 8)))
    looks = []

    def look(module: nn.Linear, *_: Any) -> None:
        """Before the module's own forward, when its full parameters are there, and after it."""
        assert not isinstance(module.weight, DTensor)
        assert module.weight.shape == (module.out_features, module.in_features)
        assert module.weight.is_contiguous()
        looks.append(module)

    def wrap(engine: Engine, model: Any) -> None:
        engine.fully_shard(model, shard_placement_fn=last)
        for layer in (model[0], model[2]):
            layer.register_forward_pre_hook(look)
            layer.register_forward_hook(look)
        assert_contiguous(model, False)

    def before(model: Any, part: int) -> None:
        assert_contiguous(model, False)

    def after(model: Any, part: int) -> None:
        assert_contiguous(model, True)

    mine = parity.both(Wrapping(wrap, before=before, after=after))
    assert len(looks) == 2 * 4 * parity.program.steps
    assert [p.placements for p in mine.model.parameters()] == [(Shard(1),), (Shard(0),)] * 2


def assert_contiguous(model: nn.Module, with_gradients: bool) -> None:
    for name, parameter in model.named_parameters():
        tensors = [parameter]
        if with_gradients:
            assert parameter.grad is not None
            tensors.append(parameter.grad)
        for tensor in tensors:
            assert isinstance(tensor, DTensor)
            assert tensor.is_contiguous() and tensor.to_local().is_contiguous(), name


class TestFullyShardShardPlacementFnMultiProcess:
    test_train_parity_shard_placement_fn_shard_largest_dim = on_ranks(2, along_the_largest_dimension)


class TestFullyShardShardPlacementFnMultiThread:
    test_shard_placement_fn_contiguous_params_grads = on_ranks(2, contiguous)
