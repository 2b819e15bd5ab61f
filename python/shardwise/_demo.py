"""A small GPT that trains on some ranks of this machine, beside the same training in one process."""

from __future__ import annotations

import functools
import inspect

import torch
from torch import nn

from shardwise._svg import Picture

WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 96, 4, 3, 64, 8
#: How far a loss may be from one process's, relative to it: sums over ranks have another order.
LIMIT = 1e-4
PICTURE, MARGIN = (800, 420), 60


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(heads.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.narrow(nn.functional.gelu(self.widen(self.norms[1](x))))
        return out


class Gpt(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.bytes(text) + self.places.weight
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


@functools.cache
def corpus() -> torch.Tensor:
    """The bytes of a source file of torch's, which every machine with torch has."""
    return torch.frombuffer(bytearray(inspect.getsource(nn.functional).encode()), dtype=torch.uint8).long()


def batch_of(step: int, rank: int) -> torch.Tensor:
    """Each rank has other ones."""
    text = corpus()
    chooser = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=chooser)
    return text[starts + torch.arange(CONTEXT + 1)]


def loss_of(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def train_rank(rank: int, mode: str, steps: int) -> list[float]:
    """This rank's losses."""
    import shardwise

    torch.manual_seed(0)
    model = Gpt()
    for module in (*model.blocks, model):
        getattr(shardwise, mode)(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for step in range(steps):
        loss = loss_of(model, batch_of(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}  loss {losses[-1]:.3f}", flush=True)
    return losses


def train_alone(ranks: int, steps: int) -> list[float]:
    """The mean losses of one process that trains on all batches."""
    torch.manual_seed(0)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for step in range(steps):
        loss = torch.stack([loss_of(model, batch_of(step, rank)) for rank in range(ranks)]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def draw(by_rank: list[list[float]], alone: list[float]) -> str:
    width, height = PICTURE
    highest, steps = max(map(max, by_rank)), max(len(alone) - 1, 1)

    def points(losses: list[float]) -> str:
        places = (
            (MARGIN + (width - 2 * MARGIN) * step / steps, height - MARGIN - (height - 2 * MARGIN) * loss / highest)
            for step, loss in enumerate(losses)
        )
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)

    picture = Picture(width, height)
    title = f"A small GPT on {len(by_rank)} ranks: each rank's loss, and (black) that of one process on all batches"
    picture.text(MARGIN, 30, title)
    picture.text(MARGIN - 8, MARGIN, f"{highest:.1f}", text_anchor="end")
    picture.text(MARGIN - 8, height - MARGIN, "0", text_anchor="end")
    picture.text(width - MARGIN, height - MARGIN + 24, f"step {len(alone)}", text_anchor="end")
    for rank, losses in enumerate(by_rank):
        picture.add("polyline", f"rank {rank}", points=points(losses), fill="none", stroke="#60a5fa")
    picture.add("polyline", "one process", points=points(alone), fill="none", stroke="#111827", stroke_width=2)
    return str(picture)
