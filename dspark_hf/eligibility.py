"""Which calls this package decodes itself; every other one runs in the model's own loop.

A reason is a sentence for the log: what the call asks for that speculation cannot give exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from dspark_hf import compat

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

    from dspark_hf.generation import Call

KNOWN_INPUTS = frozenset(
    {
        "attention_mask", "position_ids", "logits_to_keep", "use_cache", "tokenizer",
        *compat.CACHE_KEYS,
    }
)  # fmt: skip
"""Keywords of the model's forward that the ragged forward understands."""


def settings_refusal(model: PreTrainedModel, call: Call) -> str | None:
    """Say which setting of a call needs the model's own loop.

    Args:
        model: The wrapped model.
        call: As generate() prepared it.

    Returns:
        str | None: The reason, or None.
    """
    config, batch_size = call.generation_config, call.input_ids.shape[0]
    checks = [
        (model.config.is_encoder_decoder, "encoder-decoder models"),
        (compat.has_dropout(model), "the model is in training mode with dropout; call eval()"),
        (not config.use_cache, "use_cache=False"),
        (bool(config.output_attentions), "output_attentions=True"),
        (bool(config.output_hidden_states), "output_hidden_states=True"),
        (bool(call.synced_gpus), "synced_gpus"),
        (
            config.cache_implementation not in (None, "dynamic"),
            f"cache_implementation={config.cache_implementation!r}",
        ),
        (batch_size > 1 and call.streamer is not None, "a streamer with several rows"),
        (_overrides_inputs(model), "prepare_inputs_for_generation is replaced on this model"),
    ]
    return next((reason for is_met, reason in checks if is_met), None)


def _overrides_inputs(model: PreTrainedModel) -> bool:
    """Tell whether inputs are rewritten per step; PEFT adapters that are no prompts do not."""
    override = compat.has_own_prepare_inputs(model)
    if override is None:
        return False
    adapter = getattr(getattr(override, "__self__", None), "active_peft_config", None)
    return getattr(adapter, "is_prompt_learning", True) is not False


def inputs_refusal(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    model_kwargs: Mapping[str, Any],
    max_length: int | None,
) -> str | None:
    """Say what in a call's inputs needs the model's own loop.

    Args:
        model: The wrapped model.
        input_ids: Expanded prompts, int64 of shape (B, length).
        model_kwargs: Keywords prepared for the model's forward.
        max_length: Length at which every row stops, padding included; None when unknown.

    Returns:
        str | None: The reason, or None.
    """
    extra = [k for k, v in model_kwargs.items() if k not in KNOWN_INPUTS and v is not None]
    if extra:
        return f"the model input {extra[0]!r}"
    mask = model_kwargs.get("attention_mask")
    if mask is not None:
        if mask.shape != input_ids.shape:
            return "an attention mask longer than input_ids"
        if (mask[:, 1:] < mask[:, :-1]).any():
            return "an attention mask with holes or right padding"
    pads = left_padding(input_ids, mask)
    return (
        _position_refusal(input_ids, pads, model_kwargs.get("position_ids"))
        or _cache_refusal(input_ids, pads, compat.cache_of(model_kwargs))
        or rotary_refusal(model, [input_ids.shape[1] - pad for pad in pads], max_length)
    )


def left_padding(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[int]:
    """Return each row's left padding, in tokens."""
    if mask is None:
        return [0] * input_ids.shape[0]
    return (mask == 0).sum(dim=-1).tolist()


def _position_refusal(
    input_ids: torch.Tensor, pads: list[int], position_ids: torch.Tensor | None
) -> str | None:
    if position_ids is None:
        return None
    if position_ids.dim() != 2 or position_ids.shape[1] != input_ids.shape[1]:
        return "position_ids of another shape than input_ids"
    for row, pad in enumerate(pads):
        own = position_ids[row % position_ids.shape[0], pad:]
        if not torch.equal(own, torch.arange(len(own), device=own.device)):
            return "position_ids that do not count from 0"
    return None


def _cache_refusal(input_ids: torch.Tensor, pads: list[int], cache: Cache | None) -> str | None:
    if cache is None:
        return None
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        return f"a {type(cache).__name__}"
    held = cached_tokens(cache)
    if held == 0:
        return None
    if input_ids.shape[0] > 1 or pads[0]:
        return "a filled cache with several rows or padding"
    if held < 0 or held >= input_ids.shape[1]:
        return "a filled cache whose tokens are not in input_ids"
    return None


def cached_tokens(cache: Cache | None) -> int:
    """Return how many tokens a cache holds; -1 when recurrent layers hold an unknown number."""
    if cache is None:
        return 0
    attention = [layer for layer in cache.layers if hasattr(layer, "get_seq_length")]
    if attention:
        return int(attention[0].get_seq_length())
    return -1 if any(any(layer.has_previous_state.values()) for layer in cache.layers) else 0


def rotary_refusal(
    model: PreTrainedModel, prompt_lengths: list[int], max_length: int | None
) -> str | None:
    """Say why a block of tokens would be rotated otherwise than one token at a time.

    Dynamic scaling changes every frequency with the length of the forward; LongRoPE switches its
    factors where a sequence passes the original context.
    """
    parameters = getattr(compat.text_config(model), "rope_parameters", None) or {}
    nested = [v for v in parameters.values() if isinstance(v, dict)]
    for rope in [parameters, *nested]:
        kind = rope.get("rope_type")
        if kind == "dynamic":
            return "rotary scaling that depends on the length of each forward"
        if kind == "longrope":
            fallback = getattr(compat.text_config(model), "original_max_position_embeddings", 0)
            switch = int(rope.get("original_max_position_embeddings") or fallback)
            stays_short = max_length is not None and max_length <= switch
            if not stays_short and min(prompt_lengths) <= switch:
                return "LongRoPE factors that may switch while decoding"
    return None
