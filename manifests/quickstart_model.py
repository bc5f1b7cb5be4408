"""A small text encoder written out from plain torch parts.

Attention is spelled with `torch.bmm`: on a CPU max-autotune tunes `bmm`, but neither `nn.Linear` nor the fast path of
`nn.TransformerEncoderLayer`.

Shape suffixes: b batch, s sequence, d model width, h heads, k width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_bsd: Tensor) -> Tensor:
        batch, seq, width = x_bsd.shape
        head_width = width // self.heads
        parts = self.qkv(x_bsd).reshape(batch, seq, 3, self.heads, head_width).permute(2, 0, 3, 1, 4)
        q, k, v = (part.reshape(batch * self.heads, seq, head_width) for part in parts)  # each (b * h, s, k)
        weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)) / head_width**0.5, dim=-1)
        mixed = torch.bmm(weights, v).reshape(batch, self.heads, seq, head_width).transpose(1, 2)
        out_bsd: Tensor = self.out(mixed.reshape(batch, seq, width))
        return out_bsd


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_attention, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_bsd: Tensor) -> Tensor:
        x_bsd = x_bsd + self.attention(self.norm_attention(x_bsd))
        out_bsd: Tensor = x_bsd + self.mlp(self.norm_mlp(x_bsd))
        return out_bsd


class Encoder(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, longest: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns one vector (b, d) per text for tokens (b, s)."""
        x_bsd = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x_bsd = block(x_bsd)
        out_bd: Tensor = self.norm(x_bsd).mean(dim=1)
        return out_bd


def encoder(layers: int = 1, width: int = 128, heads: int = 4) -> Encoder:
    """Returns the encoder with random weights, the same in every process."""
    torch.manual_seed(0)
    return Encoder(layers, width, heads, vocabulary=1000, longest=512)
