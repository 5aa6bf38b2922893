"""The backbone's layers are Transformers' own: same weights, same output on a lone block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma4TextConfig, Qwen3Config
from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from block_drafters import FULL, SLIDING
from dspark_hf.drafting.block.attention import rotary_tables
from dspark_hf.drafting.block.flavours import make_layer
from dspark_hf.drafting.block.model import TextMemory
from dspark_hf.drafting.block.spec import BlockSpec
from dspark_hf.drafting.block.vocabulary import Vocabulary

EXACT = 1e-5
"""Relative and absolute bound in fp32 between two orders of the same operations."""
BLOCK, FIRST = 6, 37
"""Tokens of the block and position of its first."""


def spec_of(**changes: Any) -> BlockSpec:
    values: dict[str, Any] = {
        "flavour": "qwen3", "vocab_size": 50, "draft_vocab_size": 50, "hidden_size": 32,
        "intermediate_size": 40, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 8, "target_layers": (0,), "num_target_layers": None, "block_size": BLOCK,
        "mask_token_id": 0, "reads_anchor": True, "rope_theta": 5e4, "rms_norm_eps": 1e-5,
        "layer_types": (FULL,),
    }  # fmt: skip
    return BlockSpec(**{**values, **changes})


def states() -> torch.Tensor:
    return torch.randn(2, BLOCK, 32, generator=torch.Generator().manual_seed(1))


def ours(spec: BlockSpec, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Run the layer over two blocks that stand alone, the same positions in both."""
    layer = make_layer(spec, 0)
    layer.load_state_dict(weights)
    layer.to(dtype).eval()
    positions = torch.arange(FIRST, FIRST + BLOCK).expand(2, -1)
    empty = torch.zeros(2, spec.kv_heads_of(0), 0, spec.head_dim_of(0), dtype=dtype)
    memory = TextMemory(spec, [(empty, empty)], torch.full((2, 1), FIRST))
    with torch.no_grad():
        return layer(states().to(dtype), rotary_tables(positions, spec, dtype), memory)


def randomised(layer: nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, value in [*layer.named_parameters(), *layer.named_buffers()]:
            value.copy_(torch.randn(value.shape, generator=generator) * 0.4 + (value.ndim == 1))
    return layer.state_dict()


def same(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> None:
    bound = EXACT if dtype == torch.float32 else 0.05
    torch.testing.assert_close(one, other, atol=bound * float(other.abs().max()), rtol=bound)


DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_qwen3_layer_is_transformers_own(has_bias: bool, dtype: torch.dtype) -> None:
    config = Qwen3Config(
        vocab_size=50, hidden_size=32, intermediate_size=40, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-5,
        attention_bias=has_bias, rope_parameters={"rope_type": "default", "rope_theta": 5e4},
    )  # fmt: skip
    config._attn_implementation = "eager"
    layer = qwen3.Qwen3DecoderLayer(config, 0).eval()
    weights = randomised(layer)
    positions = torch.arange(FIRST, FIRST + BLOCK).expand(2, -1)
    angles = qwen3.Qwen3RotaryEmbedding(config)(states().to(dtype), positions)
    with torch.no_grad():
        told = layer.to(dtype)(states().to(dtype), attention_mask=None, position_embeddings=angles)
    same(ours(spec_of(has_attention_bias=has_bias), weights, dtype), told, dtype)


GEMMA4: dict[str, dict[str, Any]] = {
    "sliding": {"layer_types": [SLIDING]},
    "full": {"layer_types": [FULL]},
    "shared": {"layer_types": [FULL], "attention_k_eq_v": True},
    "sliding-not-shared": {"layer_types": [SLIDING], "attention_k_eq_v": True},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", GEMMA4)
def test_a_gemma4_layer_is_transformers_own(kind: str, dtype: torch.dtype) -> None:
    # Transformers makes the last layer full: a second one is added, and not used.
    layer_types = [*GEMMA4[kind]["layer_types"], FULL]
    shares = GEMMA4[kind].get("attention_k_eq_v", False)
    config = Gemma4TextConfig(
        vocab_size=50, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, global_head_dim=16,
        num_global_key_value_heads=1, rms_norm_eps=1e-5, sliding_window=64,
        layer_types=layer_types, attention_k_eq_v=shares, hidden_size_per_layer_input=0,
        num_kv_shared_layers=0, vocab_size_per_layer_input=50, use_double_wide_mlp=False,
        rope_parameters={
            FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
    )  # fmt: skip
    config._attn_implementation = "eager"
    layer = gemma4.Gemma4TextDecoderLayer(config, 0).eval()
    weights = randomised(layer)
    positions = torch.arange(FIRST, FIRST + BLOCK).expand(2, -1)
    rotary = gemma4.Gemma4TextRotaryEmbedding(config)
    angles = rotary(states().to(dtype), positions, layer_types[0])
    with torch.no_grad():
        told = layer.to(dtype)(
            states().to(dtype),
            shared_kv_states={},
            position_embeddings=angles,
            attention_mask=None,
            position_ids=positions,
        )
    full_kv_heads = 1 if shares else 2
    spec = spec_of(
        flavour="gemma4", layer_types=(layer_types[0],), sliding_window=64,
        hidden_act="gelu_pytorch_tanh", attention_scale=1.0, shares_key_value=shares,
        full_head_dim=16, full_kv_heads=full_kv_heads, rope_theta=1e6, sliding_rope_theta=1e4,
        rope_partial=0.25,
    )  # fmt: skip
    assert ("self_attn.v_proj.weight" in weights) == (kind != "shared")
    same(ours(spec, weights, dtype), told, dtype)


def test_gemma4_scales_its_embeddings_as_transformers_does() -> None:
    table = torch.randn(50, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
    module = gemma4.Gemma4TextScaledWordEmbedding(50, 32, 0, embed_scale=32**0.5).bfloat16()
    module.weight.data = table
    ids = torch.arange(1, 50)

    class Target(nn.Module):
        config = Gemma4TextConfig(vocab_size=50, hidden_size=32)

        def get_input_embeddings(self) -> nn.Module:
            return module

        get_output_embeddings = get_input_embeddings

    vocabulary = Vocabulary(spec_of(scales_embedding=True, logit_softcap=3.0), Target())
    assert torch.equal(vocabulary.embed(ids, torch.bfloat16), module(ids))
    hidden = torch.randn(4, 32, generator=torch.Generator().manual_seed(4)).bfloat16()
    capped = 3.0 * torch.tanh(nn.functional.linear(hidden, table) / 3.0)
    assert torch.equal(vocabulary.logits(hidden), capped)
    assert float(capped.float().abs().max()) <= 3.0


def test_partial_rotary_leaves_the_last_dimensions_alone() -> None:
    spec = spec_of(rope_partial=0.5, head_dim=8)
    cos, sin = rotary_tables(torch.tensor([[5, 9]]), spec, torch.float32)[FULL]
    # Halves are rotated with one another; of each half the second part stands still.
    for half in (slice(2, 4), slice(6, 8)):
        assert torch.equal(cos[..., half], torch.ones(1, 2, 2))
        assert torch.equal(sin[..., half], torch.zeros(1, 2, 2))
    assert (sin[..., :2] != 0).all()
