"""Layers with experts: ranks hold different experts, and exchange rows so that each expert sees all of them."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

WIDTH = 6
HIDDEN = 8
EXPERTS = 4


class Experts(nn.Module):
    """Each row goes through all experts, and their results are added with the weights of the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 3)
        self.mesh: DeviceMesh | None = None

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        up, down = (each.to_local() if isinstance(each, DTensor) else each for each in (self.up, self.down))
        if self.mesh is None:
            return _through(up, down, x, weights)
        group = self.mesh.get_group()
        x, weights = (all_gather_tensor_autograd(each, 0, group) for each in (x, weights))
        mine = weights.chunk(group.size(), dim=1)[group.rank()]
        return reduce_scatter_tensor_autograd(_through(up, down, x, mine), "sum", 0, group)


def _through(up: torch.Tensor, down: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    results = torch.tanh(x @ up) @ down
    return (weights.t().unsqueeze(-1) * results).sum(0)


class Layer(nn.Module):
    """Dense layers, a gate, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.second = nn.Linear(HIDDEN, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.second(torch.tanh(self.first(x)))
        return x + self.experts(x, self.gate(x).softmax(-1))


def layers(count: int = 2) -> nn.Sequential:
    """The same values on every rank and in the reference."""
    torch.manual_seed(11)
    return nn.Sequential(*(Layer() for _ in range(count)), nn.Linear(WIDTH, 3))


def spread_experts(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """Gives each rank of the mesh its own experts."""
    for layer in model:
        if isinstance(layer, Layer):
            layer.experts.mesh = mesh
            for name, parameter in list(layer.experts.named_parameters()):
                setattr(layer.experts, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
