"""What a rank has of a tensor, for checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise import _C


def local_of(name: str, tensor: Any) -> torch.Tensor:
    """The memory of a tensor, or of a DTensor's piece, on this rank."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(_refusal(name, f"it is {type(tensor).__name__}, not a tensor"))
    if isinstance(tensor, DTensor):
        if any(placement.is_partial() for placement in tensor.placements):
            raise ValueError(_refusal(name, "it is a sum that is still to be made: redistribute() it first"))
        with torch.no_grad():
            local: torch.Tensor = tensor.to_local()
            return local_of(name, local)
    if hasattr(tensor, "__tensor_flatten__"):
        raise ValueError(_refusal(name, f"{type(tensor).__name__} is more than one tensor: save those that it holds"))
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(_refusal(name, "only dense tensors can: convert it first"))
    if tensor.is_meta:
        raise ValueError(_refusal(name, "it has no values: call module.to_empty(device=...) first"))
    return tensor.detach()


Boxes = list[tuple[list[int], list[int]]]


class Pieces:
    """Makes pieces. Tensors that lie on the ranks alike are looked at once."""

    def __init__(self) -> None:
        self._boxes: dict[Any, Boxes] = {}

    def of(self, name: str, tensor: Any, must_agree: bool = False) -> _C.Piece:
        """This rank's piece of a tensor or DTensor. `must_agree`: a tensor is the same on all ranks that have it."""
        values = local_of(name, tensor)
        is_copied = must_agree and not isinstance(tensor, DTensor)
        return _C.Piece(name, list(tensor.shape), self.boxes(tensor), values, is_copied)

    def like(self, name: str, tensor: torch.Tensor, values: torch.Tensor) -> _C.Piece:
        """`values` as this rank's piece of what lies on the ranks as `tensor` does."""
        return _C.Piece(name, list(tensor.shape), self.boxes(tensor), values)

    def boxes(self, tensor: torch.Tensor) -> Boxes:
        """Which parts of it this rank has: offsets and sizes."""
        if not isinstance(tensor, DTensor):
            return [([0] * tensor.dim(), list(tensor.shape))]
        key = (tensor.device_mesh, tensor.placements, tensor.shape)
        if key not in self._boxes:
            chunks = tensor.__create_chunk_list__()
            self._boxes[key] = [
                (list(chunk.offsets), list(chunk.sizes)) for chunk in chunks if chunk.offsets or not tensor.dim()
            ]
        return self._boxes[key]


def lies_as(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both have the same parts on each rank."""
    if one.shape != other.shape:
        return False
    if isinstance(one, DTensor) and isinstance(other, DTensor):
        return one.placements == other.placements and one.device_mesh == other.device_mesh
    return not isinstance(one, DTensor) and not isinstance(other, DTensor)


class Saved:
    """A checkpoint: what it has, read once."""

    def __init__(self, folder: _C.SavedFolder) -> None:
        self.folder = folder
        self.path = self.folder.path
        #: The dtype and the sizes of each.
        self.tensors = self.folder.tensors
        #: Tensors that cannot be read, with their dtypes, which torch does not have.
        self.unknown = self.folder.unknown
        self.values = self.folder.values

    def item_size(self, name: str) -> int:
        """Bytes of an element; 0 for a value."""
        return self.tensors[name][0].itemsize if name in self.tensors else 0

    def read(self, name: str) -> Any:
        """A whole tensor, on the host; or a value."""
        return self.folder.read_whole(name) if name in self.tensors else self.values[name]


def like(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """This rank's values as part of what lies on the ranks as `tensor` does."""
    values = values.to(tensor.device)
    if not isinstance(tensor, DTensor):
        return values
    return DTensor.from_local(
        values, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _refusal(name: str, reason: str) -> str:
    return f"shardwise: '{name}' cannot be part of a checkpoint: {reason}."
