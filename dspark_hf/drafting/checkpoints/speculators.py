"""The speculators layout: a nested layer configuration, layer ids one higher, optional pruning.

Facts from speculators 0.9.0: id j is Transformers' hidden_states[j], the output of block j - 1;
full-attention layers see the whole block, sliding ones are causal unless sliding_window_non_causal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dspark_hf.drafting.block.spec import BlockSpec
from dspark_hf.drafting.checkpoints.backbone import read_qwen3, write_qwen3
from dspark_hf.drafting.checkpoints.base import UnsupportedCheckpointError
from dspark_hf.drafting.checkpoints.fields import SLIDING, Fields, mask_token
from dspark_hf.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

VERSION = "0.9.0"
"""Version of the layout that is written."""
TRAINING_ONLY = frozenset({"verifier_lm_head.weight", "verifier_norm.weight"})
"""Copies of the target's tensors that older versions saved; no drafter reads them."""


def read_spec(config: Mapping[str, Any]) -> BlockSpec:
    """Translate config.json.

    Args:
        config: Content of config.json.

    Returns:
        BlockSpec: With layer ids as Transformers counts blocks.

    Raises:
        CheckpointError: If a field is missing or malformed, or the readout cannot be told.
    """
    fields = Fields(config)
    inner = fields.part("transformer_layer_config")
    backbone = read_qwen3(inner, prefer_rope=SLIDING)
    width = fields.integer("target_hidden_size", backbone["hidden_size"])
    if width != backbone["hidden_size"]:
        raise UnsupportedCheckpointError(
            f"target_hidden_size must be the drafter's hidden_size {backbone['hidden_size']}; got "
            f"{width}. Load another drafter."
        )
    vocab_size = inner.integer("vocab_size")
    is_dspark = config["speculators_model_type"] == "dspark"
    known = fields.has("num_target_layers")
    return BlockSpec(
        flavour="qwen3",
        vocab_size=vocab_size,
        draft_vocab_size=fields.integer("draft_vocab_size"),
        target_layers=tuple(
            layer - 1 for layer in fields.integers("aux_hidden_state_layer_ids", least=0)
        ),
        num_target_layers=fields.integer("num_target_layers") if known else None,
        block_size=fields.integer("block_size"),
        mask_token_id=mask_token(fields, inner),
        reads_anchor=_reads_anchor(fields, is_dspark),
        sliding_is_causal=backbone["sliding_window"] is not None
        and not fields.flag("sliding_window_non_causal", False),
        **(_read_heads(fields) if is_dspark else {}),
        **backbone,
    )


def write_config(
    spec: BlockSpec,
    *,
    carried: Mapping[str, Any],
    dtype: str,
    verifier: Mapping[str, Any],
    num_anchors: int | None = None,
) -> dict[str, Any]:
    """Write config.json anew.

    Args:
        spec: Of the drafter.
        carried: Backbone fields of the layout it comes from; see `backbone.CARRIED`.
        dtype: Of the weights, as Transformers writes it.
        verifier: name_or_path and architectures of the target.
        num_anchors: Of its training; left out if None.

    Returns:
        dict[str, Any]: Content of config.json.

    Raises:
        UnsupportedCheckpointError: If this layout cannot express the drafter.
    """
    # A sequential or confidence head, or an anchor row that is read, is what makes it DSpark.
    is_dspark = bool(spec.markov_rank or spec.has_confidence or spec.reads_anchor)
    algorithm = "dspark" if is_dspark else "dflash"
    config: dict[str, Any] = {
        "architectures": ["DSparkDraftModel" if is_dspark else "DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in spec.target_layers],
        "block_size": spec.block_size,
        "draft_vocab_size": spec.draft_vocab_size,
        "dtype": dtype,
        "mask_token_id": spec.mask_token_id,
        "sample_from_anchor": spec.reads_anchor,
        "sliding_window_non_causal": SLIDING in spec.layer_types and not spec.sliding_is_causal,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": spec.num_drafts,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": dict(verifier),
        },
        "speculators_model_type": algorithm,
        "speculators_version": VERSION,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            "architectures": ["Qwen3ForCausalLM"],
            "dtype": dtype,
            **write_qwen3(spec, carried),
        },
    }
    if spec.num_target_layers is not None:
        config["num_target_layers"] = spec.num_target_layers
    if num_anchors is not None:
        config["max_anchors"] = num_anchors
    if is_dspark:
        config.update(
            confidence_head_with_markov=spec.confidence_sees_token,
            enable_confidence_head=spec.has_confidence,
            markov_head_type=spec.head,
            markov_rank=spec.markov_rank,
        )
    return config


def _read_heads(fields: Fields) -> dict[str, Any]:
    rank = fields.integer("markov_rank", least=0)
    has_confidence = fields.flag("enable_confidence_head")
    return {
        "markov_rank": rank,
        "head": fields.text("markov_head_type") if rank else "vanilla",
        "has_confidence": has_confidence,
        "confidence_sees_token": has_confidence and fields.flag("confidence_head_with_markov"),
    }


def _reads_anchor(fields: Fields, is_dspark: bool) -> bool:
    """Return the readout.

    DSpark checkpoints from before sample_from_anchor exist in both conventions, and readers
    disagree on the default; the number of tokens they were published to propose tells which it is.
    """
    if fields.has("sample_from_anchor"):
        return fields.flag("sample_from_anchor")
    if not is_dspark:
        return False
    block = fields.integer("block_size")
    methods = fields.part("speculators_config").values.get("proposal_methods") or []
    counts = {method.get("speculative_tokens") for method in methods if isinstance(method, dict)}
    if counts in ({block}, {block - 1}):
        return counts == {block}
    raise CheckpointError(
        "config.json must say sample_from_anchor, or propose block_size or block_size - 1 tokens; "
        f"got no such field, block_size {block} and speculative_tokens {sorted(map(str, counts))}. "
        "Repair the drafter's config.json: true if the anchor row predicts the first draft."
    )
