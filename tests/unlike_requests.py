"""Requests of every kind: sampled, of several rows, with processors and stops of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from queues import FIXED, Asked
from tiny import PAD, VOCAB, left_padded


class Favour:
    """A logits processor of one's own: at every length another token is made likelier."""

    dspark_per_row = True

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, (7 * ids.shape[1]) % VOCAB] += 6.0
        return scores


class Stateful:
    """One that keeps state, so that it must be asked once per token, in order."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores = scores.clone()
        scores[:, self.calls % VOCAB] += 6.0
        return scores


class AtMultiple:
    """A stopping criterion of one's own."""

    dspark_per_row = True

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return ids[:, -1] % 9 == 4


def sampled(seed: int, **options: Any) -> dict[str, Any]:
    """Return options of sampling whose text follows from a seed."""
    config = replace(FIXED, acceptance="coupled", seed=seed)
    return {"do_sample": True, "temperature": 1.2, "dspark": config, **options}


def of_kind(place: int, ids: list[int], limit: int, tokenizer: Any) -> Asked:
    """Make a request of the kind that its place in a list says.

    Args:
        place: Thirteen neighbours are of thirteen kinds.
        ids: The prompt.
        limit: Most new tokens.
        tokenizer: Of the queue.
    """
    common: dict[str, Any] = {"max_new_tokens": limit, "do_sample": False, "pad_token_id": PAD}
    kinds: list[dict[str, Any]] = [
        {},
        sampled(place),
        {"stop_strings": ["a", "mb"], "tokenizer": tokenizer},
        {"eos_token_id": [3 * n + 1 for n in range(12)]},
        sampled(place, repetition_penalty=1.4, top_k=20),
        {"no_repeat_ngram_size": 2, "repetition_penalty": 1.2},
        {"logits_processor": [Favour()], "stopping_criteria": [AtMultiple()]},
        sampled(place, num_return_sequences=3, eos_token_id=[5, 50, 90, 120, 155]),
        {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
        {"prompt_lookup_num_tokens": 3},
        sampled(place, return_dict_in_generate=True, output_scores=True, top_p=0.9),
        {"logits_processor": [Stateful()]},
        {"num_beams": 2} if limit < 10 else {"min_new_tokens": limit // 2, "eos_token_id": [9, 8]},
    ]
    kind = place % len(kinds)

    def options() -> dict[str, Any]:
        chosen = {**common, **kinds[kind]}
        if kind == 11:
            chosen["logits_processor"] = [Stateful()]
        return chosen

    if kind == 0 and place:
        # A padded batch of two rows; generate() finds the padding.
        batch, _ = left_padded([ids, ids[: len(ids) // 3 + 1]])
        return Asked(batch, lambda: {**common, "eos_token_id": [2, 60, 100]}, batch)
    if kind == 3:
        text = tokenizer.decode(ids)
        return Asked(text, options, tokenizer(text, return_tensors="pt")["input_ids"])
    return Asked(ids, options)
