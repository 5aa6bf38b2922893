"""Prompts of a FlatTarget read in blocks: neither chunks nor neighbours nor later tokens matter.

Regimes: prompts that end around a block's edge, cut anywhere; rows that leave between chunks;
forwards that fail; tokens of other kinds before a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

import tiny
from dspark_hf.attention.pages import PAGE, PageSummaries
from dspark_hf.attention.policy import SparsePrefill
from dspark_hf.targets.flat import FlatTarget
from dspark_hf.values import Feed
from sparse_rows import EXACT, LEAST, ROUNDING, SOME, error, sparse_target, wholly

FEW = LEAST.replace(prefill=SparsePrefill(tokens=48, min_context=0))
"""Blocks read the first page, the two pages before them, and themselves."""


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny.llama(max_position_embeddings=1024)


@torch.no_grad()
def read(target: FlatTarget, ids: Sequence[int], cuts: Sequence[int] = (), row: int = 0) -> Any:
    """Feed a prompt, cut at some places; the logits of all its tokens."""
    parts = []
    for begin, end in pairwise([0, *cuts, len(ids)]):
        fed = ids[begin:end]
        parts.append(target.forward([Feed(row, fed, len(fed), is_prompt=True)])[0])
    return torch.cat(parts)


@torch.no_grad()
def step(target: FlatTarget, ids: Sequence[int]) -> torch.Tensor:
    return target.forward([Feed(0, list(ids), len(ids))])[0]


def test_statistics_add_up_apart_from_those_of_steps(llama: Any) -> None:
    target, stats = sparse_target(llama, SOME)
    ids = tiny.prompt(300)
    read(target, ids[:290])
    assert (stats.calls, stats.pages_read) == (0, 0)
    # Four blocks behind the first, three layers, two key heads; the last block has three pages.
    assert stats.prefill_calls == 3 * 4
    assert stats.prefill.pages_read == 3 * 2 * ((4 + 4) + 2 * (6 + 4) + (6 + 3))
    assert stats.prefill.pages_held == 3 * 2 * (8 + 12 + 16 + 19)
    step(target, ids[290:])
    assert (stats.calls, stats.prefill_calls) == (3, 12)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 200, 331])
@pytest.mark.parametrize("block", [64, 128])
def test_all_pages_kept_equal_dense_prompts_whole_and_in_chunks(
    llama: Any, length: int, block: int
) -> None:
    ids = tiny.prompt(length + 5, seed=length)
    dense = FlatTarget(llama, 32)
    wanted = torch.cat([read(dense, ids[:length]), step(dense, ids[length:])])
    for cuts in ((), (3, 8), (64,), (100, 101, 128)):
        target, stats = sparse_target(llama, wholly(block))
        cuts = [cut for cut in cuts if cut < length]
        found = torch.cat([read(target, ids[:length], cuts), step(target, ids[length:])])
        assert error(found, wanted) < EXACT
        assert stats.prefill.share == (length > block)


def masked_logits(model: Any, ids: Sequence[int], block: int) -> torch.Tensor:
    """Return plain logits where tokens see page 0, the two pages before their block, and it."""
    q, k = torch.arange(len(ids))[:, None], torch.arange(len(ids))[None]
    near = (k // PAGE == 0) | (k >= q // block * block - 2 * PAGE)
    with torch.no_grad():
        mask = ((k <= q) & near)[None, None]
        return model(input_ids=torch.tensor([list(ids)]), attention_mask=mask).logits[0]


@pytest.mark.parametrize("block", [64, 128])
def test_prompts_equal_plain_attention_under_a_mask(llama: Any, block: int) -> None:
    ids = tiny.prompt(400, seed=4)
    policy = LEAST.replace(prefill=SparsePrefill(tokens=48, block=block, min_context=0))
    wanted = masked_logits(llama, ids, block)
    for cuts in ((), (150, 151, 333)):
        assert error(read(sparse_target(llama, policy)[0], ids, cuts), wanted) < EXACT
    with torch.no_grad():
        dense = llama(input_ids=torch.tensor([ids])).logits[0]
    assert error(wanted[:block], dense[:block]) < EXACT
    assert error(wanted[block + 50 :], dense[block + 50 :]) > 0.1


@pytest.mark.parametrize(
    "cuts",
    [(64,), (3, 8), (200, 201, 202), (127, 128, 129), range(1, 300, 13), range(1, 300)],
    ids=str,
)
@pytest.mark.parametrize("block", [64, 128])
def test_a_prompt_cut_anywhere_reads_what_the_whole_one_reads(
    llama: Any, cuts: Sequence[int], block: int
) -> None:
    ids = tiny.prompt(300, seed=5)
    settings = SparsePrefill(tokens=96, mass=0.5, block=block, min_context=100)
    policy = LEAST.replace(prefill=settings)
    whole, chunked = (sparse_target(llama, policy)[0] for _ in range(2))
    wanted, found = read(whole, ids), read(chunked, ids, cuts)
    assert error(found, wanted) < ROUNDING
    assert error(step(chunked, [7, 8]), step(whole, [7, 8])) < ROUNDING
    assert error(wanted, read(FlatTarget(llama, 32), ids)) > 0.1


def test_a_later_token_moves_nothing_earlier(llama: Any) -> None:
    ids = tiny.prompt(300, seed=6)
    wanted = read(sparse_target(llama, SOME)[0], ids)
    for place in (63, 64, 100, 127, 128, 191, 255, 256, 280):
        changed = [*ids[:place], 20, *ids[place + 1 :]]
        found = read(sparse_target(llama, SOME)[0], changed)
        assert torch.equal(found[:place], wanted[:place])
        assert not torch.equal(found[place], wanted[place])


def test_summaries_behind_a_prompt_are_those_of_a_rebuild(llama: Any) -> None:
    for length, cuts in ((300, ()), (256, (100, 200)), (333, (320,))):
        target, _ = sparse_target(llama, SOME)
        read(target, tiny.prompt(length), cuts)
        for layer in target.cache._own_layers():
            kept = layer.summaries.refresh(layer.keys, 0, length)
            assert torch.equal(kept, PageSummaries().refresh(layer.keys, 0, length))


def test_rows_of_a_batch_read_what_they_read_alone_though_others_leave(llama: Any) -> None:
    texts = {row: tiny.prompt(length, seed=row) for row, length in enumerate((290, 150, 333))}
    alone = {row: read(sparse_target(llama, SOME)[0], ids) for row, ids in texts.items()}
    target, stats = sparse_target(llama, SOME)
    live, found = [0, 1, 2], {row: [] for row in texts}
    for begin in range(0, 333, 90):
        if begin == 180:
            # The last row moves into the slot of the first.
            target.free(0)
            live = [2]
        fed = {row: texts[row][begin : begin + 90] for row in live}
        feeds = [Feed(row, ids, len(ids), is_prompt=True) for row, ids in fed.items() if ids]
        with torch.no_grad():
            for each, logits in zip(feeds, target.forward(feeds), strict=True):
                found[each.row_id].append(logits)
    for row, parts in found.items():
        logits = torch.cat(parts)
        assert error(logits, alone[row][: len(logits)]) < ROUNDING
    assert len(torch.cat(found[2])) == 333
    assert stats.prefill_calls > 0


def test_prompts_below_min_context_are_bit_equal_to_dense(llama: Any) -> None:
    policy = LEAST.replace(prefill=SparsePrefill(tokens=96))
    ids = tiny.prompt(330, seed=7)
    target, stats = sparse_target(llama, policy)
    wanted = read(FlatTarget(llama, 32), ids[:192])
    assert torch.equal(read(target, ids[:192]), wanted)
    assert stats.prefill_calls == 0
    target, stats = sparse_target(llama, policy)
    found = read(target, ids)
    assert error(found[:192], wanted) < EXACT
    assert stats.prefill_calls == 3 * 3


def test_without_a_prefill_prompts_are_read_densely_bit_for_bit(llama: Any) -> None:
    ids = tiny.prompt(300, seed=8)
    for cuts in ((), (100, 101)):
        target, stats = sparse_target(llama, LEAST)
        assert torch.equal(read(target, ids, cuts), read(FlatTarget(llama, 32), ids, cuts))
        assert (stats.calls, stats.prefill_calls) == (0, 0)


def test_dense_layers_and_layers_of_other_kinds_are_not_read_in_blocks(llama: Any) -> None:
    for model, policy, layers in (
        (llama, FEW.replace(dense_layers=frozenset({0, 2})), 1),
        (tiny.gemma3(), FEW, 1),
        (tiny.gemma2(), FEW, 0),
        (tiny.mistral(), FEW, 0),
        (tiny.gpt_oss(), FEW, 0),
    ):
        target, stats = sparse_target(model, policy)
        ids = tiny.prompt(200)
        found, dense = read(target, ids), read(FlatTarget(model, 32), ids)
        assert stats.prefill_calls == 3 * layers
        assert (error(found, dense) < EXACT) == (layers == 0)


def test_a_failed_forward_and_a_rollback_leave_nothing_behind(llama: Any) -> None:
    ids = tiny.prompt(333, seed=9)
    target, other = (sparse_target(llama, SOME)[0] for _ in range(2))
    for each in (target, other):
        read(each, ids[:150])

    def fail(*_: object) -> None:
        raise RuntimeError("for the test")

    hook = llama.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="for the test"):
        read(target, tiny.prompt(180, seed=1))
    hook.remove()
    read(target, tiny.prompt(40, seed=2))
    target.rollback(0, 150)
    assert torch.equal(read(target, ids[150:]), read(other, ids[150:]))


def test_a_prompt_behind_tokens_of_another_kind_begins_its_blocks_when_it_can(llama: Any) -> None:
    ids = tiny.prompt(400, seed=10)
    wanted = []
    for policy in (SOME, wholly()):
        target, stats = sparse_target(llama, policy)
        read(target, ids[:100])
        target.rollback(0, 60)
        for begin in range(60, 150, 15):
            step(target, ids[begin : begin + 15])
        # The block of tokens 150 to 191 has no leaders; the next one has them among these.
        before = stats.prefill_calls
        wanted.append(read(target, ids[150:]))
        assert stats.prefill_calls - before == 3 * 4
    dense = FlatTarget(llama, 32)
    read(dense, ids[:150])
    assert error(wanted[1], read(dense, ids[150:])) < EXACT
    assert error(wanted[0], wanted[1]) > 0.01
