"""What all layouts share: the Qwen3 layers of the backbone, read and written alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from dspark_hf.drafting.checkpoints.base import UnsupportedCheckpointError
from dspark_hf.drafting.checkpoints.fields import layer_types, rope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dspark_hf.drafting.block.spec import BlockSpec
    from dspark_hf.drafting.checkpoints.fields import Fields

CARRIED = (
    "attention_dropout", "bos_token_id", "eos_token_id", "initializer_range", "max_window_layers",
    "pad_token_id", "use_cache",
)  # fmt: skip
"""Fields that say nothing about the drafter but that other readers of a layout may look for."""


class Backbone(TypedDict):
    """The fields of a BlockSpec that describe its layers."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    sliding_rope_theta: float | None
    rms_norm_eps: float
    layer_types: tuple[str, ...]
    sliding_window: int | None
    has_attention_bias: bool
    hidden_act: str
    max_positions: int | None


def read_qwen3(fields: Fields, *, prefer_rope: str | None = None) -> Backbone:
    """Read Qwen3's fields.

    Args:
        fields: The backbone's part of config.json.
        prefer_rope: Passed to `fields.rope`.

    Returns:
        Backbone: Keywords for BlockSpec.

    Raises:
        CheckpointError: If a field is missing or malformed.
    """
    num_layers = fields.integer("num_hidden_layers")
    kinds, window = layer_types(fields, num_layers)
    width, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    angles = rope(fields, kinds, prefer=prefer_rope)
    positions = fields.has("max_position_embeddings")
    return Backbone(
        hidden_size=width,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        # Transformers' rule; q_norm's shape is checked against it.
        head_dim=fields.integer("head_dim", width // heads),
        rope_theta=angles.theta,
        sliding_rope_theta=angles.sliding_theta,
        rms_norm_eps=fields.number("rms_norm_eps"),
        layer_types=kinds,
        sliding_window=window,
        has_attention_bias=fields.flag("attention_bias", False),
        hidden_act=fields.text("hidden_act", "silu"),
        max_positions=fields.integer("max_position_embeddings") if positions else None,
    )


def write_qwen3(spec: BlockSpec, carried: Mapping[str, Any]) -> dict[str, Any]:
    """Write Qwen3's fields.

    Args:
        spec: Of the drafter.
        carried: Where the fields of `CARRIED` are taken from.

    Returns:
        dict[str, Any]: Fields of config.json.

    Raises:
        UnsupportedCheckpointError: If the layers are not Qwen3's.
    """
    odd = {
        "flavour": (spec.flavour, "qwen3"),
        "attention_scale": (spec.attention_scale, None),
        "scales_embedding": (spec.scales_embedding, False),
        "shares_key_value": (spec.shares_key_value, False),
        "logit_softcap": (spec.logit_softcap, None),
        "rope_partial": (spec.rope_partial, 1.0),
        "sliding_rope_theta": (spec.sliding_rope_theta, None),
        "full_head_dim": (spec.full_head_dim, None),
        "full_kv_heads": (spec.full_kv_heads, None),
        "norms_heads": (spec.norms_heads, True),
    }
    for name, (value, plain) in odd.items():
        if value != plain:
            raise UnsupportedCheckpointError(
                f"{name} must be {plain!r} to be written in this layout; got {value!r}. Keep the "
                "layout the drafter has."
            )
    slides = spec.sliding_window is not None
    config: dict[str, Any] = {
        "attention_bias": spec.has_attention_bias,
        "head_dim": spec.head_dim,
        "hidden_act": spec.hidden_act,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "layer_types": list(spec.layer_types),
        "model_type": "qwen3",
        "num_attention_heads": spec.num_heads,
        "num_hidden_layers": spec.num_layers,
        "num_key_value_heads": spec.num_kv_heads,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_parameters": {"rope_theta": spec.rope_theta, "rope_type": "default"},
        "sliding_window": spec.sliding_window,
        "tie_word_embeddings": False,
        "use_sliding_window": slides,
        "vocab_size": spec.vocab_size,
    }
    if spec.max_positions is not None:
        config["max_position_embeddings"] = spec.max_positions
    config.update({name: carried[name] for name in CARRIED if name in carried})
    return config
