"""From what a caller submits to rows, by generate()'s own preparation, in the caller's thread.

So every generation option means what it means in generate(), and a wrong one fails where it was
written. A call that cannot be decoded among others runs alone, in the model's own loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch

from dspark_hf import compat
from dspark_hf.drafting.base import FeatureDrafter
from dspark_hf.eligibility import cached_tokens
from dspark_hf.errors import ConfigError, InputError
from dspark_hf.generation import make_rows
from dspark_hf.serving.resume import restore
from dspark_hf.takeover import PreparedCall, capturing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedTokenizerBase

    from dspark_hf.attention.sparse import SparseReading
    from dspark_hf.config import DSparkConfig
    from dspark_hf.drafting.base import Drafter
    from dspark_hf.generation import Call
    from dspark_hf.rows import Row

SHARED = ("schedule", "confidence_threshold", "never_slower", "exactness", "recheck_margin")
"""Settings that the rows of a queue have in common: one forward serves them all."""

COUNTS = ("num_beams", "num_return_sequences")
"""Settings that generate() looks at as late as in its loop, where a queue's thread would fail."""


@dataclass
class Prepared:
    """A request ready to be decoded.

    Attributes:
        rows: Its rows, none started; empty if it runs alone.
        call: As generate() prepared it.
        drafter: Who drafts for it.
        run_alone: Decodes it in the model's own loop; None if rows are decoded here.
        num_prompt_tokens: Of its longest row.
        returns_text: Whether text was submitted, so that text comes back.
        reading: How its rows read long contexts; None for all of them.
    """

    rows: list[Row]
    call: Call
    drafter: Drafter | None
    run_alone: Callable[[], Any] | None
    num_prompt_tokens: int
    returns_text: bool
    reading: SparseReading | None = None

    def run(self) -> Any:
        """Decode it in the model's own loop; return what generate() returns."""
        if self.run_alone is None:
            raise ConfigError("only a request that must run alone is run so; got one with rows.")
        return self.run_alone()


def prepare(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    inputs: Any,
    kwargs: dict[str, Any],
    committed: Sequence[Sequence[int]] = (),
) -> Prepared:
    """Prepare a request.

    Args:
        model: Wrapped.
        tokenizer: Its tokenizer; needed for text, chats and stop strings.
        inputs: Text; ids as a list, or a tensor (T,) or (B, T); or chat messages.
        kwargs: Of generate().
        committed: New tokens that each row has from elsewhere; none for none.

    Returns:
        Prepared: What can be decoded.

    Raises:
        InputError: If the inputs are none of these, or empty.
        ConfigError: If a setting that a queue's rows share differs from the model's, or a keyword
            is none that a queue can honour.
    """
    # What the queue's thread will write to must not be made in inference mode.
    with torch.inference_mode(mode=False), torch.no_grad():
        return _prepare(model, tokenizer, inputs, kwargs, committed)


def _prepare(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    inputs: Any,
    kwargs: dict[str, Any],
    committed: Sequence[Sequence[int]],
) -> Prepared:
    _check_keywords(model, kwargs)
    ids, returns_text = encode(tokenizer, inputs)
    ids = ids.to(compat.input_device(model))
    kwargs = {"input_ids": ids, **kwargs}
    if len(ids) == 1:
        # In a batch generate() finds the padding.
        kwargs.setdefault("attention_mask", torch.ones_like(ids))
    if tokenizer is not None:
        kwargs.setdefault("tokenizer", tokenizer)
    with capturing():
        try:
            model.generate(**kwargs)
        except PreparedCall as found:
            prepared = found
        else:
            raise ConfigError(
                "a queue decodes what generate() would decode in a loop of its own; this call has "
                "none. Call generate() for it."
            )
    call, config, length = prepared.call, prepared.config, ids.shape[1]
    if prepared.run_alone is not None:
        if committed:
            raise ConfigError(
                "committed must be empty for a call that runs in the model's own loop, which "
                f"starts from prompts; got tokens of {len(committed)} rows."
            )
        return Prepared([], call, None, prepared.run_alone, length, returns_text)
    _check_shared(model, config, prepared.drafter)
    # Refuses here what the model cannot do, and measures what must be measured.
    reading = prepared.handle.sparse_reading(config)
    if cached_tokens(call.cache) != 0 or compat.is_user_cache(call.cache):
        raise ConfigError(
            "past_key_values cannot be handed to a queue, which keeps its own; got one. Submit the "
            "whole prompt."
        )
    rows = make_rows(prepared.handle.model, call, config)
    longest = max(len(row.ids) for row in rows)
    if committed:
        restore(model, rows, committed)
    return Prepared(rows, call, prepared.drafter, None, longest, returns_text, reading)


def encode(tokenizer: PreTrainedTokenizerBase | None, inputs: Any) -> tuple[torch.Tensor, bool]:
    """Turn what was submitted into token ids.

    Returns:
        tuple: Ids of shape (B, T); and whether text comes back.

    Raises:
        InputError: If it is no text, ids or chat, or holds nothing.
    """
    if isinstance(inputs, str) or _is_chat(inputs):
        if tokenizer is None:
            raise InputError(
                "inputs must be token ids where the queue has no tokenizer; got text. Pass "
                "tokenizer= to the queue."
            )
        if isinstance(inputs, str):
            ids = tokenizer(inputs)["input_ids"]
        else:
            ids = tokenizer.apply_chat_template(
                inputs, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        return torch.tensor([ids], dtype=torch.long), True
    if isinstance(inputs, torch.Tensor):
        ids = inputs[None] if inputs.dim() == 1 else inputs
        if ids.dim() == 2 and not ids.is_floating_point() and ids.dtype is not torch.bool:
            return ids, False
    elif isinstance(inputs, list | tuple) and all(
        isinstance(i, int) and not isinstance(i, bool) for i in inputs
    ):
        return torch.tensor([list(inputs)], dtype=torch.long), False
    raise InputError(
        "inputs must be text, token ids (a list of integers, or a tensor of shape (T,) or (B, T)), "
        f"or chat messages with 'role' and 'content'; got {_described(inputs)}."
    )


def _is_chat(inputs: Any) -> bool:
    return (
        isinstance(inputs, list | tuple)
        and len(inputs) > 0
        and all(isinstance(m, dict) and "role" in m and "content" in m for m in inputs)
    )


def _described(inputs: Any) -> str:
    if isinstance(inputs, torch.Tensor):
        return f"a tensor of shape {tuple(inputs.shape)} and type {inputs.dtype}"
    return f"{type(inputs).__name__} {inputs!r}"[:120]


def _check_keywords(model: Any, kwargs: dict[str, Any]) -> None:
    """Refuse what can only mean a generate() call of one's own."""
    for name in ("inputs", "input_ids", "custom_generate"):
        if kwargs.get(name) is not None:
            raise ConfigError(
                f"{name} cannot be handed to a queue; got one. Pass prompts as the first argument, "
                "and call generate() for a loop of your own."
            )
    if compat.is_autocast(model):
        raise ConfigError(
            "autocast must be off: it would not reach the queue's thread. Load the model in the "
            "type it should compute in."
        )
    for name in COUNTS:
        _check_count(name, model, kwargs)


def _check_count(name: str, model: Any, kwargs: dict[str, Any]) -> None:
    """Refuse a number of beams or answers that is below 1, wherever it is set."""
    configs = (kwargs.get("generation_config"), model.generation_config)
    values = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
    value = next((value for value in values if value is not None), 1)
    if not isinstance(value, Integral) or value < 1:
        raise ConfigError(
            f"{name} must be an integer of at least 1; got {value!r}. Leave it out for one."
        )


def _check_shared(model: Any, config: DSparkConfig, drafter: Drafter | None) -> None:
    own = model.dspark
    if config.max_draft_tokens > own.config.max_draft_tokens:
        raise ConfigError(
            "max_draft_tokens is shared by a queue's rows and must be at most the model's "
            f"{own.config.max_draft_tokens}; got {config.max_draft_tokens} in dspark= or "
            "prompt_lookup_num_tokens=. Raise it on the model, or use another queue."
        )
    for name in SHARED:
        if getattr(config, name) != getattr(own.config, name):
            raise ConfigError(
                f"{name} is shared by a queue's rows and must be {getattr(own.config, name)!r}; "
                f"got {getattr(config, name)!r} in dspark=. Set it on the model, or use another "
                "queue."
            )
    if drafter is not None and drafter is not own.drafter and isinstance(drafter, FeatureDrafter):
        raise ConfigError(
            f"a request's own drafter must not read the target's features; got {drafter.name!r}. "
            "Give it to the model, or use another queue."
        )
