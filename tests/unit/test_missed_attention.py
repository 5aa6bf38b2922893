"""The estimate of attention on pages that a step has not read, against attention itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark_hf.attention import crossover, sparse
from dspark_hf.attention.pages import PAGE, PageSummaries
from dspark_hf.attention.policy import SparsePolicy
from dspark_hf.attention.predictors import page_weights
from dspark_hf.attention.sparse import SparseRow, SparseStats, best_pages, missing_mass


def true_share(masses: torch.Tensor, read: torch.Tensor) -> float:
    is_read = torch.zeros(masses.shape[0] * masses.shape[2], dtype=torch.bool)
    is_read[read] = True
    unread = masses.masked_fill(is_read.view(masses.shape[0], 1, -1), float("-inf"))
    return float((unread.logsumexp(-1) - masses.logsumexp(-1)).exp().mean())


@pytest.mark.parametrize("count", [12, 40, 100])
def test_missed_attention_is_exact_where_scores_are_off_by_a_constant(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    masses = torch.randn(2, 3, 60, generator=generator) * 3
    scores = masses + torch.randn(2, 3, 1, generator=generator) * 4
    read = best_pages(page_weights(scores), count, 1, 4)
    seen = masses.clone().view(2, 3, 60)
    unread = torch.ones(120, dtype=torch.bool)
    unread[read] = False
    seen.masked_fill_(unread.view(2, 1, 60), float("-inf"))
    like = torch.zeros(120, dtype=torch.bool)
    like[read[3 * count // 4 :]] = True
    expected = true_share(masses, read)
    if like.view(2, 60).any(dim=1).all():
        assert missing_mass(scores, seen, read) == pytest.approx(expected, rel=1e-4)
    else:
        assert 0 < missing_mass(scores, seen, read) < 1


def test_a_head_without_pages_to_compare_takes_the_others_error() -> None:
    masses = torch.tensor([[[9.0, 3.0, 2.0, 1.0]], [[9.0, 0.0, 0.0, 0.0]]])
    read = torch.tensor([0, 4, 1, 2])
    seen = masses.clone()
    seen[0, :, 3] = float("-inf")
    seen[1, :, 1:] = float("-inf")
    assert missing_mass(masses - 2, seen, read) == pytest.approx(true_share(masses, read))


def test_nothing_to_compare_means_that_everything_may_be_missing() -> None:
    scores = torch.zeros(1, 1, 4)
    seen = torch.full((1, 1, 4), float("-inf"))
    assert missing_mass(scores, seen, torch.tensor([0])) == 1.0


@pytest.mark.parametrize("new_tokens", [1, 5])
def test_the_masses_of_read_pages_are_those_of_the_first_new_token(
    new_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[torch.Tensor, ...]] = []

    def spy(scores: torch.Tensor, masses: torch.Tensor, read: torch.Tensor) -> float:
        calls.append((scores, masses.clone(), read))
        return missing_mass(scores, masses, read)

    monkeypatch.setattr(sparse, "missing_mass", spy)
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 2, 40 * PAGE, 8, generator=generator)
    query = torch.randn(6, new_tokens, 8, generator=generator)
    past = 30 * PAGE + 3
    policy = SparsePolicy(tokens=10 * PAGE, mass=0.999)
    sparse.attend_pages(
        query, keys, keys, PageSummaries(), SparseRow(policy, SparseStats(), 0),
        slot=0, past=past, layer=0, scale=0.5,
    )  # fmt: skip
    logits = torch.einsum("hrd,hnd->hrn", query[:, 0].view(2, 3, 8), keys[0]) * 0.5
    logits[:, :, past + 1 :] = float("-inf")
    expected = logits.unflatten(2, (-1, PAGE)).logsumexp(dim=-1)[:, :, :31]
    assert len(calls) > 1
    for _, masses, read in calls:
        is_read = torch.zeros(2 * 31, dtype=torch.bool)
        is_read[read] = True
        wanted = expected.masked_fill(~is_read.view(2, 1, 31), float("-inf"))
        torch.testing.assert_close(masses, wanted, atol=1e-4, rtol=1e-4)


def test_steps_that_miss_little_read_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: dict[float, Any] = {}
    for missed in (0.01, 0.5):
        monkeypatch.setattr(sparse, "missing_mass", lambda *_, missed=missed: missed)
        keys = torch.randn(1, 2, 40 * PAGE, 8, generator=torch.Generator().manual_seed(1))
        row = SparseRow(SparsePolicy(tokens=6 * PAGE, mass=0.98), SparseStats(), 0)
        sparse.attend_pages(
            torch.ones(6, 1, 8), keys, keys, PageSummaries(), row,
            slot=0, past=40 * PAGE - 1, layer=0, scale=0.5,
        )  # fmt: skip
        reads[missed] = (row.stats.extensions, row.stats.mean_pages)
    assert reads == {0.01: (0, 6), 0.5: (3, 24)}


def test_the_crossover_of_a_policy_by_mass_is_that_of_reading_the_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows: list[SparseRow] = []
    attend = crossover.attend_pages

    def spy(*args: Any, **kwargs: Any) -> torch.Tensor:
        rows.append(args[4])
        return attend(*args, **kwargs)

    monkeypatch.setattr(crossover, "attend_pages", spy)
    monkeypatch.setattr(crossover, "LENGTHS", (1024,))
    monkeypatch.setattr(crossover, "REPEATS", 1)
    policy = SparsePolicy(tokens=6 * PAGE, mass=0.5)
    crossover.measure_crossover(
        policy, num_heads=4, num_kv=2, dim=8, dtype=torch.float32, device=torch.device("cpu")
    )
    assert rows
    assert {row.stats.mean_pages for row in rows} == {policy.ceiling // PAGE}
