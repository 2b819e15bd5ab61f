"""A small language model, and the ways in which it is cut into units."""

from __future__ import annotations

from typing import Any

import torch
from form import by_form
from parity import Program, Wrap, WrapOne
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as checkpointed

WIDTH = 8
LENGTH = 5

#: Where activations are not kept: torch's three ways to say so, and none.
CHECKPOINTS = ("composable", "utils", "wrapper")


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mix = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.mix(x).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(2, 3) / (width / self.heads) ** 0.5).masked_fill(future, -1e9)
        return self.out((scores.softmax(3) @ v).transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = x + self.attention(self.norm_1(x))
        return middle + self.down(functional.gelu(self.up(self.norm_2(middle))))


class Transformer(nn.Module):
    def __init__(self, vocabulary: int = 13, depth: int = 3, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.checkpointed = False
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.tokens(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = checkpointed(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


def text_loss(model: Any, number: int, rank: int) -> torch.Tensor:
    """That of the next token."""
    generator = torch.Generator().manual_seed(1000 * number + rank + 17)
    # The model may be one whose embedding lies in shards.
    text = torch.randint(0, model.tokens.num_embeddings, (2, LENGTH + 1), generator=generator)
    return functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def text_program(steps: int = by_form(3, 10), parts: int = 1, **settings: Any) -> Program:
    return Program(lambda: Transformer(**settings), text_loss, steps, parts)


def checkpoint_blocks(model: Transformer, how: str | None) -> None:
    """Before the blocks are wrapped."""
    if how == "utils":
        model.checkpointed = True
    for i, block in enumerate(model.blocks):
        if how == "composable":
            checkpoint(block)
        elif how == "wrapper":
            model.blocks[i] = checkpoint_wrapper(block)


def blocks_of(model: Transformer) -> list[Block]:
    """Without a checkpoint's wrapper around them."""
    return [module for module in model.modules() if isinstance(module, Block)]


def wrap_blocks(model: Transformer, wrap: WrapOne) -> None:
    """A unit for each block, and one for the rest."""
    for block in blocks_of(model):
        wrap(block)
    wrap(model)


def by_block(function: str, **options: Any) -> Wrap:
    return lambda engine, model: wrap_blocks(model, lambda part: getattr(engine, function)(part, **options))


#: Which modules are in one unit: each block; all in pairs; each block, and the embedding with the head it is tied to.
GROUPINGS = ("block", "pairs", "tied")


def wrap_groups(model: Any, grouping: str, wrap: WrapOne) -> None:
    blocks = blocks_of(model)
    if grouping == "pairs":
        wrap(blocks[0])
        wrap(blocks[1:])
        wrap([model.tokens, model.positions])
        # The backward of an embedding does not read it.
        model.tokens.set_unshard_in_backward(False)
        wrap([model.norm, model.head])
        wrap(model)
        return
    if grouping == "tied":
        wrap([model.tokens, model.head])
    wrap_blocks(model, wrap)


def prefetch_two_blocks(model: Any) -> None:
    """Each block has the next two on their way in forward, and in backward the two before it."""
    blocks: list[Any] = blocks_of(model)
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
        block.set_modules_to_backward_prefetch(blocks[max(i - 2, 0) : i][::-1])
