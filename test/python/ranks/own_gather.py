"""Tensors that gather themselves, for the tests of the all-gather extension protocol."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
#: Operations on a Twin that give a Twin; the others give what the first tensor gives.
KEPT = {
    aten.detach.default,
    aten.split.Tensor,
    aten.slice.Tensor,
    aten.clone.default,
    aten.new_zeros.default,
    aten.empty_like.default,
    aten._to_copy.default,
    aten.as_strided.default,
    aten.copy_.default,
    aten.mul_.Tensor,
    aten.add_.Tensor,
    aten.add_.Scalar,
    aten.view.default,
    aten.narrow.default,
}


class Twin(torch.Tensor):
    """A tensor that holds two, which are gathered both."""

    first: torch.Tensor
    second: torch.Tensor

    @staticmethod
    def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> Twin:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls, first.size(), first.stride(), first.storage_offset(), dtype=first.dtype, device=first.device
        )

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.first = first
        self.second = second

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, meta: Any, size: Any, stride: Any) -> Twin:
        return cls(inner["first"], inner["second"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        one, other = (
            func(*tree_map_only(Twin, part, args), **tree_map_only(Twin, part, kwargs))
            for part in (lambda t: t.first, lambda t: t.second)
        )
        if func not in KEPT:
            return one
        if func in (aten.copy_.default, aten.mul_.Tensor, aten.add_.Tensor, aten.add_.Scalar):
            return args[0]
        if isinstance(one, (tuple, list)):
            return type(one)(cls(a, b) for a, b in zip(one, other, strict=True))
        return cls(one, other)

    def send(self) -> tuple[tuple[torch.Tensor, torch.Tensor], None]:
        return (self.first, self.second), None

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        first, second = outputs
        if out is not None:
            inner = getattr(out, "_local_tensor", out)
            if first.dtype == param_dtype:
                assert first.untyped_storage().data_ptr() == inner.first.untyped_storage().data_ptr()
                assert second.untyped_storage().data_ptr() == inner.second.untyped_storage().data_ptr()
            else:
                inner.first.copy_(first[: inner.size(0)])
                inner.second.copy_(second[: inner.size(0)])
            return None
        if first.dtype == param_dtype:
            return Twin(first, second), (first, second)
        made = Twin(first.to(param_dtype), second.to(param_dtype))
        return made, (first, second, made.first, made.second)


class OldTwin(Twin):
    """With the older form, which gets the mesh alone."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        assert mesh.ndim == 1
        return self.send()


class NewTwin(Twin):
    """With the newer form: sends as much as the largest shard, however small its own is."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        assert mesh.ndim == 1
        assert outer_stride == torch.empty(outer_size).stride()
        assert isinstance(module, nn.Linear)
        assert module.weight.shape == outer_size
        missing = -(-outer_size[0] // mesh.size()) - self.first.size(0)
        return tuple(nn.functional.pad(part, (0, 0, 0, missing)) for part in (self.first, self.second)), None


class ScarceTwin(NewTwin):
    """Breaks the rule: sends no more than it has."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        return self.send()


class HalfTwin(Twin):
    """Without the method that is called before: `Twin` has the one after alone."""


class OddTwin(Twin):
    """Takes neither one argument nor five."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any) -> Any:
        return self.send()


def with_twins(model: nn.Module, kind: type[Twin]) -> nn.Module:
    """The weights of all linear layers become `kind`, the biases stay."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.detach()
            module.weight = nn.Parameter(kind(weight, weight.clone()))
    return model
