"""A small decoder-only transformer: the parameters and optimizer state of ``--shape mixed``."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

CONTEXT = 32
HEAD_WIDTH = 16


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.forward_norm = nn.LayerNorm(width)
        self.forward_in = nn.Linear(width, 4 * width)
        self.forward_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.attention_in(self.attention_norm(x))
        q, k, v = qkv.view(batch, length, 3, -1, HEAD_WIDTH).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        expanded = functional.gelu(self.forward_in(self.forward_norm(x)))
        y: Tensor = x + self.forward_out(expanded)
        return y


class Transformer(nn.Module):
    """Predicts the next token; 65 tokens per unit of width, as in a GPT-2 of 768."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.vocabulary = 65 * width
        self.tokens = nn.Embedding(self.vocabulary, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = functional.linear(self.norm(x), self.tokens.weight)
        return logits


def layers_of(width: int) -> int:
    """Number of layers for a width: 12 for 768, as in GPT-2, and at least 2."""
    return max(2, width // 64)


def training_nbytes(width: int) -> int:
    """Bytes of a model of this width: float32 parameters, two AdamW moments, and a step."""
    layers = layers_of(width)
    matrices = layers * 12 * width * width + 65 * width * width + CONTEXT * width
    vectors = layers * 13 * width + 2 * width
    parameters = 2 + 12 * layers + 2
    return 4 * (3 * (matrices + vectors) + parameters)


def width_for(nbytes: int) -> int:
    """The largest width whose training state has at most this many bytes.

    It is a multiple of a head's width, and at least one head.
    """
    bound = max(HEAD_WIDTH, int(math.sqrt(nbytes / (4 * 3 * 65))))
    widths = range(HEAD_WIDTH, bound + HEAD_WIDTH, HEAD_WIDTH)
    fitting = [width for width in widths if training_nbytes(width) <= nbytes]
    return max(fitting, default=HEAD_WIDTH)


def train_one_step(nbytes: int, seed: int) -> tuple[Transformer, torch.optim.AdamW]:
    """A model with about ``nbytes`` of training state, and its optimizer, after one real step."""
    generator = torch.Generator().manual_seed(seed)
    width = width_for(nbytes)
    model = Transformer(width, layers_of(width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    tokens = torch.randint(model.vocabulary, (1, CONTEXT), generator=generator)
    logits = model(tokens[:, :-1])
    functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer
