"""Greedy text, compared token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteria

from dspark_hf.losslessness.sides import (
    Encoded,
    check_wrapped,
    left_padded,
    pad_id,
    records_of,
    token_list,
    unwrapped,
)
from dspark_hf.verification.ties import margin_limit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dspark_hf.metrics import SpeculationRecord


@dataclass(frozen=True)
class Fork:
    """Where two greedy texts part.

    Attributes:
        index: First differing place among the new tokens, from 0.
        plain_token: The unwrapped model's token there; the padding id if its text had ended.
        token: The wrapped model's.
        margin: How much higher the unwrapped model scored its own token, in logit units after the
            processors; infinite if they ruled the other one out.
        margin_limit: Largest margin that rounding explains, in the same units.
    """

    index: int
    plain_token: int
    token: int
    margin: float
    margin_limit: float

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains the difference."""
        return abs(self.margin) <= self.margin_limit


@dataclass(frozen=True)
class GreedyResult:
    """One prompt's comparison.

    Attributes:
        plain_ids: New tokens of the unwrapped model, as generate() returns them.
        ids: New tokens of the wrapped model.
        fork: Where they part; None when they are equal.
        record: What speculation did for this prompt; its path tells whether it took part at all.
    """

    plain_ids: tuple[int, ...]
    ids: tuple[int, ...]
    fork: Fork | None
    record: SpeculationRecord

    @property
    def verdict(self) -> str:
        """Return "equal", "near-tie" (they part within rounding) or "different"."""
        if self.fork is None:
            return "equal"
        return "near-tie" if self.fork.is_near_tie else "different"


def greedy_check(
    model: Any,
    inputs: Sequence[Encoded],
    max_new_tokens: int,
    *,
    batch_size: int = 1,
    **generate_kwargs: Any,
) -> list[GreedyResult]:
    """Compare a wrapped model's greedy text with that of the same object unwrapped.

    Both run the same batches with the same arguments, so that nothing but speculation differs.

    Args:
        model: A wrapped model.
        inputs: Encoded prompts.
        max_new_tokens: Most tokens generated per prompt, at least 1.
        batch_size: Prompts per call, left padded.
        **generate_kwargs: Further keywords of generate(), such as `repetition_penalty`.

    Returns:
        list[GreedyResult]: One per prompt, in order.

    Raises:
        ConfigError: If the model is not wrapped.
        InputError: If a prompt has no tokens.

    Cost: each prompt is generated twice; a batch with a difference a third time, up to it.
    """
    check_wrapped(model)
    prompts = [token_list(ids) for ids in inputs]
    kwargs: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "do_sample": False,
        "return_dict_in_generate": True,
        "pad_token_id": pad_id(model),
        **generate_kwargs,
    }
    results = []
    for start in range(0, len(prompts), batch_size):
        batch = left_padded(prompts[start : start + batch_size], kwargs["pad_token_id"], model)
        results += _compare_batch(model, batch, kwargs)
    return results


def find_forks(
    model: Any,
    batch: Mapping[str, torch.Tensor],
    plain: Sequence[Sequence[int]],
    ours: Sequence[Sequence[int]],
    kwargs: Mapping[str, Any],
) -> list[Fork | None]:
    """Return where greedy texts of a batch part, and how close a call it was there.

    Args:
        model: A wrapped model.
        batch: `input_ids` and `attention_mask` of the prompts, int64 of shape (B, longest).
        plain: New tokens of each row, from the unwrapped model.
        ours: The same from the wrapped one.
        kwargs: The call's other keywords; `pad_token_id` among them.

    Returns:
        list[Fork | None]: One per row; None where the texts are equal.

    Cost: nothing if all are equal; else the unwrapped model runs again, up to the last fork.
    """
    places = [_first_difference(one, other) for one, other in zip(plain, ours, strict=True)]
    last = max((place for place in places if place is not None), default=None)
    if last is None:
        return [None] * len(places)
    scores = _plain_scores(model, batch, kwargs, last + 1)
    forks: list[Fork | None] = []
    for row, place in enumerate(places):
        if place is None:
            forks.append(None)
            continue
        token, other = (
            ids[row][place] if place < len(ids[row]) else kwargs["pad_token_id"]
            for ids in (plain, ours)
        )
        best = float(scores[place][row, token])
        margin = best - float(scores[place][row, other])
        forks.append(Fork(place, token, other, margin, margin_limit(model.dtype, best)))
    return forks


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first index at which two texts differ, by an earlier end too; None if nowhere."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def _compare_batch(
    model: Any, batch: dict[str, torch.Tensor], kwargs: dict[str, Any]
) -> list[GreedyResult]:
    output = model.generate(**batch, **kwargs)
    with unwrapped(model):
        plain_output = model.generate(**batch, **kwargs)
    width = batch["input_ids"].shape[1]
    ours, plain = (out.sequences[:, width:].tolist() for out in (output, plain_output))
    forks = find_forks(model, batch, plain, ours, kwargs)
    return [
        GreedyResult(tuple(one), tuple(other), fork, record)
        for one, other, fork, record in zip(
            plain, ours, forks, records_of(output, len(ours)), strict=True
        )
    ]


def _plain_scores(
    model: Any, batch: Mapping[str, torch.Tensor], kwargs: Mapping[str, Any], num_steps: int
) -> Sequence[torch.Tensor]:
    """Run the unwrapped model's own steps again and return what it chose by, each of (B, V)."""
    stop = _StopAfter(batch["input_ids"].shape[1] + num_steps)
    criteria = [*(kwargs.get("stopping_criteria") or ()), stop]
    with unwrapped(model):
        output = model.generate(
            **batch,
            **{
                **kwargs,
                "return_dict_in_generate": True,
                "output_scores": True,
                "stopping_criteria": criteria,
            },
        )
    scores: Sequence[torch.Tensor] = output.scores
    return scores


class _StopAfter(StoppingCriteria):
    """Stops at a length and leaves `max_length`, which processors may read, alone."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        is_met = input_ids.shape[1] >= self.length
        return torch.full((input_ids.shape[0],), is_met, device=input_ids.device)
