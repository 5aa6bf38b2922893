"""Sparse steps of a FlatTarget: rows of any length, step width and history.

Regimes: every page edge; steps of 1 to 16 tokens; prompts in chunks; rollback into every place of a
page; forwards that fail; rows that leave, grow and reuse slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import tiny
from dspark_hf.attention.pages import PAGE, PageSummaries
from dspark_hf.attention.policy import StepSignals
from dspark_hf.attention.sparse import SparseRow, SparseStats
from dspark_hf.targets.flat import FlatTarget
from dspark_hf.values import Feed
from sparse_rows import ALL, EXACT, LEAST, ROUNDING, error, feed, sparse_target


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny.llama(max_position_embeddings=512)


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 80])
@pytest.mark.parametrize("mass", [None, 1.0])
def test_all_pages_kept_equal_dense_steps_at_every_page_edge_and_width(
    llama: Any, length: int, mass: float | None
) -> None:
    ids = tiny.prompt(length + 16, seed=length)
    dense = FlatTarget(llama, 32)
    sparse, stats = sparse_target(llama, ALL.replace(mass=mass))
    for target in (dense, sparse):
        feed(target, ids[:length], keep=1)
    for width in range(1, 17):
        found = [feed(target, ids[length : length + width]) for target in (dense, sparse)]
        assert error(found[1], found[0]) < EXACT
        for target in (dense, sparse):
            target.rollback(0, length)
    assert stats.share == 1
    assert stats.calls == 16 * 3


def test_a_prompt_is_read_densely_however_it_is_cut(llama: Any) -> None:
    ids = tiny.prompt(120)
    plain = feed(FlatTarget(llama, 32), ids, keep=1)
    for cuts in ([3, 5, 112], [40, 40, 39, 1], [64, 56]):
        target, stats = sparse_target(llama, LEAST)
        begin = 0
        for count in cuts:
            last = feed(target, ids[begin : begin + count], keep=1)
            begin += count
        assert stats.calls == 0
        assert error(last, plain) < EXACT


def masked_logits(model: Any, ids: Sequence[int], prompt: int) -> torch.Tensor:
    """Return plain logits where tokens behind the prompt see page 0 and the newest two pages."""
    q, k = torch.arange(len(ids))[:, None], torch.arange(len(ids))[None]
    near = (k // PAGE == 0) | (k // PAGE > q // PAGE - 2) | (q < prompt)
    with torch.no_grad():
        mask = ((k <= q) & near)[None, None]
        return model(input_ids=torch.tensor([list(ids)]), attention_mask=mask).logits[0]


def test_forty_steps_with_rejections_equal_plain_attention_under_a_mask(llama: Any) -> None:
    ids, start = tiny.prompt(141, seed=4), 101
    wanted = masked_logits(llama, ids, start)
    target, _ = sparse_target(llama, LEAST)
    feed(target, ids[:start], keep=1)
    found = []
    for i in range(start, 141):
        found.append(feed(target, ids[i : i + 1]))
        feed(target, tiny.prompt(3, seed=i))
        target.rollback(0, i + 1)
    assert error(torch.cat(found), wanted[start:]) < EXACT
    with torch.no_grad():
        dense = llama(input_ids=torch.tensor([ids])).logits[0]
    assert error(wanted[start:], dense[start:]) > 0.05


@pytest.mark.parametrize("length", range(96, 113))
def test_a_rollback_to_any_place_of_a_page_leaves_the_summaries_of_a_rebuild(
    llama: Any, length: int
) -> None:
    ids = tiny.prompt(130, seed=6)
    target, _ = sparse_target(llama, ALL)
    feed(target, ids[:80], keep=1)
    for i in range(80, 128, 8):
        feed(target, ids[i : i + 8])
    target.rollback(0, length)
    feed(target, ids[length : length + 1])
    for layer in target.cache._own_layers():
        kept = layer.summaries.refresh(layer.keys, 0, length + 1)
        assert torch.equal(kept, PageSummaries().refresh(layer.keys, 0, length + 1))


def test_summaries_follow_a_row_rolled_back_and_refed_while_it_was_read_densely(
    llama: Any,
) -> None:
    ids, row = tiny.prompt(120, seed=8), SparseRow(ALL, SparseStats(), 0)
    target = FlatTarget(llama, 32)
    feed(target, ids[:90], keep=1)
    target.read_sparsely(0, row)
    feed(target, ids[90:100])
    target.read_sparsely(0, None)
    target.rollback(0, 70)
    feed(target, ids[20:60])
    target.read_sparsely(0, row)
    feed(target, ids[:1])
    for layer in target.cache._own_layers():
        assert layer.summaries.values is not None
        rebuilt = PageSummaries().refresh(layer.keys, 0, 111)
        assert torch.equal(layer.summaries.values[0, :, :7], rebuilt)


def test_a_failed_forward_does_not_leave_its_summaries(llama: Any) -> None:
    ids = tiny.prompt(120, seed=9)
    target, _ = sparse_target(llama, LEAST)
    feed(target, ids[:78], keep=1)

    def fail(*_: object) -> None:
        raise RuntimeError("for the test")

    hook = llama.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="for the test"):
        feed(target, ids[:8])
    hook.remove()
    other, _ = sparse_target(llama, LEAST)
    feed(other, ids[:78], keep=1)
    assert torch.equal(feed(target, ids[78:90]), feed(other, ids[78:90]))


@pytest.mark.parametrize("leaving", [0, 1, 2])
def test_rows_that_leave_grow_and_reuse_slots_change_no_other_row(llama: Any, leaving: int) -> None:
    texts = {row: tiny.prompt(130, seed=row) for row in range(4)}
    alone = {}
    for row, ids in texts.items():
        target, _ = sparse_target(llama, LEAST)
        feed(target, ids[:100], keep=1)
        alone[row] = torch.cat([feed(target, ids[i : i + 1]) for i in range(100, 130)])
    target, _ = sparse_target(llama, LEAST)
    live = [0, 1, 2]
    for row in live:
        feed(target, texts[row][:100], row, keep=1)
    for i in range(100, 130):
        if i == 110:
            target.free(leaving)
            live.remove(leaving)
        if i == 115:
            feed(target, texts[3][:100], 3, keep=1)
            feed(target, texts[3][100:115], 3)
            live.append(3)
        with torch.no_grad():
            logits = target.forward([Feed(row, texts[row][i : i + 1], 1) for row in live])
        for row, found in zip(live, logits, strict=True):
            if row != 3:
                assert error(found, alone[row][i - 100 : i - 99]) < ROUNDING
    reused, _ = sparse_target(llama, LEAST)
    feed(reused, texts[3][:100], keep=1)
    feed(reused, texts[3][100:115])
    for i in range(115, 130):
        last = feed(reused, texts[3][i : i + 1])
    assert error(logits[live.index(3)], last) < ROUNDING


def test_a_dense_row_may_move_into_the_slot_of_a_sparse_one(llama: Any) -> None:
    target = FlatTarget(llama, 32)
    feed(target, tiny.prompt(100), 0, keep=1)
    target.read_sparsely(0, SparseRow(LEAST, SparseStats(), 0))
    feed(target, [5], 0)
    feed(target, tiny.prompt(40, seed=1), 1, keep=1)
    target.free(0)
    dense = FlatTarget(llama, 32)
    feed(dense, tiny.prompt(40, seed=1), keep=1)
    assert torch.equal(feed(target, [7], 1), feed(dense, [7]))


def test_a_later_token_moves_nothing_earlier(llama: Any) -> None:
    ids, policy = tiny.prompt(308, seed=11), LEAST.replace(tokens=96, mass=0.9)
    for first in range(292, 301):
        found = []
        for last in (ids[-1], *range(20, 30)):
            target, stats = sparse_target(llama, policy)
            feed(target, ids[:first], keep=1)
            found.append(feed(target, [*ids[first : first + 7], last]))
        assert 0 < stats.share < 1
        for other in found[1:]:
            assert torch.equal(found[0][:7], other[:7])
            assert not torch.equal(found[0][7], other[7])


@pytest.mark.parametrize("first", range(292, 301))
def test_the_first_token_of_a_block_reads_what_it_would_alone(llama: Any, first: int) -> None:
    ids, policy = tiny.prompt(320, seed=12), LEAST.replace(tokens=96)
    found = []
    for width in (1, 8, 16):
        target, _ = sparse_target(llama, policy)
        feed(target, ids[:first], keep=1)
        found.append(feed(target, ids[first : first + width])[0])
    assert max(error(other, found[0]) for other in found[1:]) < ROUNDING


def test_rows_shorter_than_min_context_are_bit_equal_to_dense(llama: Any) -> None:
    ids = tiny.prompt(120)
    target, stats = sparse_target(llama, LEAST.replace(min_context=110))
    dense = FlatTarget(llama, 32)
    for each in (target, dense):
        feed(each, ids[:100], keep=1)
    for i in range(100, 109):
        assert torch.equal(feed(target, ids[i : i + 1]), feed(dense, ids[i : i + 1]))
    assert stats.calls == 0
    feed(target, ids[109:110])
    assert stats.calls == 3


def test_dense_layers_and_layers_of_other_kinds_are_not_read_by_pages(llama: Any) -> None:
    for model, policy, calls in (
        (llama, LEAST.replace(dense_layers=frozenset({0, 2})), 1),
        (tiny.gemma3(), LEAST, 1),
        (tiny.gemma2(), LEAST, 0),
        (tiny.mistral(), LEAST, 0),
        (tiny.gpt_oss(), LEAST, 0),
    ):
        target, stats = sparse_target(model, policy)
        dense = FlatTarget(model, 32)
        for each in (target, dense):
            feed(each, tiny.prompt(100), keep=1)
        found = [feed(each, [3]) for each in (target, dense)]
        assert stats.calls == calls
        assert (error(*found) < EXACT) == (calls == 0)


@dataclass(frozen=True)
class Watching:
    """A budget that notes what it is told."""

    seen: list[StepSignals]
    needs_entropy: bool = True

    def factor(self, layer: int, signals: StepSignals) -> float:
        if layer == 0:
            self.seen.append(signals)
        return 1.0


def test_budgets_are_told_the_newest_token_its_entropy_and_rejections(llama: Any) -> None:
    budget = Watching([])
    target, _ = sparse_target(llama, LEAST.replace(budget=budget))
    feed(target, tiny.prompt(100), keep=1)
    logits = feed(target, [5, 6, 7])
    target.rollback(0, 102)
    feed(target, [9])
    feed(target, [10])
    first, second, third = budget.seen
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    assert (first.token, first.steps, first.was_rejected) == (5, 0, False)
    assert (second.token, second.steps, second.was_rejected) == (9, 1, True)
    assert second.entropy == pytest.approx(float(entropies[1]), abs=1e-4)
    assert (third.token, third.steps, third.was_rejected) == (10, 2, False)
