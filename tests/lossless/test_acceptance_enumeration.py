"""Accept-or-resample emits exactly the target's distribution: all outcomes enumerated, none drawn.

Rounds of draft, schedule and verification are expanded from the empty text until three tokens are
emitted, in float64, and the probability of each text is compared with the target's product of
conditionals. Exact for any drafter, provided that (a) the distribution used in the test is the one
the draft was drawn from and (b) the choice to verify a token does not look at it; two tests break
(a) and (b) and must be caught.
"""

from __future__ import annotations

import pytest
import torch

from dspark_hf.verification.acceptance import residual_distribution
from enumeration import (
    BIASED,
    EXACT,
    Conditional,
    Draft,
    Text,
    argmax_of,
    deviation,
    doubtful,
    emitted_distribution,
    fixed,
    honest,
    one_point,
    restricted,
    table,
    until,
)


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
