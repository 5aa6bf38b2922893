"""Qwen3-like layers: two norms, normed heads, gated MLP. Llama and Qwen2 differ by flags only."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import nn
from transformers.activations import ACT2FN

from dspark_hf.drafting.block.attention import (
    BlockAttention,
    Memory,
    RMSNorm,
    Rotary,
    first_of_blocks,
)

if TYPE_CHECKING:
    import torch

    from dspark_hf.drafting.block.spec import BlockSpec


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, spec: BlockSpec) -> None:
        """Create the projections."""
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)
        self.act = ACT2FN[spec.hidden_act]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Map states of shape (B, T, d)."""
        gated = self.act(self.gate_proj(states)) * self.up_proj(states)
        return cast("torch.Tensor", self.down_proj(gated))


class Qwen3Layer(nn.Module):
    """Norm, attention, residual, norm, MLP, residual."""

    def __init__(self, spec: BlockSpec, layer: int) -> None:
        """Create a layer.

        Args:
            spec: Of the drafter.
            layer: Index of the layer.
        """
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = BlockAttention(spec, layer)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = GatedMLP(spec)

    def forward(
        self, states: torch.Tensor, rotary: Rotary, memory: Memory, count: int | None = None
    ) -> torch.Tensor:
        """Map block rows of shape (B, T, d) to those of each block's first `count` positions."""
        attended = self.self_attn(self.input_layernorm(states), rotary, memory, count)
        states = first_of_blocks(states, self.self_attn.block_size, count) + attended
        return states + cast("torch.Tensor", self.mlp(self.post_attention_layernorm(states)))
