"""Products over all heads at once against those head by head."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark_hf.attention import predictors, sparse
from dspark_hf.attention.pages import PAGE, PageSummaries
from dspark_hf.attention.policy import SparsePolicy
from dspark_hf.attention.predictors import page_products
from dspark_hf.attention.sparse import SparseRow, SparseStats


def attended(
    policy: SparsePolicy, new_tokens: int, past: int, dtype: torch.dtype
) -> tuple[torch.Tensor, SparseStats]:
    generator = torch.Generator().manual_seed(past)
    keys = torch.randn(2, 3, 50 * PAGE, 8, generator=generator).to(dtype)
    values = torch.randn(2, 3, 50 * PAGE, 4, generator=generator).to(dtype)
    query = torch.randn(6, new_tokens, 8, generator=generator).to(dtype)
    stats = SparseStats()
    out = sparse.attend_pages(
        query, keys, values, PageSummaries(), SparseRow(policy, stats, 0),
        slot=1, past=past, layer=0, scale=0.8,
    )  # fmt: skip
    return out.float(), stats


@pytest.mark.parametrize("new_tokens", [1, 5, 17])
@pytest.mark.parametrize("past", [0, 15, 16, 31 * PAGE, 31 * PAGE + 9, 45 * PAGE + 14])
@pytest.mark.parametrize("mass", [None, 0.6])
def test_heads_joined_attend_as_head_by_head(
    new_tokens: int, past: int, mass: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = SparsePolicy(tokens=8 * PAGE, mass=mass)
    found: list[Any] = []
    for most in (1e12, 0):
        monkeypatch.setattr(sparse, "MOST_PADDING", most)
        found.append(attended(policy, new_tokens, past, torch.float32))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-6, rtol=1e-5)
    assert found[0][1] == found[1][1]


def test_sixteen_bits_agree_to_their_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for most in (1e12, 0):
        monkeypatch.setattr(sparse, "MOST_PADDING", most)
        found.append(attended(SparsePolicy(tokens=8 * PAGE), 1, 700, torch.bfloat16)[0])
    torch.testing.assert_close(found[0], found[1], atol=2e-2, rtol=2e-2)


def test_a_head_that_reads_nothing_in_a_part_adds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = torch.randn(1, 2, 8 * PAGE, 8, generator=torch.Generator().manual_seed(0))
    query = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    reader = sparse._Reader(query, keys, keys, 0, 8 * PAGE - 1, 1, 0.5, None)
    chosen = torch.tensor([0, 3, 7])
    outs = []
    for most in (1e12, 0):
        monkeypatch.setattr(sparse, "MOST_PADDING", most)
        outs.append(reader.read(chosen, 8))
    for out, total in outs:
        assert not out[1].any()
        assert (total[1] == float("-inf")).all()
    torch.testing.assert_close(outs[0][0], outs[1][0])
    torch.testing.assert_close(outs[0][1][0], outs[1][1][0])


@pytest.mark.parametrize("room", [0, 7])
@pytest.mark.parametrize("slot", [0, 1])
def test_scores_of_joined_heads_are_those_of_each(
    room: int, slot: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    buffer = torch.randn(2, 3, 20 + room, 16, generator=generator)
    buffer[:, :, 20:] = float("nan")
    summary, weights = buffer[slot, :, :20], torch.randn(3, 4, 16, generator=generator)
    joined = page_products(weights, summary)
    monkeypatch.setattr(predictors, "MAX_JOINED", 0)
    torch.testing.assert_close(joined, page_products(weights, summary), atol=1e-5, rtol=1e-5)
    other = summary.transpose(1, 2).contiguous().transpose(1, 2)
    monkeypatch.setattr(predictors, "MAX_JOINED", 1e12)
    torch.testing.assert_close(joined, page_products(weights, other), atol=1e-5, rtol=1e-5)
