"""Checks of generate()'s inputs that fail before the first token, naming what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dspark_hf.errors import CapacityError, InputError
from dspark_hf.targets.select import position_limit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel


def check_inputs(model: PreTrainedModel, inputs: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse prompts that cannot be decoded.

    Args:
        model: The target.
        inputs: generate()'s first argument.
        kwargs: Its keywords.

    Raises:
        InputError: If a prompt has no tokens or an id outside the embedding.
        CapacityError: If there are fewer positions than the prompt needs.
    """
    ids = inputs if inputs is not None else kwargs.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point():
        return
    if kwargs.get("inputs_embeds") is not None:
        return
    if ids.shape[1] == 0:
        raise InputError(
            f"input_ids must hold at least one token per row; got shape {tuple(ids.shape)}. Start "
            "from a beginning-of-text token."
        )
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        empty = (mask.sum(dim=-1) == 0).nonzero().flatten().tolist()
        if empty:
            raise InputError(
                f"attention_mask must mark at least one token per row; rows {empty} have none. "
                "Remove the rows, or start them from a beginning-of-text token."
            )
    _check_ids(model, ids)
    _check_prompt(model, ids, mask)


def _check_ids(model: PreTrainedModel, ids: torch.Tensor) -> None:
    if model.config.is_encoder_decoder:
        return
    embedding = model.get_input_embeddings()
    size = getattr(embedding, "num_embeddings", None)
    low, high = int(ids.min()), int(ids.max())
    if size is not None and (low < 0 or high >= size):
        raise InputError(
            f"input_ids must lie in 0..{size - 1}, the rows of the model's embedding; got "
            f"{low if low < 0 else high}. Use the model's own tokenizer."
        )


def _check_prompt(model: PreTrainedModel, ids: torch.Tensor, mask: Any) -> None:
    limit, is_table = position_limit(model)
    longest = _longest(ids, mask)
    # Rotary and ALiBi positions have no last one; Transformers warns and goes on, and so do we.
    if limit is not None and is_table and longest > limit and not model.config.is_encoder_decoder:
        raise CapacityError(
            f"a prompt must fit the model's {limit} learned positions; got {longest} tokens. "
            "Shorten it."
        )


def check_room(
    model: PreTrainedModel, ids: torch.Tensor, model_kwargs: Mapping[str, Any], config: Any
) -> None:
    """Refuse a continuation for which a learned position table has no rows.

    Args:
        model: The target.
        ids: Prompts, of shape (B, length).
        model_kwargs: Keywords prepared for the model's forward.
        config: Generation settings as generate() prepared them.

    Raises:
        CapacityError: If the longest row may get more tokens than there are positions.
    """
    limit, is_table = position_limit(model)
    if limit is None or not is_table or model.config.is_encoder_decoder or not config.max_length:
        return
    longest = _longest(ids, model_kwargs.get("attention_mask"))
    wanted = config.max_length - ids.shape[1]
    # The newest token is never fed.
    if longest + wanted - 1 > limit:
        raise CapacityError(
            f"prompt and new tokens must fit the model's {limit} learned positions; got {longest} "
            f"+ {wanted}. Lower max_new_tokens to {max(limit - longest + 1, 0)}."
        )


def _longest(ids: torch.Tensor, mask: Any) -> int:
    """Return the longest prompt, in tokens, padding not counted."""
    if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
        return int(mask.sum(dim=-1).max())
    return ids.shape[1]
