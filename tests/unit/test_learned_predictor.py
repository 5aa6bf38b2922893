"""Learned page predictors: scores, file, what is refused, what training can and must not do.

Regimes: grouped heads of all kinds with a head size that is no power of two; one token and several
packed ones; layers with and without a gate; keys that mislead the bound.
"""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from dspark_hf import DSparkConfig
from dspark_hf.attention.learned import (
    AttentionShape,
    LearnedPredictor,
    PageGate,
    load_predictor,
)
from dspark_hf.attention.pages import PAGE, PageSummaries
from dspark_hf.attention.policy import SparsePolicy
from dspark_hf.attention.predictors import BoundPredictor, RecentPredictor, scores_of_tokens
from dspark_hf.attention.sparse import SparseRow, SparseStats, attend_pages
from dspark_hf.drafting.self_sparse import SelfSparseDrafter
from dspark_hf.errors import CheckpointError, ConfigError
from dspark_hf.targets.flat import FlatTarget
from dspark_hf.training.page_lessons import Lesson, measure
from dspark_hf.training.page_samples import PageSamples, SampleFolder, record_window
from dspark_hf.training.predictor import PredictorSettings, fit_gate, train_predictor
from harness import generate, wrapped
from sparse_rows import EXACT, error, feed, sparse_target
from training_files import byte_llama, byte_tokenizer

SHAPES = [(4, 4), (4, 2), (6, 3), (4, 1)]
DIM, PAGES, RANK, SCALE = 24, 11, 5, 0.2
SETTINGS = PredictorSettings(
    windows=2, context=256, queries=6, rank=4, steps=60, learning_rate=1e-2, seed=3
)
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen; " * 20


def shape_of(heads: tuple[int, int], layers: int = 3) -> AttentionShape:
    return AttentionShape(layers, *heads, DIM)


def random_gate(shape: AttentionShape, seed: int = 0) -> PageGate:
    stream = torch.Generator().manual_seed(seed)
    sizes = PageGate.sizes(shape, RANK)
    return PageGate(**{name: torch.randn(size, generator=stream) for name, size in sizes.items()})


