"""Gemma4-like layers: four norms, normed values, a scalar per layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from dspark_hf.drafting.block.attention import (
    BlockAttention,
    Memory,
    RMSNorm,
    Rotary,
    first_of_blocks,
)
from dspark_hf.drafting.block.flavours.qwen3 import GatedMLP

if TYPE_CHECKING:
    from dspark_hf.drafting.block.spec import BlockSpec


class Gemma4Layer(nn.Module):
    """Attention and MLP, each between two norms; the sum is scaled."""

    layer_scalar: torch.Tensor

    def __init__(self, spec: BlockSpec, layer: int) -> None:
        """Create a layer.

        Args:
            spec: Of the drafter.
            layer: Index of the layer.
        """
        super().__init__()
        width, eps = spec.hidden_size, spec.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = BlockAttention(spec, layer, norms_values=True)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.pre_feedforward_layernorm = RMSNorm(width, eps)
        self.post_feedforward_layernorm = RMSNorm(width, eps)
        self.mlp = GatedMLP(spec)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(
        self, states: torch.Tensor, rotary: Rotary, memory: Memory, count: int | None = None
    ) -> torch.Tensor:
        """Map block rows of shape (B, T, d) to those of each block's first `count` positions."""
        attended = self.self_attn(self.input_layernorm(states), rotary, memory, count)
        states = first_of_blocks(states, self.self_attn.block_size, count)
        states = states + self.post_attention_layernorm(attended)
        mapped = self.mlp(self.pre_feedforward_layernorm(states))
        states = states + self.post_feedforward_layernorm(mapped)
        return states * self.layer_scalar
