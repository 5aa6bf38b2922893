"""The values that pass between drafting, verification and targets: frozen, no behaviour."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Warp = Callable[[torch.Tensor], torch.Tensor]
"""Turns logits of shape (T, V) into the probabilities (T, V) a sampling target would draw from."""


@dataclass(frozen=True)
class DraftRequest:
    """What one row tells a drafter before a round.

    Attributes:
        row_id: Stable name of the row while it is decoded; key per-row state by it.
        ids: All committed tokens of the row, prompt first, padding never included. The row's own
            list, which grows between rounds: do not modify it, copy what you keep.
        max_tokens: Most draft tokens wanted this round, at least 1.
        warp: None for greedy decoding; otherwise turns logits of shape (T, V) into the
            probabilities the row samples from (temperature, top-k, ...). Apply it to the drafter's
            logits before drawing, so that draft and target agree more often; doing so is optional.
        generator: Source of randomness for sampled drafts, one per row, on the CPU.
    """

    row_id: int
    ids: Sequence[int]
    max_tokens: int
    warp: Warp | None
    generator: torch.Generator


@dataclass(frozen=True)
class Proposal:
    """Draft tokens for one row.

    Attributes:
        ids: Proposed tokens, first to last; empty when the drafter has nothing to say. Where
            tokens are drawn, how many is decided before the first draw.
        probs: The distribution each token was *drawn from*, float of shape (len(ids), V), or None
            when the proposal is deterministic (a one-point distribution). Losslessness under
            sampling rests on this being exact.
        signal: Which acceptance statistics the proposal belongs to, a small integer that depends
            only on tokens before the proposal (for lookup: the matched length). 0 for all is fine.
        confidence: For each token the probability that it survives given that those before it did;
            entry k depends only on tokens before token k, committed or proposed. Empty for none.
    """

    ids: Sequence[int] = ()
    probs: torch.Tensor | None = None
    signal: int = 0
    confidence: Sequence[float] = ()


@dataclass(frozen=True)
class Feed:
    """Tokens one row gives to a target forward.

    Attributes:
        row_id: The row.
        ids: New tokens; they follow the row's cached length.
        keep: Logits are wanted for this many of the last tokens, at least 1.
        is_prompt: Whether they belong to a prompt, which is read densely unless the row's sparse
            policy says how to read prompts.
    """

    row_id: int
    ids: Sequence[int]
    keep: int
    is_prompt: bool = False
