"""A small GPT over bytes, in plain torch.nn: nothing here knows of ranks.

examples/cpp/model.h is the same model: the same names, the same order, the same values for the same seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GptOptions:
    vocabulary: int = 256
    context: int = 128
    width: int = 192
    heads: int = 6
    layers: int = 4


class Block(nn.Module):
    """Attention over what came before, then a two-layer network, each on a normalised input and added to it."""

    def __init__(self, options: GptOptions) -> None:
        super().__init__()
        self.heads = options.heads
        self.attention_norm = nn.LayerNorm(options.width)
        self.qkv = nn.Linear(options.width, 3 * options.width)
        self.projection = nn.Linear(options.width, options.width)
        self.network_norm = nn.LayerNorm(options.width)
        self.expand = nn.Linear(options.width, 4 * options.width)
        self.contract = nn.Linear(4 * options.width, options.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.projection(self._attention(self.qkv(self.attention_norm(x))))
        return x + self.contract(F.gelu(self.expand(self.network_norm(x))))

    def _attention(self, mixed: Tensor) -> Tensor:
        batch, length, _ = mixed.shape
        # [3, batch, heads, length, width of a head]
        query, key, value = mixed.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        values = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return values.transpose(1, 2).reshape(batch, length, -1)


class Gpt(nn.Module):
    def __init__(self, options: GptOptions = GptOptions()) -> None:
        super().__init__()
        self.bytes = nn.Embedding(options.vocabulary, options.width)
        self.positions = nn.Embedding(options.context, options.width)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, options.vocabulary)

    def forward(self, text: Tensor) -> Tensor:
        """The scores of every next byte: [batch, length] of bytes in, [batch, length, vocabulary] out."""
        x = self.bytes(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def initialize(model: nn.Module, seed: int) -> None:
    """Matrices from a normal distribution, biases zero; norms keep the values they are made with."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
            elif name.endswith("bias"):
                parameter.zero_()
