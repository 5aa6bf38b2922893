"""Exact enumeration of speculative sampling: what a target, a drafter and a schedule emit.

Everything is a table: conditionals are fixed by the text before them, all blocks a drafter may draw
and all outcomes of accept-or-resample are expanded, in float64, and nothing is drawn.
"""

from __future__ import annotations

import itertools
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from dspark_hf.verification.acceptance import acceptance_probability, residual_distribution

HORIZON = 3
EXACT = 1e-12  # float64 sums of a few hundred terms; rounding stays near 1e-16
BIASED = 1e-3  # a broken rule shows up as a deviation of at least this size

Text = tuple[int, ...]
Conditional = Callable[[Text], torch.Tensor]  # the text so far -> next-token distribution (V,)
Schedule = Callable[[Text, Text], int]  # (committed text, sampled draft) -> tokens to verify


@dataclass(frozen=True)
class Draft:
    """A drafter as a table: what it draws from, and what it says it drew from (None: one point)."""

    drawn_from: Conditional
    claimed: Callable[[Text], torch.Tensor | None]


def table(size: int, seed: int, holes: float = 0.0) -> Conditional:
    """Random conditionals, fixed by (seed, text); each token is -inf with probability `holes`."""

    @cache
    def conditional(text: Text) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(repr((seed, text)).encode()))
        scores = 1.5 * torch.randn(size, dtype=torch.float64, generator=generator)
        banned = torch.rand(size, generator=generator) < holes
        banned[int(torch.randint(size, (), generator=generator))] = False
        return scores.masked_fill(banned, -torch.inf).softmax(-1)

    return conditional


def restricted(conditional: Conditional, parity: int) -> Conditional:
    """The conditional on tokens of one parity only."""

    @cache
    def on_parity(text: Text) -> torch.Tensor:
        probs = conditional(text).clone()
        probs[1 - parity :: 2] = 0
        return probs / probs.sum()

    return on_parity


def one_point(token_of: Callable[[Text], int], size: int) -> Conditional:
    """All mass on the token a function of the text names."""
    eye = torch.eye(size, dtype=torch.float64)
    return lambda text: eye[token_of(text)]


def honest(conditional: Conditional) -> Draft:
    """A drafter that says what it draws from."""
    return Draft(conditional, conditional)


def argmax_of(conditional: Conditional) -> Callable[[Text], int]:
    """The most likely token of each text."""
    return lambda text: int(conditional(text).argmax())


def emitted_distribution(
    target: Conditional, draft: Draft, schedule: Schedule, size: int, num_draft: int
) -> dict[Text, float]:
    """The probability of every emitted text of HORIZON tokens."""

    @cache
    def keep_probability(text: Text, token: int) -> float:
        return float(acceptance_probability(target(text), token, draft.claimed(text)))

    @cache
    def residual(text: Text, token: int) -> list[float]:
        return residual_distribution(target(text), token, draft.claimed(text)).tolist()

    @cache
    def one_round(text: Text) -> dict[Text, float]:
        """Texts after one round, cut at the horizon, with their probabilities."""
        outcomes: dict[Text, float] = defaultdict(float)

        def emit(prefix: Text, probs: list[float], mass: float) -> None:
            for token, prob in enumerate(probs):
                longer = (*prefix, token)
                outcomes[longer] += mass * prob

        for block in itertools.product(range(size), repeat=num_draft):
            mass = 1.0
            for k, token in enumerate(block):
                mass *= float(draft.drawn_from(text + block[:k])[token])
            if mass == 0:
                continue
            prefix = text
            for token in block[: schedule(text, block)]:
                if len(prefix) == HORIZON:
                    break
                keep = keep_probability(prefix, token)
                if keep < 1:
                    emit(prefix, residual(prefix, token), mass * (1 - keep))
                mass *= keep
                prefix = (*prefix, token)
            if len(prefix) == HORIZON:
                outcomes[prefix] += mass
            else:
                emit(prefix, target(prefix).tolist(), mass)
        return outcomes

    texts: dict[Text, float] = {(): 1.0}
    for _ in range(HORIZON):  # every round emits at least one token
        following: dict[Text, float] = defaultdict(float)
        for text, mass in texts.items():
            if len(text) == HORIZON:
                following[text] += mass
                continue
            for longer, prob in one_round(text).items():
                following[longer] += mass * prob
        texts = following
    return texts


def deviation(
    target: Conditional, draft: Draft, schedule: Schedule, size: int, num_draft: int
) -> float:
    """Largest absolute error over all texts; NaN counts as infinite."""
    emitted = emitted_distribution(target, draft, schedule, size, num_draft)
    worst = 0.0
    for text in itertools.product(range(size), repeat=HORIZON):
        exact = 1.0
        for k, token in enumerate(text):
            exact *= float(target(text[:k])[token])
        error = abs(emitted.get(text, 0.0) - exact)
        worst = max(worst, error if error == error else float("inf"))
    assert set(map(len, emitted)) == {HORIZON}
    return worst


def fixed(length: int) -> Schedule:
    """Verify the first `length` tokens."""
    return lambda _text, block: min(length, len(block))


def until(stops_before: Callable[[Text], bool]) -> Schedule:
    """Verify token k while no text *before* a token up to k says stop: a confidence schedule."""

    def length(text: Text, block: Text) -> int:
        for k in range(len(block)):
            if stops_before(text + block[:k]):
                return k
        return len(block)

    return length


def doubtful(text: Text) -> bool:
    """A stand-in for a low confidence: an arbitrary, coin-like function of a text."""
    return zlib.crc32(repr(text).encode()) % 3 == 0
