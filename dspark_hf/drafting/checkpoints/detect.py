"""Which layout a config.json has, from its raw fields alone: no AutoConfig, no remote code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dspark_hf.drafting.checkpoints.base import UnsupportedCheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

KINDS = (
    "deepspec-dspark", "deepspec-dflash", "speculators-dspark", "speculators-dflash", "zlab-dflash",
    "hf-dflash",
)  # fmt: skip
DEEPSPEC_FLAVOURS = {"Qwen3DSparkModel": "qwen3", "Gemma4DSparkModel": "gemma4"}
EAGLE_FIELDS = ("eagle_config", "eagle_aux_hidden_state_layer_ids")


def detect_kind(config: Mapping[str, Any]) -> str | None:
    """Find the layout of a checkpoint.

    Args:
        config: Content of config.json.

    Returns:
        str | None: One of `KINDS`, or None for an ordinary causal LM.

    Raises:
        UnsupportedCheckpointError: For a drafter of a kind this package has no model for.
    """
    architectures = config.get("architectures")
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    speculators = config.get("speculators_model_type")
    if speculators in ("dspark", "dflash"):
        return f"speculators-{speculators}"
    if _is_eagle(config, names):
        raise _unsupported("EAGLE drafters")
    if speculators is not None:
        raise _unsupported(f"speculators_model_type {speculators!r}")
    for name in names:
        if name in DEEPSPEC_FLAVOURS:
            # DeepSpec's DFlash drafters are its DSpark model without a sequential head.
            return "deepspec-dspark" if config.get("markov_rank") else "deepspec-dflash"
        if "DSpark" in name or "DFlash2" in name or "Domino" in name:
            raise _unsupported(f"architecture {name!r}")
    nested = config.get("dflash_config")
    if isinstance(nested, dict) or "DFlashDraftModel" in names:
        _refuse_relatives(nested if isinstance(nested, dict) else {})
        return "zlab-dflash"
    if {"block_size", "target_layer_ids", "mask_token_id"} <= config.keys():
        # Transformers names all its drafters that way and gives them no class in common.
        if str(config.get("model_type", "")).endswith("_assistant"):
            return "hf-dflash"
        raise _unsupported(f"architecture {names}")
    return None


def _is_eagle(config: Mapping[str, Any], names: list[str]) -> bool:
    has_name = any("eagle" in name.lower() for name in names)
    model_type = str(config.get("speculators_model_type") or "")
    return has_name or "eagle" in model_type or any(name in config for name in EAGLE_FIELDS)


def _refuse_relatives(nested: Mapping[str, Any]) -> None:
    projector = nested.get("projector_type")
    if projector not in (None, "dflash"):
        raise _unsupported(f"dflash_config.projector_type {projector!r}")
    attention = nested.get("attention_mode")
    if attention not in (None, "gqa", "mha"):
        raise _unsupported(f"dflash_config.attention_mode {attention!r}")
    for name in ("selector_rank", "conv_kernel_size"):
        if name in nested:
            raise _unsupported(f"dflash_config.{name} (DFlash2)")


def _unsupported(what: str) -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(
        f"a block drafter must be one of {list(KINDS)}; got {what}, which is not supported. Load "
        'another drafter, or use "lookup".'
    )
