"""The ways in which a model of layers comes to lie on ranks: shards, copies, both, and shards with copies of them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from engine import Engine
from form import by_form
from meshes import shared_mesh
from parity import Wrap
from torch.distributed.device_mesh import DeviceMesh

#: How many ranks a layout takes. Every sum is of two, so that engines must agree in every bit.
RANKS = {"fully_shard": 2, "replicate": 2, "mixed": 2, "hsdp": 4}
#: For what does not depend on how units are combined.
SOME = by_form(("fully_shard", "replicate"), tuple(RANKS))


def grid() -> DeviceMesh:
    """Copies along the first dimension, shards along the second."""
    return shared_mesh((dist.get_world_size() // 2, 2), ("copies", "shards"))


def by_layer(layout: str, **options: Any) -> Wrap:
    """A unit for each layer with parameters but the last, whose parameters are the root's own."""
    if layout == "hsdp":
        options["mesh"] = grid()
    elif layout == "mixed":
        # torch takes no norm of tensors on several meshes, and two meshes of all ranks differ in their names.
        options["mesh"] = shared_mesh((dist.get_world_size(),))

    def wrap(engine: Engine, model: Any) -> None:
        layers = [layer for layer in model if next(layer.parameters(recurse=False), None) is not None]
        for i, layer in enumerate(layers[:-1]):
            replicates = layout == "replicate" or (layout == "mixed" and i == 1)
            (engine.replicate if replicates else engine.fully_shard)(layer, **options)
        (engine.replicate if layout == "replicate" else engine.fully_shard)(model, **options)

    return wrap
