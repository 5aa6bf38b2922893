"""Learned page predictors: their scores, and the models they score pages for.

Regimes: grouped heads of all kinds with a head size that is no power of two; one token and several
packed ones; layers with and without a gate; models of another shape.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import tiny
from dspark_hf import DSparkConfig
from dspark_hf.attention.learned import AttentionShape, LearnedPredictor, PageGate
from dspark_hf.attention.pages import PAGE, PageSummaries
from dspark_hf.attention.policy import SparsePolicy
from dspark_hf.attention.predictors import BoundPredictor, scores_of_tokens
from dspark_hf.attention.sparse import SparseRow, SparseStats, attend_pages
from dspark_hf.drafting.self_sparse import SelfSparseDrafter
from dspark_hf.errors import CheckpointError
from dspark_hf.targets.flat import FlatTarget
from harness import generate, wrapped
from page_gates import DIM, RANK, SCALE, inputs, random_gate, shape_of
from sparse_rows import EXACT, error, feed, sparse_target

SHAPES = [(4, 4), (4, 2), (6, 3), (4, 1)]


def model_predictor(model: Any, seed: int = 0) -> LearnedPredictor:
    """Return a predictor of random gates that fits a model."""
    shape = AttentionShape.of(model)
    return LearnedPredictor(shape, RANK, {i: random_gate(shape, seed + i) for i in (0, 2)})


@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gate_that_has_learned_nothing_is_the_bound_to_the_bit(
    heads: tuple[int, int], dtype: torch.dtype
) -> None:
    shape = shape_of(heads)
    start = PageGate.start(shape, RANK, torch.Generator().manual_seed(0))
    assert start.query.std() > 0
    predictor = LearnedPredictor(shape, RANK, {0: start})
    query, summary = inputs(shape, dtype=dtype)
    bound = BoundPredictor().scores(query, summary, 0, SCALE)
    assert torch.equal(predictor.scores(query, summary, 0, SCALE), bound)
    assert bound.dtype == torch.float32


def slow_scores(
    gate: PageGate, query: torch.Tensor, summary: torch.Tensor, tokens: int
) -> torch.Tensor:
    """Score query by query and page by page, as the formula of the module says, in float64."""
    num_kv, rows, _ = query.shape
    out = torch.zeros(num_kv, rows, summary.shape[1], dtype=torch.float64)
    for h in range(num_kv):
        for row in range(rows):
            head = row // tokens
            q = query[h, row].double()
            for page in range(summary.shape[1]):
                held = summary[h, page].double()
                bound = q @ held[:DIM] + 0.5 * q.abs() @ held[DIM:]
                seen = gate.page[h].double() @ held
                correction = (q @ gate.query[h, head].double()) @ seen
                out[h, row, page] = SCALE * (bound + correction) + gate.offset[h, head]
    return out


@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3])
def test_scores_are_those_of_the_formula_head_by_head(heads: tuple[int, int], tokens: int) -> None:
    shape = shape_of(heads)
    gate = random_gate(shape)
    query, summary = inputs(shape, tokens)
    predictor = LearnedPredictor(shape, RANK, {1: gate})
    found = predictor.scores(query, summary, 1, SCALE)
    assert error(found, slow_scores(gate, query, summary, tokens)) < EXACT


def test_packed_tokens_score_as_each_alone() -> None:
    shape = shape_of((6, 3))
    predictor = LearnedPredictor(shape, RANK, {0: random_gate(shape)})
    query, summary = inputs(shape, 4)
    query = query.view(3, 2, 4, DIM)
    together = scores_of_tokens(predictor, query, summary, 0, SCALE)
    for token in range(4):
        alone = predictor.scores(query[:, :, token], summary, 0, SCALE)
        assert error(together[:, :, token], alone) < EXACT


def test_a_layer_without_a_gate_is_scored_by_the_bound_of_its_alpha() -> None:
    shape = shape_of((4, 2))
    predictor = LearnedPredictor(shape, RANK, {0: random_gate(shape)}, alpha=0.75)
    query, summary = inputs(shape)
    bound = BoundPredictor(alpha=0.75).scores(query, summary, 2, SCALE)
    assert torch.equal(predictor.scores(query, summary, 2, SCALE), bound)
    assert not torch.equal(predictor.scores(query, summary, 0, SCALE), bound)


def test_16_bit_queries_are_scored_nearly_as_float32_ones() -> None:
    shape = shape_of((6, 3))
    predictor = LearnedPredictor(shape, RANK, {0: random_gate(shape)})
    exact = predictor.scores(*inputs(shape), 0, SCALE)
    # Rounded to 8 bits are queries, projections and their products.
    assert error(predictor.scores(*inputs(shape, dtype=torch.bfloat16), 0, SCALE), exact) < 0.02


def test_mass_is_met_without_reading_everything_whatever_the_height_of_scores() -> None:
    """A step that asks for 90 % of attention corrects scores' height by the pages it reads."""
    stream = torch.Generator().manual_seed(0)
    query = torch.randn(4, 1, DIM, generator=stream) * 3
    keys = torch.randn(1, 2, 1024, DIM, generator=stream)
    values = torch.randn(1, 2, 1024, DIM, generator=stream)
    shape = AttentionShape(1, 4, 2, DIM)
    rows = query.view(2, 2, DIM)
    summary = PageSummaries().refresh(keys, 0, 1000)
    bound = BoundPredictor().scores(rows, summary, 0, SCALE).logsumexp(-1) + math.log(PAGE)
    logits = rows @ keys[0, :, :1000].transpose(1, 2) * SCALE
    empty = PageGate.start(shape, RANK, stream)
    level = LearnedPredictor(shape, RANK, {0: replace(empty, offset=logits.logsumexp(-1) - bound)})
    dense = (logits.softmax(-1) @ values[0, :, :1000]).view(1, 4, DIM)
    shares = []
    for predictor in (BoundPredictor(), level):
        stats = SparseStats()
        policy = SparsePolicy(tokens=96, mass=0.9, most_tokens=1024, predictor=predictor)
        out = attend_pages(
            query, keys, values, PageSummaries(), SparseRow(policy, stats, 0),
            slot=0, past=999, layer=0, scale=SCALE,
        )  # fmt: skip
        assert stats.extensions > 0
        assert 0 < error(out, dense) < 0.3
        shares.append(stats.share)
    assert shares[0] == shares[1] < 0.9


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny.llama(max_position_embeddings=512)


