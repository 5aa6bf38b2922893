"""Accept-or-resample emits exactly the target's distribution: all outcomes enumerated, none drawn.

Rounds of draft, schedule and verification are expanded from the empty text until three tokens are
emitted, in float64, and the probability of each text is compared with the target's product of
conditionals. Exact for any drafter, provided that (a) the distribution used in the test is the one
the draft was drawn from and (b) the choice to verify a token does not look at it; two tests break
(a) and (b) and must be caught.
"""

from __future__ import annotations

import itertools
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
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


def drafters(target: Conditional, size: int) -> dict[str, Draft]:
    """One drafter for each regime of the rule."""
    other = table(size, seed=7)
    sparse = table(size, seed=8, holes=0.5)
    best, worst = argmax_of(target), lambda text: int(target(text).argmin())
    return {
        "random": honest(other),
        "with holes": honest(sparse),
        "p equals q": honest(target),
        "p equals q on half of the texts": honest(lambda t: target(t) if doubtful(t) else other(t)),
        "same block anywhere": honest(lambda text: other((len(text),))),
        "one point, likely": Draft(one_point(best, size), lambda _text: None),
        "one point, unlikely": Draft(one_point(worst, size), lambda _text: None),
        "one point, written out": honest(one_point(best, size)),
    }


SIZES = [pytest.param(2, 3, id="V2-N3"), pytest.param(4, 2, id="V4-N2"), (6, 1), (3, 3)]
SCHEDULES = {f"fixed {length}": fixed(length) for length in range(4)} | {"prefix": until(doubtful)}
DRAFTERS = list(drafters(table(2, 0), 2))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(("size", "num_draft"), SIZES)
def test_emitted_text_follows_the_target(
    size: int, num_draft: int, drafter: str, schedule: str
) -> None:
    target = table(size, seed=1)
    draft = drafters(target, size)[drafter]
    assert deviation(target, draft, SCHEDULES[schedule], size, num_draft) < EXACT


def test_the_largest_case_is_exact() -> None:
    target = table(6, seed=2)
    assert deviation(target, honest(table(6, seed=3)), until(doubtful), 6, 3) < EXACT


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_target_with_forbidden_tokens_never_emits_them(drafter: str, schedule: str) -> None:
    target = table(4, seed=4, holes=0.5)
    draft = drafters(target, 4)[drafter]
    assert deviation(target, draft, SCHEDULES[schedule], 4, 2) < EXACT
    for text, prob in emitted_distribution(target, draft, SCHEDULES[schedule], 4, 2).items():
        allowed = all(float(target(text[:k])[token]) > 0 for k, token in enumerate(text))
        assert allowed or prob == 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_disjoint_supports_are_exact(schedule: str) -> None:
    target, draft = restricted(table(4, 5), 0), honest(restricted(table(4, 6), 1))
    assert deviation(target, draft, SCHEDULES[schedule], 4, 3) < EXACT


@pytest.mark.parametrize("claimed", ["one point", "written out"])
def test_zero_residual_mass_is_exact(claimed: str) -> None:
    certain = one_point(lambda text: len(text) % 3, 3)
    draft = Draft(certain, lambda _text: None) if claimed == "one point" else honest(certain)
    assert deviation(certain, draft, fixed(3), 3, 3) < EXACT
    assert residual_distribution(certain(()), 0, draft.claimed(())).tolist() == [1, 0, 0]


def test_peeking_at_a_deterministic_draft_is_fair() -> None:
    # Such a draft is a function of the text before it, so looking at it reveals nothing new.
    target = table(3, seed=1)
    draft = Draft(one_point(argmax_of(table(3, seed=7)), 3), lambda _text: None)
    assert deviation(target, draft, peeking, 3, 3) < EXACT


def peeking(_text: Text, block: Text) -> int:
    """Verify token k only if it is token 0 itself: unfair to any drafter that draws at random."""
    return next((k for k, token in enumerate(block) if token != 0), len(block))


def test_a_schedule_that_looks_at_the_token_it_schedules_is_caught() -> None:
    target = table(3, seed=1)
    assert deviation(target, honest(table(3, seed=7)), peeking, 3, 2) > BIASED


def dropping(_text: Text, block: Text) -> int:
    """Keep a draft up to the first token 1: a drafter that withdraws what it has drawn."""
    return block.index(1) if 1 in block else len(block)


def test_a_sampling_drafter_that_withdraws_its_own_draws_is_caught() -> None:
    target = table(3, seed=6)
    assert deviation(target, honest(table(3, seed=7)), dropping, 3, 2) > BIASED


def test_the_bias_of_a_peeking_schedule_is_the_published_one() -> None:
    # DSpark, arXiv:2607.05147, appendix A: (0.7, 0.3) becomes (0.85, 0.15).
    target = torch.tensor([0.7, 0.3], dtype=torch.float64)
    even = torch.tensor([0.5, 0.5], dtype=torch.float64)
    emitted = emitted_distribution(lambda _: target, honest(lambda _: even), peeking, 2, 1)
    first = sum(prob for text, prob in emitted.items() if text[0] == 0)
    assert first == pytest.approx(0.85, abs=EXACT)


def test_soft_probabilities_for_an_argmax_draft_are_caught() -> None:
    target, soft = table(4, seed=1), table(4, seed=7)
    picked = one_point(argmax_of(soft), 4)
    assert deviation(target, Draft(picked, soft), fixed(2), 4, 2) > BIASED
    assert deviation(target, Draft(picked, lambda _text: None), fixed(2), 4, 2) < EXACT


def test_a_draft_drawn_at_another_temperature_than_claimed_is_caught() -> None:
    target, claimed = table(4, seed=1), table(4, seed=7)

    def sharper(text: Text) -> torch.Tensor:
        return (claimed(text).log() / 0.5).softmax(-1)

    assert deviation(target, Draft(sharper, claimed), fixed(2), 4, 2) > BIASED
    assert deviation(target, honest(sharper), fixed(2), 4, 2) < EXACT
