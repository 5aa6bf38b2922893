"""The acceptance rules as objects: decisions, errors, and draws against the exact formulas."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from dspark_hf.errors import CheckpointError, ConfigError, InputError, ShapeError
from dspark_hf.verification.acceptance import (
    AcceptanceRule,
    Coupled,
    Decision,
    Greedy,
    Rejection,
    acceptance_probability,
    gumbel_noise,
    residual_distribution,
)

LEAST_P = (
    1e-4  # a right rule fails one chi-square test in 10,000; seeds are fixed, so never by luck
)
NUM_DRAWS = 5000
SCORES = torch.tensor([1.2, -0.4, 0.3, -torch.inf, 0.9])
DRAFT_SCORES = torch.tensor([0.2, 0.8, -1.0, 0.5, 0.4])
RECORDED = [-0.14801852811660707, -0.6096014756588101, 1.4367097085970424]
RULES = [
    pytest.param(Greedy, id="greedy"),
    pytest.param(lambda: Rejection(torch.Generator().manual_seed(0)), id="rejection"),
    pytest.param(lambda: Coupled(0), id="coupled"),
]


def chi_square_p(counts: Counter[int], probs: torch.Tensor) -> float:
    """The p-value of counts under probs (V,); impossible tokens must not occur at all."""
    total = sum(counts.values())
    statistic, cells = 0.0, 0
    for token, prob in enumerate(probs.double().tolist()):
        if prob == 0:
            assert counts[token] == 0
            continue
        statistic += (counts[token] - total * prob) ** 2 / (total * prob)
        cells += 1
    if cells == 1:
        return 1.0
    half = torch.tensor([(cells - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def test_the_chi_square_p_value_is_the_tabulated_one() -> None:
    # Two cells, 60 against 40: statistic 4 with one degree of freedom.
    assert chi_square_p(Counter({0: 60, 1: 40}), torch.tensor([0.5, 0.5])) == pytest.approx(
        0.0455, abs=1e-4
    )


def test_greedy_accepts_exactly_the_argmax() -> None:
    decided = [Greedy().decide(SCORES, draft, None, 0) for draft in range(5)]
    assert decided == [Decision(0, draft == 0) for draft in range(5)]


@pytest.mark.parametrize("make", RULES)
def test_a_bonus_token_is_never_accepted(make: Callable[[], AcceptanceRule]) -> None:
    assert not any(make().decide(SCORES, None, None, position).accepted for position in range(20))


def test_acceptance_probability_is_the_ratio_capped_at_one() -> None:
    p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    chances = [float(acceptance_probability(p, token, q)) for token in range(3)]
    assert chances == pytest.approx([1, 1, 0.25])
    assert [float(acceptance_probability(p, t, None)) for t in range(3)] == pytest.approx(
        p.tolist()
    )


def test_residual_is_the_normalised_positive_part() -> None:
    p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.1, 0.7])
    assert residual_distribution(p, 2, q).tolist() == pytest.approx([2 / 3, 1 / 3, 0])
    assert residual_distribution(p, 0, None).tolist() == pytest.approx([0, 0.75, 0.25])
    assert p.tolist() == pytest.approx([0.6, 0.3, 0.1])


def test_residual_without_mass_is_the_target_itself() -> None:
    p = torch.tensor([0.25, 0.75])
    assert torch.equal(residual_distribution(p, 0, p.clone()), p)
    certain = torch.tensor([0.0, 1.0])
    assert torch.equal(residual_distribution(certain, 1, None), certain)


@pytest.mark.parametrize("temperature", [0.7, 1.5])
@pytest.mark.parametrize("draft", [0, 1, 3, None])
def test_rejection_decides_as_the_formulas_say(draft: int | None, temperature: float) -> None:
    scores = SCORES / temperature
    p, q = scores.softmax(-1), (DRAFT_SCORES / temperature).softmax(-1)
    rule = Rejection(torch.Generator().manual_seed(11))
    decided = [rule.decide(scores, draft, q, k) for k in range(NUM_DRAWS)]
    if draft is None:
        expected = p
    else:
        keep = acceptance_probability(p, draft, q)
        expected = (1 - keep) * residual_distribution(p, draft, q)
        expected[draft] += keep
        assert all(d.accepted == (d.token == draft) for d in decided)
    assert chi_square_p(Counter(d.token for d in decided), expected) > LEAST_P


@pytest.mark.parametrize("kind", ["model", "one point"])
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_rejection_over_sampled_drafts_follows_the_target(temperature: float, kind: str) -> None:
    scores = SCORES / temperature
    q = (DRAFT_SCORES / temperature).softmax(-1)
    rule = Rejection(torch.Generator().manual_seed(5))
    if kind == "model":
        drafts = q.multinomial(NUM_DRAWS, True, generator=torch.Generator().manual_seed(6)).tolist()
    else:
        drafts = [1] * NUM_DRAWS
    claimed = q if kind == "model" else None
    tokens = Counter(rule.decide(scores, draft, claimed, 0).token for draft in drafts)
    assert chi_square_p(tokens, scores.softmax(-1)) > LEAST_P


def test_rejection_always_accepts_a_draft_from_the_target_itself() -> None:
    rule, p = Rejection(torch.Generator().manual_seed(0)), SCORES.softmax(-1)
    assert all(rule.decide(SCORES, draft, p, 0).accepted for draft in [0, 1, 2, 4] * 50)


def test_rejection_never_accepts_a_forbidden_draft() -> None:
    rule = Rejection(torch.Generator().manual_seed(0))
    decided = [rule.decide(SCORES, 3, None, 0) for _ in range(200)]
    assert not any(d.accepted or d.token == 3 for d in decided)


def test_rejection_survives_a_target_that_is_almost_one_point() -> None:
    scores = torch.tensor([0.0, 200.0, 0.0])  # the softmax underflows to (0, 1, 0)
    rule = Rejection(torch.Generator().manual_seed(0))
    assert rule.decide(scores, 1, None, 0) == Decision(1, True)
    assert rule.decide(scores, 0, None, 0) == Decision(1, False)


def test_rejection_repeats_itself_from_the_same_generator_state() -> None:
    first, second = (
        [Rejection(generator).decide(SCORES, 1, None, k) for k in range(50)]
        for generator in (torch.Generator().manual_seed(3), torch.Generator().manual_seed(3))
    )
    assert first == second


def test_half_precision_draft_probabilities_count_as_the_draw_normalises_them() -> None:
    q = torch.tensor([0.30, 0.30, 0.60], dtype=torch.bfloat16)  # draws (1/4, 1/4, 1/2)
    scores = torch.tensor([0.25, 0.25, 0.5]).log()
    rule = Rejection(torch.Generator().manual_seed(0))
    assert all(rule.decide(scores, draft, q, 0).accepted for draft in [0, 1, 2] * 200)


def emitted(rule: AcceptanceRule, drafter: str, length: int, total: int = 40) -> list[int]:
    """Tokens of a row decoded in rounds; the target's scores are a function of the last token."""
    weights = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    ids = [0]
    while len(ids) < total:
        block: list[int] = []
        for k in range(length):
            last = (ids + block)[-1]
            block.append({"target": int(weights[last].argmax()), "constant": 5, "ramp": k}[drafter])
        for draft in [*block, None]:
            probs = torch.full((8,), 0.125) if draft is not None else None
            decision = rule.decide(weights[ids[-1]], draft, probs, len(ids))
            ids.append(decision.token)
            if not decision.accepted:
                break
    return ids[:total]