OTHERS = {
    "layers": {"num_layers": 9},
    "query heads": {"num_heads": 8},
    "key heads": {"num_kv": 1},
    "width": {"dim": 16},
}


@pytest.mark.parametrize("change", OTHERS)
def test_a_model_of_another_shape_is_refused_before_it_decodes(llama: Any, change: str) -> None:
    shape = replace(AttentionShape.of(llama), **OTHERS[change])
    predictor = LearnedPredictor(shape, RANK, {})
    policy = SparsePolicy(tokens=96, predictor=predictor)
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    words = f"{shape}; .* has {AttentionShape.of(llama)}"
    with wrapped(llama, drafter=None) as model:
        model.dspark.target_choice()
        hook = model.register_forward_pre_hook(count)
        try:
            with (
                pytest.raises(CheckpointError, match=words),
                model.dspark.sparse_attention(policy),
            ):
                pass
            with pytest.raises(CheckpointError, match=words):
                generate(
                    model, [tiny.prompt(9)], max_new_tokens=2, dspark=DSparkConfig(sparse=policy)
                )
        finally:
            hook.remove()
    assert steps == 0
    row = SparseRow(policy, SparseStats(), 0)
    with pytest.raises(CheckpointError, match=words):
        FlatTarget(llama).read_sparsely(0, row)


def test_a_self_sparse_drafter_may_use_it_and_stays_lossless(llama: Any) -> None:
    prompt = tiny.prompt(150, seed=2)
    plain = tiny.plain_generate(llama, [prompt], max_new_tokens=20)
    policy = SparsePolicy(tokens=80, recent_pages=2, predictor=model_predictor(llama))
    drafter = SelfSparseDrafter(policy, min_context=64)
    with wrapped(llama, drafter=drafter) as model:
        out = generate(model, [prompt], max_new_tokens=20)
    assert torch.equal(out.sequences, plain)
    assert drafter.stats.calls > 0


def test_a_fork_and_a_rollback_leave_what_a_straight_row_has(llama: Any) -> None:
    """Nothing is kept per row: after a rollback the same pages are chosen as without it."""
    policy = SparsePolicy(
        tokens=80, recent_pages=2, min_context=0, predictor=model_predictor(llama)
    )
    ids = tiny.prompt(200, seed=4)
    straight, _ = sparse_target(llama, policy)
    forked, stats = sparse_target(llama, policy)
    for target in (straight, forked):
        feed(target, ids[:150], keep=1)
    feed(forked, tiny.prompt(21, seed=9))
    forked.rollback(0, 150)
    for token in ids[150:170]:
        assert torch.equal(feed(straight, [token]), feed(forked, [token]))
    assert stats.calls > 0


def test_other_scores_read_other_pages(llama: Any) -> None:
    ids = tiny.prompt(200, seed=4)
    found = []
    for predictor in (BoundPredictor(), model_predictor(llama)):
        policy = SparsePolicy(tokens=80, recent_pages=2, min_context=0, predictor=predictor)
        target, _ = sparse_target(llama, policy)
        feed(target, ids[:-1], keep=1)
        found.append(feed(target, ids[-1:]))
    assert error(*found) > 1e-3
