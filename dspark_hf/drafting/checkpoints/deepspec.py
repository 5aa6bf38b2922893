"""DeepSpec's layout: the target's text configuration with the drafter's fields beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dspark_hf.drafting.block.spec import BlockSpec
from dspark_hf.drafting.checkpoints.backbone import read_qwen3, write_qwen3
from dspark_hf.drafting.checkpoints.base import UnsupportedCheckpointError
from dspark_hf.drafting.checkpoints.detect import DEEPSPEC_FLAVOURS
from dspark_hf.drafting.checkpoints.fields import SLIDING, Fields, layer_types, mask_token, rope

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_ANCHORS = 512
"""num_anchors of the published checkpoints, a setting of training that their reader demands."""


def read_spec(config: Mapping[str, Any]) -> BlockSpec:
    """Translate config.json.

    Args:
        config: Content of config.json.

    Returns:
        BlockSpec: Both DSpark and DFlash drafters of this layout read the anchor row.

    Raises:
        CheckpointError: If a field is missing or malformed.
    """
    fields = Fields(config)
    flavour = next(
        DEEPSPEC_FLAVOURS[name] for name in config["architectures"] if name in DEEPSPEC_FLAVOURS
    )
    rank = fields.integer("markov_rank", least=0)
    has_confidence = fields.flag("enable_confidence_head")
    vocab_size = fields.integer("vocab_size")
    known = fields.has("num_target_layers")
    return BlockSpec(
        flavour=flavour,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        target_layers=fields.integers("target_layer_ids", least=-1),
        num_target_layers=fields.integer("num_target_layers") if known else None,
        block_size=fields.integer("block_size"),
        mask_token_id=mask_token(fields, fields.part("dflash_config")),
        reads_anchor=True,
        markov_rank=rank,
        head=fields.text("markov_head_type") if rank else "vanilla",
        has_confidence=has_confidence,
        confidence_sees_token=has_confidence and fields.flag("confidence_head_with_markov"),
        **(_read_gemma4(fields) if flavour == "gemma4" else dict(read_qwen3(fields))),
    )


def write_config(
    spec: BlockSpec, *, carried: Mapping[str, Any], dtype: str, num_anchors: int | None = None
) -> dict[str, Any]:
    """Write config.json anew.

    Args:
        spec: Of the drafter.
        carried: Backbone fields of the layout it comes from; see `backbone.CARRIED`.
        dtype: Of the weights, as Transformers writes it.
        num_anchors: Of its training; the published checkpoints' if None.

    Returns:
        dict[str, Any]: Content of config.json.

    Raises:
        UnsupportedCheckpointError: If this layout cannot express the drafter.
    """
    if spec.is_pruned:
        raise UnsupportedCheckpointError(
            f"a DeepSpec drafter must propose all {spec.vocab_size} ids of the target; got a draft "
            f"vocabulary of {spec.draft_vocab_size}. Write the speculators layout."
        )
    if not spec.reads_anchor:
        raise UnsupportedCheckpointError(
            "a DeepSpec drafter must read its first draft at the anchor row; got one that fills in "
            "mask tokens. Write the speculators layout."
        )
    if SLIDING in spec.layer_types:
        raise UnsupportedCheckpointError(
            "a DeepSpec drafter must have full attention in all layers; got layer_types "
            f"{list(spec.layer_types)}. Write the speculators layout."
        )
    taps, blocks = spec.target_layers, spec.num_target_layers
    if list(taps) != sorted(taps) or (blocks is not None and taps[-1] >= blocks - 1):
        raise UnsupportedCheckpointError(
            "target_layer_ids of a DeepSpec drafter must increase and leave out the target's last "
            f"block; got {list(taps)} of {blocks} blocks. Write the speculators layout."
        )
    config = write_qwen3(spec, carried)
    config.update(
        architectures=["Qwen3DSparkModel"],
        block_size=spec.block_size,
        dtype=dtype,
        enable_confidence_head=spec.has_confidence,
        markov_rank=spec.markov_rank,
        mask_token_id=spec.mask_token_id,
        num_anchors=DEFAULT_ANCHORS if num_anchors is None else num_anchors,
        target_layer_ids=list(spec.target_layers),
    )
    if spec.num_target_layers is not None:
        config["num_target_layers"] = spec.num_target_layers
    if spec.markov_rank:
        config["markov_head_type"] = spec.head
    if spec.has_confidence:
        config["confidence_head_with_markov"] = spec.confidence_sees_token
    return config


def _read_gemma4(fields: Fields) -> dict[str, Any]:
    """Read Gemma4's fields; the drafter's layers are its full-attention layers."""
    num_layers = fields.integer("num_hidden_layers")
    kinds, window = layer_types(fields, num_layers)
    if window is not None:
        raise UnsupportedCheckpointError(
            f"layer_types of a Gemma4 drafter must be full attention; got {list(kinds)}. Load "
            "another drafter."
        )
    if fields.values.get("enable_moe_block") or fields.values.get("hidden_size_per_layer_input"):
        raise UnsupportedCheckpointError(
            "a Gemma4 drafter must have dense layers without per-layer inputs; got "
            "enable_moe_block or hidden_size_per_layer_input. Load another drafter."
        )
    angles = rope(fields, kinds, allowed="proportional")
    shares = fields.flag("attention_k_eq_v")
    capped = fields.has("final_logit_softcapping")
    positions = fields.has("max_position_embeddings")
    return {
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": fields.integer("num_attention_heads"),
        "num_kv_heads": fields.integer("num_key_value_heads"),
        "full_kv_heads": fields.integer("num_global_key_value_heads") if shares else None,
        "head_dim": fields.integer("head_dim"),
        "full_head_dim": fields.integer("global_head_dim"),
        "rope_theta": angles.theta,
        "rope_partial": angles.share,
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "layer_types": kinds,
        "has_attention_bias": fields.flag("attention_bias", False),
        "hidden_act": fields.text("hidden_activation"),
        "attention_scale": 1.0,
        "scales_embedding": True,
        "shares_key_value": shares,
        "logit_softcap": fields.number("final_logit_softcapping") if capped else None,
        "max_positions": fields.integer("max_position_embeddings") if positions else None,
    }
