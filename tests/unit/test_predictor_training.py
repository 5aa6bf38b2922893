"""Training of page predictors: samples, lessons, what can and must not be learned, what is refused.

Regimes: keys that mislead the bound, and ones that it ranks best; windows that contradict each
other; layers that do not select.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from dspark_hf.attention.learned import AttentionShape, LearnedPredictor, PageGate
from dspark_hf.attention.pages import PAGE, PageSummaries
from dspark_hf.attention.policy import SparsePolicy
from dspark_hf.errors import ConfigError
from dspark_hf.training.page_lessons import Lesson, measure
from dspark_hf.training.page_samples import PageSamples, SampleFolder, record_window
from dspark_hf.training.predictor import PredictorSettings, fit_gate, train_predictor
from page_gates import DIM
from sparse_rows import error
from training_files import byte_llama, byte_tokenizer

SETTINGS = PredictorSettings(
    windows=2, context=256, queries=6, rank=4, steps=60, learning_rate=1e-2, seed=3
)
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen; " * 20


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny.llama(max_position_embeddings=512)


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

    bos_token_id = None

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
