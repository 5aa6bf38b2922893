"""What every tiny target shares: sizes, settings, and the builder that makes its weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB = 160
PAD = 0
WINDOW = 8
"""Sliding window of every tiny model that has one; 24 new tokens run well past it."""

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
COMMON: dict[str, Any] = {
    "initializer_range": 0.6,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": None,
}
FULL, SLIDING = "full_attention", "sliding_attention"


def build(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Build a model with seeded random weights, in evaluation mode.

    Args:
        config: The architecture and its sizes.
        seed: Seed of the weights; torch's global random state is left as found.

    Returns:
        PreTrainedModel: An fp32 model on the CPU that generates until its length limit.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        # Biases start at zero and norms at one; unless they vary, an ignored one goes unnoticed.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.generation_config.eos_token_id = None
    model.generation_config.bos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model
