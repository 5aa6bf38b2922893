"""Both sides of a comparison: the same object wrapped and unwrapped, on the same batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dspark_hf.errors import ConfigError, InputError
from dspark_hf.metrics import SpeculationRecord
from dspark_hf.model import DSparkForCausalLM

Encoded = torch.Tensor | Sequence[int]
"""One prompt's token ids: a list, or int64 of shape (length,) or (1, length)."""


@contextmanager
def unwrapped(model: Any) -> Iterator[Any]:
    """Give a wrapped model its own class back for a while; what it has learned is kept.

    Args:
        model: A wrapped model.

    Yields:
        Any: The same object, whose generate() is Transformers' own.

    Raises:
        ConfigError: If the model is not wrapped.
    """
    check_wrapped(model)
    wrapped_class, handle = type(model), model.dspark
    DSparkForCausalLM.unwrap(model)
    try:
        yield model
    finally:
        model.__class__ = wrapped_class
        vars(model)["_dspark"] = handle


def check_wrapped(model: Any) -> None:
    """Refuse a model whose generate() is Transformers' own."""
    if not isinstance(model, DSparkForCausalLM):
        raise ConfigError(
            f"model must be wrapped; got a plain {type(model).__name__}. Pass it to "
            "DSparkForCausalLM.wrap first."
        )


def end_ids(model: Any, kwargs: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end a text in a call with these keywords."""
    value = kwargs.get("eos_token_id", model.generation_config.eos_token_id)
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def pad_id(model: Any) -> int:
    """Return the id behind the end of a row: the padding id, an end id, or 0."""
    pad = model.generation_config.pad_token_id
    return int(pad if pad is not None else next(iter(end_ids(model, {})), 0))


def token_list(ids: Encoded) -> list[int]:
    """Return one prompt's ids as a list; an empty prompt is an InputError."""
    row = torch.as_tensor(ids).flatten().tolist()
    if not row:
        raise InputError("a prompt must hold at least one token; got none. Remove it.")
    return [int(token) for token in row]


def left_padded(prompts: Sequence[Sequence[int]], fill: int, model: Any) -> dict[str, Any]:
    """Return prompts as `input_ids` and `attention_mask` of (B, longest) on the model's device."""
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), fill)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, longest - len(prompt) :] = torch.tensor(prompt)
        mask[i, longest - len(prompt) :] = 1
    return {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}


def records_of(output: Any, num_rows: int) -> list[SpeculationRecord]:
    """Return a record per row; searches that Transformers runs itself leave none."""
    records: list[SpeculationRecord] | None = getattr(output, "speculation", None)
    return records or [SpeculationRecord(path="transformers") for _ in range(num_rows)]