def test_coupled_text_is_the_same_for_every_drafter_and_length() -> None:
    texts = {
        tuple(emitted(Coupled(9), drafter, length))
        for drafter in ("target", "constant", "ramp")
        for length in (0, 1, 3, 7)
    }
    assert len(texts) == 1
    assert len(set(next(iter(texts)))) > 3
    assert tuple(emitted(Coupled(10), "ramp", 3)) not in texts


@pytest.mark.parametrize("vary", ["key", "position"])
def test_coupled_frequencies_over_keys_or_positions_are_the_softmax(vary: str) -> None:
    tokens = Counter(
        Coupled(k if vary == "key" else 1)
        .decide(SCORES, None, None, k if vary == "position" else 1)
        .token
        for k in range(NUM_DRAWS)
    )
    assert chi_square_p(tokens, SCORES.softmax(-1)) > LEAST_P


def test_coupled_pairs_of_neighbouring_positions_are_independent() -> None:
    pairs = Counter(
        5 * Coupled(key).decide(SCORES, None, None, 6).token
        + Coupled(key).decide(SCORES, None, None, 7).token
        for key in range(NUM_DRAWS)
    )
    p = SCORES.softmax(-1)
    assert chi_square_p(pairs, torch.outer(p, p).flatten()) > LEAST_P


