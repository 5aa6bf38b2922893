"""Assistants a caller brings to one generate() call, translated into drafters."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig, PreTrainedModel

from dspark_hf.config import MOST_DRAFT_TOKENS
from dspark_hf.drafting.lookup import LookupDrafter
from dspark_hf.drafting.resolve import model_drafter, special_ids
from dspark_hf.eligibility import cached_tokens
from dspark_hf.errors import CheckpointError
from dspark_hf.processing import PER_ROW_CRITERIA, STATELESS

if TYPE_CHECKING:
    from dspark_hf.config import DSparkConfig
    from dspark_hf.drafting.base import Drafter
    from dspark_hf.generation import Call


def assistant_drafter(
    model: Any,
    config: GenerationConfig,
    *,
    assistant_model: Any,
    assistant_tokenizer: Any,
    tokenizer: Any,
) -> Drafter | None:
    """Return a drafter that stands for the call's assistant.

    Args:
        model: The wrapped target.
        config: Generation settings of the call.
        assistant_model: The caller's assistant, or None.
        assistant_tokenizer: Its tokenizer when it may differ.
        tokenizer: The target's.

    Returns:
        Drafter | None: None when only Transformers' own loop knows such an assistant (another
        tokenizer, early exit, multi-token heads, an ensemble).
    """
    special = ("assistant_early_exit", "use_mtp", "speculation_type", "assistant_ensemble_weight")
    if any(getattr(config, name, None) for name in special):
        return None
    lookups: dict[int, LookupDrafter] = model.dspark.lookups
    if assistant_model is None:
        if config.prompt_lookup_num_tokens is None:
            return None
        longest = config.max_matching_ngram_size or 2
        return lookups.setdefault(
            longest, LookupDrafter(max_ngram=longest, stop_ids=special_ids(model))
        )
    if not isinstance(assistant_model, PreTrainedModel) or not assistant_model.can_generate():
        return None
    if assistant_model.config.is_encoder_decoder:
        return None
    known: dict[int, Drafter] = model.dspark.assistants
    key = id(assistant_model)
    if getattr(known.get(key), "model", None) is not assistant_model:
        try:
            known[key] = model_drafter(assistant_model, model, tokenizer, assistant_tokenizer)
        except CheckpointError:
            return None
    return known[key]


def with_lookup_length(settings: DSparkConfig, config: GenerationConfig) -> DSparkConfig:
    """Return the settings with the draft length a call's `prompt_lookup_num_tokens` asks for."""
    wanted = config.prompt_lookup_num_tokens
    if wanted is None or not 1 <= wanted <= MOST_DRAFT_TOKENS:
        return settings
    return replace(settings, max_draft_tokens=wanted)


def can_assist(model: Any, config: GenerationConfig, mode_kwargs: dict[str, Any]) -> bool:
    """Tell whether this package decodes an assisted call, whatever Transformers' limits are."""
    drafter = assistant_drafter(
        model,
        config,
        assistant_model=mode_kwargs.get("assistant_model"),
        assistant_tokenizer=mode_kwargs.get("assistant_tokenizer"),
        tokenizer=mode_kwargs.get("tokenizer"),
    )
    return drafter is not None and not model.config.is_encoder_decoder


def unsafe_for_assisting(call: Call) -> str | None:
    """Say what in a call Transformers' own assisted loop gets silently wrong; None if nothing."""
    for processor in call.processors:
        if type(processor) not in STATELESS:
            return f"{type(processor).__name__}"
    for criterion in call.criteria:
        is_simple = hasattr(criterion, "eos_token_id") or hasattr(criterion, "max_length")
        if not is_simple or type(criterion) not in PER_ROW_CRITERIA:
            return f"{type(criterion).__name__} inside an accepted block"
    return "a filled cache" if cached_tokens(call.cache) else None