def inputs(
    shape: AttentionShape, tokens: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries (Hkv, G x tokens, D) and summaries (Hkv, P, 2 D)."""
    stream = torch.Generator().manual_seed(1)
    query = torch.randn(shape.num_kv, shape.group * tokens, DIM, generator=stream)
    keys = torch.randn(1, shape.num_kv, 192, DIM, generator=stream)
    summary = PageSummaries().refresh(keys, 0, PAGES * PAGE)
    return query.to(dtype), summary.to(dtype)


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


def test_a_predictor_survives_its_file_and_being_pickled(tmp_path: Path) -> None:
    shape = shape_of((6, 3))
    predictor = LearnedPredictor(
        shape, RANK, {0: random_gate(shape), 2: random_gate(shape, 1)}, alpha=0.25
    )
    path = predictor.save(tmp_path / "new folder" / "pages.safetensors")
    query, summary = inputs(shape)
    for other in (LearnedPredictor.load(path), pickle.loads(pickle.dumps(predictor))):  # noqa: S301
        assert (other.shape, other.rank, other.alpha) == (shape, RANK, 0.25)
        for layer in range(3):
            wanted = predictor.scores(query, summary, layer, SCALE)
            assert torch.equal(other.scores(query, summary, layer, SCALE), wanted)
    assert [file.name for file in path.parent.iterdir()] == ["pages.safetensors"]
    again = predictor.save(tmp_path / "again.safetensors")
    assert again.read_bytes() == path.read_bytes()


def test_a_predictor_that_has_learned_nothing_is_kept_as_well(tmp_path: Path) -> None:
    path = LearnedPredictor(shape_of((4, 2)), RANK, {}).save(tmp_path / "p.safetensors")
    assert LearnedPredictor.load(path).gates == {}


def test_names_and_files_are_told_apart(tmp_path: Path) -> None:
    assert load_predictor("bound") == BoundPredictor()
    assert load_predictor("quest") == BoundPredictor(alpha=1.0)
    assert load_predictor("recent") == RecentPredictor()
    path = LearnedPredictor(shape_of((4, 2)), RANK, {}).save(tmp_path / "p.safetensors")
    loaded = load_predictor(str(path))
    assert isinstance(loaded, LearnedPredictor)
    with pytest.raises(ConfigError, match=r"\['bound', 'quest', 'recent'\].*got 'qest'"):
        load_predictor("qest")


GOOD = {
    "version": 1, "alpha": 0.5, "rank": RANK, "page_tokens": 16, "num_layers": 3, "num_heads": 4,
    "num_kv": 2, "dim": DIM, "layers": [0, 2],
}  # fmt: skip
KEY = "dspark_hf.page_predictor"


def edited(
    tmp_path: Path, tensors: dict[str, Any] | None = None, metadata: dict[str, str] | None = None
) -> Path:
    """Write a good file of layers 0 and 2 with some tensors changed, None for none, or metadata."""
    shape = shape_of((4, 2))
    good = LearnedPredictor(shape, RANK, {0: random_gate(shape), 2: random_gate(shape)})
    path = good.save(tmp_path / "pages.safetensors")
    held = load_file(path) | (tensors or {})
    save_file(
        {name: tensor for name, tensor in held.items() if tensor is not None},
        path,
        metadata={KEY: json.dumps(GOOD)} if metadata is None else metadata,
    )
    return path


def test_an_edited_file_with_nothing_changed_is_good(tmp_path: Path) -> None:
    assert set(LearnedPredictor.load(edited(tmp_path)).gates) == {0, 2}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"layers.2.page": None}, "lacks 'layers.2.page'"),
        ({"layers.1.page": torch.ones(2, 5, 48)}, "has 'layers.1.page'"),
        ({"bias": torch.ones(1)}, "has 'bias'"),
        ({"layers.0.query": torch.ones(2, 2, 24, 4)},
         r"'layers.0.query' must be floats of shape \(2, 2, 24, 5\); got float32.*\(2, 2, 24, 4\)"),
        ({"layers.2.page": torch.ones(2, 5, 24)}, r"'layers.2.page'.*\(2, 5, 48\)"),
        ({"layers.0.offset": torch.ones(4)}, r"'layers.0.offset'.*\(2, 2\)"),
        ({"layers.0.offset": torch.ones(2, 2, dtype=torch.int64)}, "floats.*got int64"),
        ({"layers.2.page": torch.full((2, 5, 48), math.nan)}, "'layers.2.page' must be finite"),
    ],
    ids=str,
)  # fmt: skip
def test_each_wrong_tensor_is_refused_by_its_name(
    tmp_path: Path, tensors: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        LearnedPredictor.load(edited(tmp_path, tensors))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"version": 2}, "page predictor.* of version 1; got .*2"),
        ({"version": None}, "version 1"),
        ({"num_kv": None}, "must give num_kv as a whole number above 0.*got None"),
        ({"rank": 0}, "must give rank.*got 0"),
        ({"dim": 24.0}, "must give dim.*got 24.0"),
        ({"num_layers": "3"}, "must give num_layers.*got '3'"),
        ({"num_heads": True}, "must give num_heads.*got True"),
        ({"alpha": "half"}, "must give alpha as a number from 0 to 1.*'half'"),
        ({"alpha": math.nan}, "must give alpha"),
        ({"layers": None}, "must give layers as a list"),
        ({"layers": [0, "2"]}, "must give layers"),
        ({"layers": [0, 7]}, "lacks 'layers.7.offset'"),
        ({"layers": [0]}, "has 'layers.2.offset'"),
        ({"num_layers": 2}, "layers 0 to 1; got layer 2"),
        ({"page_tokens": 32}, "pages of 16 tokens.*got pages of 32"),
        ({"num_heads": 5}, "equal groups.*5 query heads for 2"),
        ({"num_heads": 8}, "'layers.0.query' must be"),
    ],
    ids=str,
)
def test_each_wrong_fact_is_refused_by_its_name(
    tmp_path: Path, facts: dict[str, Any], words: str
) -> None:
    metadata = {KEY: json.dumps(GOOD | facts)}
    with pytest.raises(CheckpointError, match=words):
        LearnedPredictor.load(edited(tmp_path, metadata=metadata))


@pytest.mark.parametrize("metadata", [{"format": "pt"}, {KEY: "{"}, {KEY: "[1]"}], ids=str)
def test_tensors_of_another_kind_are_refused(tmp_path: Path, metadata: dict[str, str]) -> None:
    with pytest.raises(CheckpointError, match="must have the metadata of a page predictor"):
        LearnedPredictor.load(edited(tmp_path, metadata=metadata))


def test_what_is_no_safetensors_file_is_refused(tmp_path: Path) -> None:
    broken, cut = tmp_path / "b.safetensors", edited(tmp_path)
    broken.write_text(json.dumps({"not": "safetensors"}))
    cut.write_bytes(cut.read_bytes()[:-40])
    for path in (broken, cut, tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(CheckpointError, match="whole safetensors file"):
            LearnedPredictor.load(path)


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


def test_samples_are_the_models_own_attention_summed_by_page(llama: Any) -> None:
    """Against the attention weights and queries' keys of the plain model, eager."""
    ids, places = tiny.prompt(200, seed=6), [111, 127, 191]
    samples = record_window(llama, ids, places)
    eager = tiny.llama(max_position_embeddings=512)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        weights = eager(torch.tensor([ids]), output_attentions=True).attentions
    assert sorted(samples) == list(range(len(weights)))
    for layer, held in samples.items():
        assert held.pages.tolist() == [7, 8, 12]
        for i, place in enumerate(places):
            pages = (place + 1) // PAGE
            seen = weights[layer][0, :, place, : place + 1]
            wanted = seen.unflatten(-1, (pages, PAGE)).sum(-1)
            mass = held.log_mass[:, :, i, :pages].softmax(-1).flatten(0, 1)
            assert error(mass, wanted) < 1e-4
            assert (held.log_mass[:, :, i, pages:] == -torch.inf).all()
    free = held.free(SparsePolicy(sink_pages=1, recent_pages=4))
    assert [row.nonzero().flatten().tolist() for row in free] == [
        [1, 2], [1, 2, 3], [1, 2, 3, 4, 5, 6, 7],
    ]  # fmt: skip


def test_samples_survive_their_file(llama: Any, tmp_path: Path) -> None:
    samples = record_window(llama, tiny.prompt(130), [79, 127])
    folder = SampleFolder(tmp_path)
    for layer, held in samples.items():
        folder.write(1, layer, held)
        found = folder.read(1, layer)
        assert found.scale == held.scale
        for name in ("query", "summary", "log_mass", "pages"):
            assert torch.equal(getattr(found, name), getattr(held, name))
    assert folder.layers == [0, 1, 2]


def misleading(seed: int, queries: int = 24, pages: int = 32) -> PageSamples:
    """Samples whose bound prefers wide pages, while channel 0 alone decides where heads attend.

    The other channels come in pairs: a query has the same in both, a key the opposite, so that
    products cancel. The bound sees each channel for itself, and adds what each could be at most.
    """
    stream = torch.Generator().manual_seed(seed)
    num_kv, group, num_pairs = 2, 2, DIM // 2 - 1
    query = torch.zeros(num_kv, group, queries, DIM)
    pairs = torch.randn(num_kv, group, queries, num_pairs, generator=stream).abs()
    query[..., 2:] = pairs.repeat_interleave(2, dim=-1)
    query[..., 0] = 3.0
    keys = torch.zeros(num_kv, pages, PAGE, DIM)
    width = torch.rand(num_kv, pages, 1, 1, generator=stream)
    noise = torch.randn(num_kv, pages, PAGE, num_pairs, generator=stream) * width
    keys[..., 2::2], keys[..., 3::2] = noise, -noise
    keys[..., 0] = torch.randn(num_kv, pages, 1, generator=stream)
    keys = keys.flatten(1, 2)
    logits = query.flatten(1, 2) @ keys.transpose(1, 2)
    return PageSamples(
        query=query,
        summary=PageSummaries().refresh(keys[None], 0, pages * PAGE),
        log_mass=logits.view(num_kv, group, queries, pages, PAGE).logsumexp(dim=-1),
        pages=torch.full((queries,), pages),
        scale=1.0,
    )


SYNTHETIC = PredictorSettings(windows=2, context=1024, queries=24, rank=8, steps=200)


def test_a_gate_learns_what_the_bound_cannot_see() -> None:
    lessons = [Lesson.of(misleading(seed)) for seed in range(4)]
    shape = AttentionShape(1, 4, 2, DIM)
    start = PageGate.start(shape, 8, torch.Generator().manual_seed(0))
    gate, steps = fit_gate(start, lessons[:2], lessons[2:3], SYNTHETIC)
    assert gate is not None
    assert steps > 0
    bound, learned = (measure(each, lessons[3:], SYNTHETIC.budget) for each in (None, gate))
    best = lessons[3].captured(lessons[3].samples.log_mass, SYNTHETIC.budget)
    assert learned.captured > bound.captured + 0.5 * (best - bound.captured)
    assert best > bound.captured + 0.1
    assert learned.loss < bound.loss
    assert abs(learned.error) < abs(bound.error)


def test_a_gate_that_helps_no_other_text_is_not_kept() -> None:
    """What there is to learn of one window is the contrary of the other."""
    lesson = misleading(0)
    contrary = replace(lesson, log_mass=-lesson.log_mass)
    start = PageGate.start(AttentionShape(1, 4, 2, DIM), 8, torch.Generator().manual_seed(0))
    train, other = [Lesson.of(lesson)], [Lesson.of(contrary)]
    assert fit_gate(start, train, train, SYNTHETIC)[0] is not None
    kept, steps = fit_gate(start, train, other, SYNTHETIC)
    assert steps == 0
    assert kept is None or not kept.page.any()


def test_where_the_bound_chooses_best_only_its_height_is_learned() -> None:
    """True masses are the bound's, three nats lower: no choice is better, but the estimate is."""
    lessons = []
    for seed in range(3):
        samples = misleading(seed)
        bound = Lesson.of(samples).scores(None) + math.log(PAGE)
        lessons.append(Lesson.of(replace(samples, log_mass=bound - 3.0)))
    start = PageGate.start(AttentionShape(1, 4, 2, DIM), 8, torch.Generator().manual_seed(0))
    gate, steps = fit_gate(start, lessons[:1], lessons[1:2], SYNTHETIC)
    assert steps == 0
    assert gate is not None
    assert torch.allclose(gate.offset, torch.tensor(-3.0), atol=1e-4)
    bound_quality, learned = (measure(each, lessons[2:], SYNTHETIC.budget) for each in (None, gate))
    assert learned.captured == pytest.approx(bound_quality.captured)
    assert bound_quality.error == pytest.approx(3.0, abs=1e-4)
    assert learned.error == pytest.approx(0.0, abs=1e-4)


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


def test_captured_attention_is_that_of_the_pages_a_step_would_read() -> None:
    """By hand: two key heads of one query, six pages of which two are free, budget one each."""
    mass = torch.tensor([[0.1, 0.5, 0.1, 0.1, 0.1, 0.1], [0.3, 0.1, 0.1, 0.2, 0.2, 0.1]])
    samples = PageSamples(
        query=torch.zeros(2, 1, 1, DIM),
        summary=torch.zeros(2, 7, 2 * DIM),
        log_mass=torch.cat([mass.log(), torch.full((2, 1), -torch.inf)], 1)[:, None, None],
        pages=torch.tensor([6]),
        scale=1.0,
    )
    lesson = Lesson.of(samples)
    assert lesson.free[0].tolist() == [False, True, False, False, False, False, False]
    scores = torch.zeros(2, 1, 1, 7)
    scores[0, 0, 0, 1] = 1.0
    # The ten pages always read, and of the two free ones that of the first head.
    assert lesson.captured(scores, 5) == pytest.approx((0.5 + 0.9) / 2)


def test_a_loss_of_zero_means_true_masses() -> None:
    lesson = Lesson.of(misleading(5))
    true = lesson.samples.log_mass - math.log(PAGE)
    assert float(lesson.loss(true)) == pytest.approx(0, abs=1e-6)
    assert lesson.errors(true).abs().max() < 1e-5
    assert float(lesson.loss(true + 1.0)) > 1e-3
    assert torch.allclose(lesson.errors(true + 1.0), torch.tensor(1.0), atol=1e-5)


def train(**settings: Any) -> tuple[LearnedPredictor, list[Any]]:
    return train_predictor(byte_llama(), byte_tokenizer(), TEXT, replace(SETTINGS, **settings))


def test_training_says_the_same_again_for_a_seed_and_something_else_for_another() -> None:
    before = torch.random.get_rng_state()
    (first, reports), (again, reports_again), (other, _) = train(), train(), train(seed=4)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert reports == reports_again
    assert first.gates
    assert set(first.gates) == set(again.gates)
    for layer, gate in first.gates.items():
        for name, tensor in gate.parameters().items():
            assert torch.equal(tensor, again.gates[layer].parameters()[name])
            assert not tensor.requires_grad
    assert not all(
        layer in other.gates and torch.equal(gate.query, other.gates[layer].query)
        for layer, gate in first.gates.items()
    )


def test_reports_and_gates_agree() -> None:
    predictor, reports = train()
    assert [report.layer for report in reports] == [0, 1, 2]
    for report in reports:
        gate = predictor.gates.get(report.layer)
        assert (report.steps > 0) == (gate is not None and bool(gate.page.any()))
        assert report.best >= max(report.bound.captured, report.learned.captured) - 1e-6
        if not report.steps:
            assert report.learned.captured == pytest.approx(report.bound.captured)


def test_only_layers_that_select_are_trained() -> None:
    model = tiny.gemma3()
    settings = replace(SETTINGS, steps=10)
    predictor, reports = train_predictor(model, byte_ids(), TEXT, settings)
    assert [report.layer for report in reports] == [2]
    assert set(predictor.gates) <= {2}
    with pytest.raises(ConfigError, match="layer of full attention"):
        train_predictor(tiny.mistral(), byte_ids(), TEXT, settings)


class byte_ids:  # noqa: N801 - stands in for a tokenizer
    """Encodes a text as ids that every tiny model knows."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) % (tiny.VOCAB - 2) + 1 for c in text]}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"windows": 0}, "windows must be at least 1; got 0"),
        ({"rank": 0}, "rank must"),
        ({"steps": 0}, "steps must"),
        ({"context": 128, "queries": 1}, "context must be at least 256"),
        ({"queries": 9}, "queries must be at most 8.*got 9"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
        ({"context": 5000}, "at most the model's 4096 positions; got 5000"),
        ({"windows": 4}, "data must hold 6 windows of 256 tokens.*got 5"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_honoured_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        train(**settings)


def test_a_model_off_the_flat_target_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="flat target"):
        train_predictor(tiny.bloom(), byte_ids(), TEXT, SETTINGS)
