"""DFlash drafters of z-lab and of Transformers: no heads of their own, mask tokens filled in.

Facts from z-lab/dflash and Transformers 5.24: layer id i is hidden_states[i + 1], the output of
block i, and -1 the embedding's; the anchor row is not read; the target embeds and scores.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dspark_hf.drafting.block.spec import BlockSpec
from dspark_hf.drafting.checkpoints.backbone import read_qwen3
from dspark_hf.drafting.checkpoints.base import UnsupportedCheckpointError
from dspark_hf.drafting.checkpoints.fields import FULL, SLIDING, Fields, mask_token
from dspark_hf.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

HF_NAMES = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}
"""Transformers' names that differ from DeepSpec's."""


def read_zlab_spec(config: Mapping[str, Any]) -> BlockSpec:
    """Translate z-lab's config.json, whose own fields are in dflash_config or at the top.

    Args:
        config: Content of config.json.

    Returns:
        BlockSpec: Of a mask-filling drafter without heads.

    Raises:
        CheckpointError: If a field is missing, malformed or not supported.
    """
    fields = Fields(config)
    nested = fields.part("dflash_config")
    backbone = read_qwen3(fields)
    vocab_size = fields.integer("vocab_size")
    _refuse_variants(nested, fields)
    cap = _own(nested, fields, "final_logit_softcapping")
    known = fields.has("num_target_layers")
    return BlockSpec(
        flavour="qwen3",
        vocab_size=vocab_size,
        draft_vocab_size=fields.integer("draft_vocab_size", vocab_size),
        target_layers=_own(nested, fields, "target_layer_ids").integers(
            "target_layer_ids", least=-1
        ),
        num_target_layers=fields.integer("num_target_layers") if known else None,
        block_size=_own(nested, fields, "block_size").integer("block_size"),
        mask_token_id=mask_token(fields, nested),
        reads_anchor=False,
        sliding_is_causal=_sliding_is_causal(nested, fields, backbone["layer_types"]),
        scales_embedding=_scales_embedding(nested, fields, backbone["hidden_size"]),
        logit_softcap=cap.number("final_logit_softcapping")
        if cap.has("final_logit_softcapping")
        else None,
        **backbone,
    )


def read_hf_spec(config: Mapping[str, Any], *, vocab_size: int | None) -> BlockSpec:
    """Translate the config.json of a DFlash assistant saved by Transformers.

    Args:
        config: Content of config.json.
        vocab_size: Rows of the target's embedding, which this layout does not say.

    Returns:
        BlockSpec: Of a mask-filling drafter without heads; all layers see the whole block.

    Raises:
        CheckpointError: If a field is missing or malformed, or the vocabulary is not known.
    """
    fields = Fields(config)
    if not fields.has("vocab_size") and vocab_size is None:
        raise CheckpointError(
            "vocab_size must be known to load a DFlash assistant of Transformers, whose "
            "config.json does not say it; got None. Pass the rows of the target's embedding."
        )
    rows = fields.integer("vocab_size", vocab_size)
    known = fields.has("num_target_layers")
    return BlockSpec(
        flavour="qwen3",
        vocab_size=rows,
        draft_vocab_size=rows,
        target_layers=fields.integers("target_layer_ids", least=-1),
        num_target_layers=fields.integer("num_target_layers") if known else None,
        block_size=fields.integer("block_size"),
        mask_token_id=mask_token(fields),
        reads_anchor=False,
        **read_qwen3(fields),
    )


def _own(nested: Fields, fields: Fields, name: str) -> Fields:
    """Return the object that holds one of z-lab's own fields; dflash_config comes first."""
    return nested if nested.has(name) else fields


def _sliding_is_causal(nested: Fields, fields: Fields, kinds: tuple[str, ...]) -> bool:
    """Return whether sliding layers are causal; where no field says, they are.

    is_causal, at the top or nested, is z-lab's field; dflash_config.causal is its older name.
    """
    for place, name in ((fields, "is_causal"), (nested, "is_causal"), (nested, "causal")):
        if not place.has(name):
            continue
        is_causal = place.flag(name)
        if is_causal and FULL in kinds:
            raise UnsupportedCheckpointError(
                f"{place.where}{name} must be false where layers have full attention; got true. "
                "Load another drafter."
            )
        return is_causal
    return SLIDING in kinds


def _scales_embedding(nested: Fields, fields: Fields, hidden_size: int) -> bool:
    place = _own(nested, fields, "input_embedding_scale")
    if not place.has("input_embedding_scale"):
        return False
    scale = place.number("input_embedding_scale")
    # Saved from bfloat16 now and then, hence the tolerance.
    if math.isclose(scale, hidden_size**0.5, rel_tol=1e-2):
        return True
    if scale != 1.0:
        raise UnsupportedCheckpointError(
            f"{place.where}input_embedding_scale must be 1 or sqrt(hidden_size) = "
            f"{hidden_size**0.5:.4g}; got {scale}. Load another drafter."
        )
    return False


def _refuse_variants(nested: Fields, fields: Fields) -> None:
    place = _own(nested, fields, "output_multiplier")
    if place.has("output_multiplier") and place.number("output_multiplier") != 1.0:
        raise UnsupportedCheckpointError(
            f"{place.where}output_multiplier must be 1; got {place.number('output_multiplier')}. "
            "Load another drafter."
        )
    if nested.values.get("use_swa"):
        raise UnsupportedCheckpointError(
            "sliding layers must be named in layer_types; got dflash_config.use_swa. Write "
            "layer_types and sliding_window into config.json."
        )