def test_coupled_accepts_exactly_its_own_draw() -> None:
    token = Coupled(4).decide(SCORES, None, None, 17).token
    decided = [Coupled(4).decide(SCORES, draft, None, 17) for draft in range(5)]
    assert decided == [Decision(token, draft == token) for draft in range(5)]


def test_coupled_does_not_depend_on_a_shift_or_dtype_of_the_scores() -> None:
    tokens = [Coupled(2).decide(SCORES, None, None, k).token for k in range(50)]
    assert tokens == [
        Coupled(2).decide(SCORES.double() + 40, None, None, k).token for k in range(50)
    ]


def test_noise_is_finite_has_the_gumbel_moments_and_ignores_global_seeds() -> None:
    noise = gumbel_noise(3, 4, 200_000)
    assert noise.isfinite().all()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.03)
    torch.manual_seed(99)
    assert torch.equal(noise, gumbel_noise(3, 4, 200_000))
    assert torch.equal(noise[:10], gumbel_noise(3, 4, 10))


def test_noise_uses_every_bit_of_key_and_position() -> None:
    numbers = [0, 1, 2, 1 << 32, (1 << 63) - 1, -2]
    first = {float(gumbel_noise(key, position, 1)[0]) for key in numbers for position in numbers}
    assert len(first) == len(numbers) ** 2


def test_noise_is_the_recorded_one() -> None:
    # Saved texts stay reproducible across versions and machines only while these values stand.
    assert gumbel_noise(7, 11, 3).tolist() == pytest.approx(RECORDED, rel=1e-12)


@pytest.mark.parametrize("make", RULES)
@pytest.mark.parametrize("draft", [-1, 5])
def test_a_draft_outside_the_vocabulary_is_refused(
    make: Callable[[], AcceptanceRule], draft: int
) -> None:
    with pytest.raises(CheckpointError, match=rf"0 to 4; got {draft}\. Use"):
        make().decide(SCORES, draft, None, 0)


@pytest.mark.parametrize("make", RULES)
def test_tensors_of_other_shapes_are_refused(make: Callable[[], AcceptanceRule]) -> None:
    with pytest.raises(ShapeError, match=r"scores must have shape \(V,\).*got \(1, 5\)"):
        make().decide(SCORES[None], 0, None, 0)
    with pytest.raises(ShapeError, match=r"draft_probs must have.*got \(4,\)"):
        make().decide(SCORES, 0, torch.full((4,), 0.25), 0)


@pytest.mark.parametrize("make", RULES[1:])
@pytest.mark.parametrize("bad", [-torch.inf, torch.nan, torch.inf])
@pytest.mark.parametrize("draft", [None, 0])
def test_scores_without_a_token_to_draw_are_refused(
    make: Callable[[], AcceptanceRule], bad: float, draft: int | None
) -> None:
    with pytest.raises(InputError, match="at least one finite value"):
        make().decide(torch.full((5,), bad), draft, None, 0)


def test_probabilities_that_cannot_have_produced_the_draft_are_refused() -> None:
    with pytest.raises(CheckpointError, match="drawn from; got no probability for token 1"):
        Rejection(torch.Generator()).decide(SCORES, 1, torch.tensor([1.0, 0, 0, 0, 0]), 0)


def test_a_generator_off_the_cpu_is_refused() -> None:
    elsewhere = cast(torch.Generator, SimpleNamespace(device=torch.device("cuda:1")))
    with pytest.raises(ConfigError, match="generator must be a CPU generator; got one on cuda:1"):
        Rejection(elsewhere)
