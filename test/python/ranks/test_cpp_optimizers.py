"""The optimizers and the GradScaler for C++ programs beside Python's: the same values to the bit, and state that goes
from one to the other.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from bound import models, tokens, twin
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

CASES: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"lr": 0.02, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.02, "amsgrad": True, "betas": (0.8, 0.95), "eps": 1e-6}),
    ("Adam", {"lr": 0.02, "weight_decay": 0.1, "amsgrad": True}),
    ("SGD", {"lr": 0.05}),
    ("SGD", {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.3}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
]
SIZES = ((3, 5), (1,), (0, 4), (1000,), (2, 3, 4))


def tensors(options: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value, dtype=None if value is True else torch.double) for name, value in options.items()}


def parameters(dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(sizes, generator=random).to(dtype).requires_grad_() for sizes in SIZES]


def gradients(dtype: torch.dtype, step: int) -> Iterator[torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    for sizes in SIZES:
        yield torch.randn(sizes, generator=random).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_values_are_those_of_python(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype, 1), parameters(dtype, 1)
    later, their_later = parameters(torch.float, 2), parameters(torch.float, 2)
    mine = models().Optimizer(name, ours, tensors(options))
    mine.add_group(later, tensors({**options, "lr": 0.3}))
    groups = [{"params": theirs}, {"params": their_later, "lr": 0.3}]
    their_optimizer: Any = getattr(torch.optim, name)(groups, fused=True, **options)
    for step in range(5):
        # In some steps of Adam a parameter has no gradient; Python's SGD takes no parameter that begins later.
        left_out = step % 3 if name != "SGD" else None
        for kind, pair in ((dtype, (ours, theirs)), (torch.float, (later, their_later))):
            for number, (gradient, one, other) in enumerate(zip(gradients(kind, step), *pair, strict=True)):
                one.grad, other.grad = (None, None) if number == left_out else (gradient.clone(), gradient.clone())
        mine.step()
        their_optimizer.step()
        for one, other in zip(itertools.chain(ours, later), itertools.chain(theirs, their_later), strict=True):
            assert torch.equal(one, other), (step, one, other)
            kept, expected = mine.kept(one), their_optimizer.state[other]
            assert kept.keys() == {key for key, value in expected.items() if value is not None}, step
            for key, value in kept.items():
                assert value.dtype == expected[key].dtype, key
                assert torch.equal(value, expected[key]), (step, key)


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_scaled_steps_are_those_of_python(name: str, options: dict[str, Any], unscales: bool) -> None:
    ours, theirs = parameters(torch.float, 1), parameters(torch.float, 1)
    mine = models().Optimizer(name, ours, tensors(options))
    their_optimizer: Any = getattr(torch.optim, name)(theirs, fused=True, **options)
    scaler, their_scaler = models().GradScaler(1024.0, 2), torch.amp.GradScaler("cpu", 1024.0, growth_interval=2)
    for step in range(8):
        # Python's SGD begins its momentum with what is not initialized where its first step is skipped.
        spoiled = step in ((2, 3, 6) if name == "SGD" else (0, 3, 6))
        loss = torch.tensor(0.7 + step)
        assert torch.equal(scaler.scale(loss), their_scaler.scale(loss))
        for number, (gradient, one, other) in enumerate(zip(gradients(torch.float, step), ours, theirs, strict=True)):
            if spoiled and number == 3:
                gradient[7] = float("nan" if step == 3 else "inf")
            one.grad, other.grad = gradient.clone(), gradient.clone()
        if unscales:
            scaler.unscale_(mine)
            their_scaler.unscale_(their_optimizer)
        scaler.step(mine)
        their_scaler.step(their_optimizer)
        scaler.update()
        their_scaler.update()
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other), step
            assert one.grad is not None
            assert other.grad is not None
            # Where the step is skipped in the operation, Python's has touched nothing either.
            assert torch.equal(one.grad.nan_to_num(), other.grad.nan_to_num()), step
            for key, value in mine.kept(one).items():
                assert torch.equal(value, their_optimizer.state[other][key]), (step, key)
        assert {key: value.item() for key, value in scaler.state().items()} == their_scaler.state_dict(), step


@pytest.mark.parametrize(("name", "options"), CASES)
def test_full_state_goes_both_ways(name: str, options: dict[str, Any]) -> None:
    """Names, kinds and values are those of get_optimizer_state_dict(), but that options are tensors."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model, plain = twin("Stack", 6, 2)
    mine = models().Optimizer(name, list(model.parameters()), tensors(options))
    theirs: Any = getattr(torch.optim, name)(plain.parameters(), fused=True, **options)

    def train(steps: range, *sides: tuple[Any, Any]) -> None:
        for step in steps:
            for module, optimizer in sides:
                module.zero_grad()
                module(tokens(step, 0)).pow(2).mean().backward()
                optimizer.step()

    train(range(3), (model, mine), (plain, theirs))
    expected = get_optimizer_state_dict(plain, theirs, options=flat)
    found = mine.full_state(model.cpp_module)
    only_python = {"maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"}
    assert set(found) == {key for key in expected if key.rsplit(".", 1)[1] not in only_python}
    for key, value in found.items():
        theirs_value = expected[key]
        if key.startswith("state."):
            assert isinstance(theirs_value, torch.Tensor)
            assert theirs_value.dtype == value.dtype, key
            assert theirs_value.shape == value.shape, key
            torch.testing.assert_close(value, theirs_value)
        else:
            listed = value.tolist()
            assert (tuple(listed) if isinstance(listed, list) else listed) == theirs_value, key

    # What Python alone has stays; betas are a pair there.
    taken = {key: value if key.startswith("state.") else value.tolist() for key, value in found.items()}
    taken |= {key: tuple(value) for key, value in taken.items() if isinstance(value, list)}
    other = copy.deepcopy(plain)
    python: Any = getattr(torch.optim, name)(other.parameters(), fused=True, **{**options, "lr": 9.0})
    set_optimizer_state_dict(other, python, {**expected, **taken}, options=flat)
    loaded = get_optimizer_state_dict(other, python, options=flat)
    assert loaded.keys() == expected.keys()
    again, _ = twin("Stack", 6, 2)
    cpp = models().Optimizer(name, list(again.parameters()), tensors({**options, "lr": 9.0}))
    known = {key: value for key, value in expected.items() if key in found}
    cpp.load_full_state(
        again.cpp_module, {key: torch.as_tensor(value, dtype=dtype_of(value)) for key, value in known.items()}
    )
    for key, value in cpp.full_state(again.cpp_module).items():
        for one, wanted in ((value, torch.as_tensor(expected[key])), (torch.as_tensor(loaded[key]), found[key])):
            torch.testing.assert_close(one, wanted, check_dtype=False, msg=key)


def dtype_of(value: object) -> torch.dtype | None:
    return None if isinstance(value, (torch.Tensor, bool)) else torch.double
