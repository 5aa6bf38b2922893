"""Tiny random target models, one per architecture, and prompts for them.

Every model is fp32, seeded, and has a wide spread of logits, so that greedy text varies and no two
best scores are close: a difference in tokens is then a fault, never rounding. No end token is set
(rows run their full length) and the padding id is 0, which no prompt contains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import (
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tiny_base import COMMON, FULL, PAD, SHAPE, SLIDING, VOCAB, WINDOW, build
from tiny_recurrent import falcon_h1, lfm2, mamba, mamba2, qwen3_next


def llama(seed: int = 5, **overrides: Any) -> PreTrainedModel:
    """Llama: grouped heads, rotary positions; `overrides` are LlamaConfig fields."""
    return build(LlamaConfig(**{**SHAPE, **COMMON, **overrides}), seed)


def llama_heads(num_heads: int, num_kv_heads: int, seed: int = 5) -> PreTrainedModel:
    """Llama with the given head counts and a head size that is not a power of two."""
    return llama(
        seed,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=24,
        hidden_size=48,
    )


def qwen2() -> PreTrainedModel:
    """Qwen2: biases on queries, keys and values."""
    return build(Qwen2Config(**SHAPE, **COMMON), seed=3)


def qwen3() -> PreTrainedModel:
    """Qwen3: normalised queries and keys."""
    return build(Qwen3Config(**SHAPE, **COMMON, head_dim=16), seed=8)


def mistral() -> PreTrainedModel:
    """Mistral with a sliding window in every layer."""
    return build(MistralConfig(**SHAPE, **COMMON, head_dim=8, sliding_window=WINDOW), seed=9)


def gemma2() -> PreTrainedModel:
    """Gemma 2: soft-capped scores and logits, windows in every second layer."""
    model = build(
        Gemma2Config(
            **SHAPE,
            **COMMON,
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=WINDOW,
            layer_types=[SLIDING, FULL, SLIDING],
            attn_logit_softcapping=5.0,
            final_logit_softcapping=30.0,
        ),
        seed=0,
    )
    # Older Transformers would choose sdpa, which leaves the soft cap of the scores out.
    model.set_attn_implementation("eager")
    return model


def gemma3() -> PreTrainedModel:
    """Gemma 3 text: windows in most layers, another rotary base in the full one."""
    return build(
        Gemma3TextConfig(
            **SHAPE,
            **COMMON,
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=WINDOW,
            layer_types=[SLIDING, SLIDING, FULL],
        ),
        seed=8,
    )


def phi3() -> PreTrainedModel:
    """Phi-3: fused projections."""
    return build(Phi3Config(**SHAPE, **COMMON), seed=7)


def gpt2() -> PreTrainedModel:
    """GPT-2: learned absolute positions."""
    return build(
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=256, **COMMON),
        seed=13,
    )


def opt() -> PreTrainedModel:
    """OPT: learned positions counted from the attention mask, with an offset."""
    return build(
        OPTConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=256,
            word_embed_proj_dim=32,
            init_std=0.6,
            **COMMON,
        ),
        seed=10,
    )


def bloom() -> PreTrainedModel:
    """Bloom: linear position biases, outside the attention interface."""
    return build(
        BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=3, n_head=4, **COMMON), seed=21
    )


def falcon() -> PreTrainedModel:
    """Falcon with rotary positions and one shared key head."""
    return _falcon(alibi=False, seed=4)


def falcon_alibi() -> PreTrainedModel:
    """Falcon with linear position biases."""
    return _falcon(alibi=True, seed=25)


def mixtral() -> PreTrainedModel:
    """Mixtral: a mixture of experts in every layer."""
    return build(
        MixtralConfig(**SHAPE, **COMMON, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
        seed=5,
    )


def qwen3_moe() -> PreTrainedModel:
    """Qwen3-MoE: normalised queries and keys, experts in every layer."""
    return build(
        Qwen3MoeConfig(
            **SHAPE,
            **COMMON,
            head_dim=16,
            moe_intermediate_size=24,
            num_experts=4,
            num_experts_per_tok=2,
        ),
        seed=9,
    )


def gpt_oss() -> PreTrainedModel:
    """gpt-oss: attention sinks, windows in every second layer, experts."""
    return build(
        GptOssConfig(
            **SHAPE,
            **COMMON,
            head_dim=16,
            sliding_window=WINDOW,
            layer_types=[SLIDING, FULL, SLIDING],
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
        seed=10,
    )


def deepseek_v3() -> PreTrainedModel:
    """DeepSeek-V3: latent attention whose values are narrower than its keys."""
    shape = {**SHAPE, "num_key_value_heads": 4}
    return build(
        DeepseekV3Config(
            **shape,
            **COMMON,
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=12,
            moe_intermediate_size=24,
            n_routed_experts=4,
            n_shared_experts=1,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
        ),
        seed=3,
    )


def _falcon(*, alibi: bool, seed: int) -> PreTrainedModel:
    return build(
        FalconConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            alibi=alibi,
            max_position_embeddings=256,
            **COMMON,
        ),
        seed,
    )


ARCHITECTURES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "llama_heads_4_4": lambda: llama_heads(4, 4),
    "llama_heads_4_2": lambda: llama_heads(4, 2),
    "llama_heads_4_1": lambda: llama_heads(4, 1, seed=2),
    "llama_heads_6_3": lambda: llama_heads(6, 3),
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mistral": mistral,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "phi3": phi3,
    "gpt2": gpt2,
    "opt": opt,
    "bloom": bloom,
    "falcon": falcon,
    "falcon_alibi": falcon_alibi,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "gpt_oss": gpt_oss,
    "deepseek_v3": deepseek_v3,
    "qwen3_next": qwen3_next,
    "mamba": mamba,
    "mamba2": mamba2,
    "falcon_h1": falcon_h1,
    "lfm2": lfm2,
}


def prompt(length: int, seed: int = 0) -> list[int]:
    """Draw a random prompt without the padding id.

    Args:
        length: Number of tokens.
        seed: Seed of the draw.

    Returns:
        list[int]: Token ids from 1 to VOCAB - 1.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (length,), generator=generator).tolist()


def left_padded(
    prompts: Sequence[Sequence[int]], pad_id: int = PAD
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack prompts of different lengths, padding on the left.

    Args:
        prompts: One list of token ids a row.
        pad_id: The padding id.

    Returns:
        tuple[torch.Tensor, torch.Tensor]: Ids and attention mask, both int64 of shape (B, longest).
    """
    longest = max(len(row) for row in prompts)
    ids = torch.full((len(prompts), longest), pad_id)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(prompts):
        ids[index, longest - len(row) :] = torch.tensor(row)
        mask[index, longest - len(row) :] = 1
    return ids, mask


@torch.no_grad()
def plain_generate(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], **kwargs: Any
) -> torch.Tensor:
    """Decode greedily, left-padding the prompts when there are several.

    Args:
        model: The model, plain or wrapped; the call is the same.
        prompts: One list of token ids a row.
        **kwargs: Passed to `generate()`; `do_sample` is False unless given.

    Returns:
        torch.Tensor: What `generate()` returned: sequences (B, longest + new), or a ModelOutput.
    """
    ids, mask = left_padded(prompts)
    return model.generate(input_ids=ids, attention_mask=mask, **{"do_sample": False, **kwargs})
