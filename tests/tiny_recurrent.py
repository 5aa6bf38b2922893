"""Tiny targets with recurrent, convolution or state-space layers."""

from __future__ import annotations

from transformers import (
    FalconH1Config,
    Lfm2Config,
    Mamba2Config,
    MambaConfig,
    PreTrainedModel,
    Qwen3NextConfig,
)

from tiny_base import COMMON, FULL, SHAPE, VOCAB, build


def qwen3_next() -> PreTrainedModel:
    """Qwen3-Next: recurrent (gated delta) layers between full attention ones."""
    return build(
        Qwen3NextConfig(
            **SHAPE,
            **COMMON,
            head_dim=16,
            layer_types=["linear_attention", FULL, "linear_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_conv_kernel_dim=4,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=24,
            num_experts=4,
            num_experts_per_tok=2,
        ),
        seed=9,
    )


def mamba() -> PreTrainedModel:
    """Mamba: no attention at all, only recurrent state."""
    return build(
        MambaConfig(vocab_size=VOCAB, hidden_size=32, state_size=8, num_hidden_layers=3, **COMMON),
        seed=0,
    )


def mamba2() -> PreTrainedModel:
    """Mamba 2: recurrent like Mamba, and able to continue by several tokens at once."""
    return build(
        Mamba2Config(
            vocab_size=VOCAB,
            hidden_size=32,
            state_size=8,
            num_hidden_layers=3,
            num_heads=4,
            head_dim=16,
            n_groups=2,
            chunk_size=8,
            **COMMON,
        ),
        seed=7,
    )


def falcon_h1() -> PreTrainedModel:
    """Falcon-H1: attention and recurrent state side by side in every layer."""
    return build(
        FalconH1Config(
            **SHAPE,
            **COMMON,
            head_dim=8,
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_d_ssm=64,
            mamba_n_groups=1,
            mamba_d_state=8,
            mamba_chunk_size=8,
        ),
        seed=8,
    )


def lfm2() -> PreTrainedModel:
    """LFM2: short convolutions, which can be rolled back, between full attention layers."""
    return build(Lfm2Config(**SHAPE, **COMMON, layer_types=["conv", FULL, "conv"]), seed=5)
