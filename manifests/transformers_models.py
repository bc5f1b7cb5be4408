"""Factories for `transformers` models with random weights, the same in every process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, ResNetConfig, ResNetModel, ViTConfig, ViTModel


def _sizes(layers: int, width: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": width // 64,
        "intermediate_size": 4 * width,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "attn_implementation": "sdpa",
    }


def bert(layers: int = 12, width: int = 768) -> nn.Module:
    """Returns a BERT without pooler and without dropout."""
    torch.manual_seed(0)
    return BertModel(BertConfig(**_sizes(layers, width)), add_pooling_layer=False)


def vit(layers: int = 6, width: int = 384) -> nn.Module:
    """Returns a vision transformer for images of 224 × 224 in patches of 16 × 16."""
    torch.manual_seed(0)
    return ViTModel(ViTConfig(**_sizes(layers, width)), add_pooling_layer=False)


def resnet() -> nn.Module:
    """Returns a network with the layout of ResNet-18."""
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic")
    return ResNetModel(config)


def mean_square(outputs: Any) -> Tensor:
    """Returns the mean square of the last hidden state, as a loss."""
    hidden: Tensor = outputs.last_hidden_state
    return hidden.float().pow(2).mean()
