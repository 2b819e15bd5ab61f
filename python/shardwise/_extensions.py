"""Tensors that define their own all-gather: torch's protocol of fsdp_pre_all_gather() and fsdp_post_all_gather()."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec


def is_extended(tensor: torch.Tensor, name: str) -> bool:
    """Whether it has the two methods. Raises AssertionError if it has only one, or if they take other arguments."""
    before, after = (getattr(tensor, f"fsdp_{when}_all_gather", None) for when in ("pre", "post"))
    if (before is None) != (after is None):
        raise AssertionError(
            "shardwise: Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using all-gather "
            f"extensions: '{name}' is a {type(tensor).__name__}, which has one of them."
        )
    if before is None:
        return False
    if len(signature := inspect.signature(before).parameters) not in (1, 5):
        raise AssertionError(
            f"shardwise: Invalid fsdp_pre_all_gather of '{name}': it takes {list(signature)}. Expects "
            "fsdp_pre_all_gather(self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], "
            "module: nn.Module, mp_policy: MixedPrecisionPolicy), or the mesh alone."
        )
    return True


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values are in its own storage; a tensor that wraps other tensors has none."""
    if tensor.is_meta or tensor.numel() == 0:
        return True
    try:
        return tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:
        return False


@torch.no_grad()
def cut(tensor: torch.Tensor, dim: int, rank: int, world: int) -> torch.Tensor:
    """This rank's shard, cut by the tensor's own operations, in memory of the largest shard's size."""
    chunks = torch.chunk(tensor, world, dim)
    largest = chunks[0].size()
    own = chunks[rank] if rank < len(chunks) else tensor.narrow(dim, 0, 0)
    padded = tensor.new_zeros(largest)
    if own.numel() > 0:
        padded.narrow(dim, 0, own.size(dim)).copy_(own)
    return padded.narrow(dim, 0, own.size(dim)) if own.size() != largest else padded


@dataclass
class Extension:
    """Gathers a parameter whose tensor defines these methods. The engine calls inputs(), make_full() and free()."""

    name: str
    module: weakref.ref[nn.Module]
    mesh: DeviceMesh
    policy: MixedPrecisionPolicy
    device: torch.device
    #: The size of the parameter before it is sharded; of this rank's part if tensor parallelism has split it.
    size: torch.Size
    dim: int
    world: int
    #: The dtype that the module computes in.
    dtype: torch.dtype
    #: The spec of a parameter that tensor parallelism has split, else None.
    inner: DTensorSpec | None
    _metadata: Any = None
    _beside: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    def inputs(self, parameter: DTensor) -> list[torch.Tensor]:
        """The tensors that this rank sends."""
        shard = parameter._local_tensor
        if shard.device != self.device:
            shard = shard.to(self.device, non_blocking=True)
        method: Any = shard.fsdp_pre_all_gather  # type: ignore[attr-defined]
        if len(inspect.signature(method).parameters) == 1:
            inputs, self._metadata = method(self._shard_mesh)
        else:
            inputs, self._metadata = method(self._shard_mesh, self.size, self._stride, self.module(), self.policy)
        self._check(shard, inputs)
        return list(inputs)

    def make_full(
        self, parameter: DTensor, outputs: Sequence[torch.Tensor], full: nn.Parameter | None
    ) -> tuple[nn.Parameter, torch.Tensor | None] | None:
        """Fills `full`. If that is None, returns a new one, and the tensor inside it if it is a DTensor."""
        method: Any = parameter._local_tensor.fsdp_post_all_gather  # type: ignore[attr-defined]
        metadata, self._metadata = self._metadata, None
        if full is not None:
            for tensor, size in self._beside:
                tensor.untyped_storage().resize_(size)
            method(tuple(outputs), metadata, self.dtype, out=full)
            return None
        made, to_free = method(tuple(outputs), metadata, self.dtype)
        known = {output.untyped_storage()._cdata for output in outputs}
        self._beside = [
            (tensor, tensor.untyped_storage().nbytes())
            for tensor in to_free
            if tensor.untyped_storage()._cdata not in known
        ]
        whole = torch.as_strided(made, self.size, self._stride, storage_offset=0)
        if self.inner is None:
            return nn.Parameter(whole, requires_grad=parameter.requires_grad), None
        around = nn.Parameter(DTensor(whole, self.inner, requires_grad=False), requires_grad=parameter.requires_grad)
        return around, around._local_tensor  # type: ignore[attr-defined]

    def free(self) -> None:
        """Frees the memory of the full parameter until the next gather."""
        for tensor, _ in self._beside:
            tensor.untyped_storage().resize_(0)

    @cached_property
    def _shard_mesh(self) -> DeviceMesh:
        return self.mesh if self.mesh.ndim == 1 else self.mesh[(self.mesh.mesh_dim_names or ())[-1]]

    @cached_property
    def _stride(self) -> tuple[int, ...]:
        return torch.empty(self.size, device="meta").stride()

    def _check(self, shard: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
        rows = -(-self.size[self.dim] // self.world)
        padded = torch.Size((*self.size[: self.dim], rows, *self.size[self.dim + 1 :]))
        if shard.size() == padded or all(each.size() == padded for each in inputs):
            return
        raise AssertionError(
            f"shardwise: When a parameter is unevenly sharded by FSDP ('{self.name}': orig size={self.size}, FSDP "
            f"world size={self.world}), fsdp_pre_all_gather must return all-gather inputs with the padded sharded "
            f"size {padded} but got {[each.size() for each in inputs]}: every rank must send the same amount."
        )
