"""The measured models of `h200.yaml`: published shapes from `transformers` configurations, random weights, nothing downloaded.

Weights are drawn on the GPU where there is one: 1.2 billion of them take the CPU a minute. They are the same in every
process of one machine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def _place() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _sizes(layers: int, width: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": width // 64,
        "intermediate_size": 4 * width,
        "attn_implementation": "sdpa",
    }


def bert(layers: int = 12, width: int = 768) -> nn.Module:
    """Returns BERT-base (110 M), without pooler and without dropout."""
    from transformers import BertConfig, BertModel

    config = BertConfig(**_sizes(layers, width), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    with _place():
        model: nn.Module = BertModel(config, add_pooling_layer=False)
    return model


def vit(layers: int = 12, width: int = 768) -> nn.Module:
    """Returns ViT-B/16 (86 M) for images of 224 × 224."""
    from transformers import ViTConfig, ViTModel

    with _place():
        model: nn.Module = ViTModel(ViTConfig(**_sizes(layers, width)), add_pooling_layer=False)
    return model


def resnet(depths: tuple[int, ...] = (3, 4, 6, 3)) -> nn.Module:
    """Returns ResNet-50 (26 M) with its classifier."""
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes: dict[str, Any] = {"depths": list(depths), "num_labels": 1000}
    with _place():
        model: nn.Module = ResNetForImageClassification(ResNetConfig(**sizes))
    return model


def llama(layers: int = 16, width: int = 2048, vocabulary: int = 128256) -> nn.Module:
    """Returns a decoder in the shape of Llama 3.2 1B (1.24 G): grouped queries, tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **_sizes(layers, width),
        num_key_value_heads=width // 256,
        head_dim=64,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
    )
    with _place():
        model: nn.Module = LlamaForCausalLM(config)
    return model


def mean_square(outputs: Any) -> Tensor:
    """Returns the mean square of the last hidden state, as a loss."""
    hidden: Tensor = outputs.last_hidden_state
    return hidden.float().pow(2).mean()
