"""Training runs on tiny targets: they learn, resume to the bit, and refuse other settings."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch

import tiny
from dspark_hf import DSparkConfig
from dspark_hf.drafting.block.build import build_block_drafter
from dspark_hf.drafting.checkpoints.load import load_checkpoint
from dspark_hf.drafting.checkpoints.save import save_checkpoint
from dspark_hf.errors import ConfigError
from dspark_hf.training.run import RunInputs, train
from dspark_hf.training.settings import DrafterShape, TrainSettings
from dspark_hf.training.trainer import Trainer, learning_rate
from harness import generate, wrapped
from training_files import (
    QUICK,
    SHAPE,
    byte_tokenizer,
    greedy_texts,
    quick_run,
    ragged_texts,
    save_target,
    text_file,
)


class KilledError(Exception):
    """Stands for the end of the process."""


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return text_file(tmp_path_factory.mktemp("texts") / "texts.jsonl", ragged_texts(12))


@pytest.fixture(scope="module")
def unbroken(target, texts, tmp_path_factory):
    """The state of a run nobody disturbed."""
    out = tmp_path_factory.mktemp("unbroken")
    quick_run(target, texts, out)
    return state_of(out)


def state_of(out: Path):
    return torch.load(out / "state.pt", weights_only=True)


def assert_same_state(first, second):
    assert first["step"] == second["step"]
    for name, tensor in first["model"].items():
        assert torch.equal(tensor, second["model"][name]), name
    for index, moments in first["optimizer"]["state"].items():
        for name, tensor in moments.items():
            assert torch.equal(tensor, second["optimizer"]["state"][index][name])


@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_run_that_failed_inside_a_step_ends_in_the_same_weights(
    target, texts, tmp_path, monkeypatch, unbroken, step
):
    def failing(self, batch, learn=Trainer._learn):
        if self.step == step:
            self._loss(batch).total.backward()
            raise KilledError
        return learn(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_learn", failing)
        with pytest.raises(KilledError):
            quick_run(target, texts, tmp_path)
    quick_run(target, texts, tmp_path)
    assert_same_state(state_of(tmp_path), unbroken)


def test_half_a_saved_state_is_never_read(target, texts, tmp_path, monkeypatch, unbroken):
    count, save = itertools.count(1), torch.save

    def dying_save(state, path):
        if next(count) == 3:
            Path(path).write_bytes(b"half a file")
            raise KilledError
        save(state, path)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", dying_save)
        with pytest.raises(KilledError):
            quick_run(target, texts, tmp_path)
    assert state_of(tmp_path)["step"] == 2
    quick_run(target, texts, tmp_path)
    assert_same_state(state_of(tmp_path), unbroken)


def test_lessons_on_disk_change_nothing(target, texts, tmp_path, unbroken):
    for out in ("first", "second"):
        inputs = RunInputs(target, texts, tmp_path / out, torch.float32, tmp_path / "kept", 10**9)
        train(inputs, DrafterShape(num_layers=1, block_size=4, markov_rank=8),
              TrainSettings(**QUICK))  # fmt: skip
        assert_same_state(state_of(tmp_path / out), unbroken)
    (kept,) = (tmp_path / "kept").iterdir()
    assert kept.name.endswith("-taps0-1-top8")


def test_a_finished_run_is_left_as_it_is(target, texts, tmp_path):
    first = quick_run(target, texts, tmp_path)
    log = (tmp_path / "train_log.jsonl").read_text()
    again = quick_run(target, texts, tmp_path)
    assert (tmp_path / "train_log.jsonl").read_text() == log
    assert again.expected_length == first.expected_length
    assert all(torch.equal(t, again.checkpoint.tensors[n]) for n, t in
               first.checkpoint.tensors.items())  # fmt: skip


def test_other_settings_texts_or_shape_are_refused(target, texts, tmp_path):
    quick_run(target, texts, tmp_path)
    with pytest.raises(ConfigError, match=r"other settings: \{'seed': 0\}; got \{'seed': 1\}"):
        quick_run(target, texts, tmp_path, seed=1)
    with pytest.raises(ConfigError, match=r"other spec: \{'block_size': 4\}"):
        quick_run(target, texts, tmp_path, DrafterShape(1, 3, markov_rank=8))
    other = text_file(tmp_path / "other.jsonl", ragged_texts(12, seed=9))
    with pytest.raises(ConfigError, match="other texts"):
        quick_run(target, other, tmp_path)


def test_a_folder_older_than_a_setting_is_continued_at_its_default(target, texts, tmp_path):
    quick_run(target, texts, tmp_path)
    path = tmp_path / "run.json"
    run = json.loads(path.read_text())
    for name in ("teacher", "distillation", "from_bigrams"):
        del run["settings"][name]
    path.write_text(json.dumps(run))
    quick_run(target, texts, tmp_path)
    with pytest.raises(ConfigError, match=r"'distillation': 0\.5"):
        quick_run(target, texts, tmp_path, distillation=0.1)


def test_training_goes_on_from_a_drafter_with_its_shape_and_ids(target, texts, tmp_path):
    shape = dataclasses.replace(SHAPE, draft_vocab_size=60)
    first = quick_run(target, texts, tmp_path / "first", shape)
    save_checkpoint(
        first.checkpoint, tmp_path / "drafter", layout="speculators", include_embed=False,
        include_head=False,
    )  # fmt: skip
    other = text_file(tmp_path / "other.jsonl", ragged_texts(12, seed=9))
    again = {"from_drafter": str(tmp_path / "drafter"), "steps": 1, "learning_rate": 1e-9}
    second = quick_run(target, other, tmp_path / "second", DrafterShape(), **again)
    assert second.checkpoint.spec == first.checkpoint.spec
    assert torch.equal(second.checkpoint.d2t, first.checkpoint.d2t)
    for name, tensor in first.checkpoint.tensors.items():
        assert torch.allclose(second.checkpoint.tensors[name], tensor, atol=1e-6), name
    for changed, said in (({"block_size": 3}, "block_size must be 4"),
                          ({"draft_vocab_size": 61}, "draft_vocab_size must be 60"),
                          ({"markov_rank": 9}, "markov_rank must be 8")):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            quick_run(
                target, other, tmp_path / "third", dataclasses.replace(SHAPE, **changed), **again
            )


def test_a_drafter_with_tables_of_its_own_is_not_gone_on_from(target, texts, tmp_path):
    found = quick_run(target, texts, tmp_path / "first").checkpoint
    spec = found.spec
    tables = torch.zeros(spec.vocab_size, spec.hidden_size)
    owning = dataclasses.replace(found, embed=tables, head=tables)
    save_checkpoint(
        owning, tmp_path / "drafter", layout="deepspec", include_embed=True, include_head=True
    )
    with pytest.raises(ConfigError, match="brings its own"):
        quick_run(target, texts, tmp_path / "second", from_drafter=str(tmp_path / "drafter"))


def losses_of(target, texts, out, shape, **settings):
    quick_run(target, texts, out, shape, **{"validate_every": 1, "steps": 30, **settings})
    lines = (out / "train_log.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.parametrize("reads_anchor", [True, False], ids=["anchor", "mask"])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])
def test_every_head_and_readout_learns(target, texts, tmp_path, head, reads_anchor):
    shape = DrafterShape(
        1, 4, markov_rank=0 if head == "none" else 8, head="vanilla" if head == "none" else head,
        draft_vocab_size=100, reads_anchor=reads_anchor,
    )  # fmt: skip
    losses = losses_of(target, texts, tmp_path, shape)
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_a_drafter_starts_from_scratch_in_half_precision_without_confidence(
    target, texts, tmp_path
):
    shape = DrafterShape(1, 4, markov_rank=8, confidence=False)
    losses = losses_of(target, texts, tmp_path, shape, from_target=False, precision="bf16")
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_a_tiny_target_is_learned_by_heart_and_really_decoded_faster(tmp_path):
    model = tiny.llama()
    model.save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    written = greedy_texts(model, count=6, length=32)
    path = text_file(tmp_path / "texts.jsonl", [*written, *written])
    result = quick_run(
        str(tmp_path / "target"), path, tmp_path / "out",
        DrafterShape(num_layers=2, block_size=7, markov_rank=16), steps=90, batch_size=6,
        anchors=27, warmup_steps=10, validate_every=90, save_every=90, validation_share=0.1,
        learning_rate=1e-2, cross_entropy=1.0,
    )  # fmt: skip
    save_checkpoint(result.checkpoint, tmp_path / "drafter", layout="speculators",
                    include_embed=False, include_head=False)  # fmt: skip
    drafter = build_block_drafter(load_checkpoint(tmp_path / "drafter"), model)
    prompts = [text.ids[: text.start] for text in written]
    config = DSparkConfig(schedule="fixed", max_draft_tokens=7, never_slower=False)
    with wrapped(model, drafter, config):
        out = generate(model, prompts, max_new_tokens=32)
    assert [tuple(row) for row in out.sequences.tolist()] == [text.ids for text in written]
    lengths = [record.accepted_length for record in out.speculation]
    assert sum(lengths) / len(lengths) > 4


def test_a_teacher_pulls_the_learner_towards_its_distributions(target, texts, tmp_path):
    shape = DrafterShape(1, 4, markov_rank=8)
    taught = quick_run(target, texts, tmp_path / "teacher", shape, steps=40)
    save_checkpoint(taught.checkpoint, tmp_path / "saved", layout="speculators",
                    include_embed=False, include_head=False)  # fmt: skip
    learner = DrafterShape(1, 3, markov_rank=8, draft_vocab_size=90, reads_anchor=True)
    apart = []
    for share in (0.0, 2.0):
        out = tmp_path / f"share{share}"
        seen = []
        quick_run_with_parts(target, texts, out, learner, seen, share, str(tmp_path / "saved"))
        apart.append(sum(seen[-5:]) / 5)
        assert 0 <= min(seen) <= max(seen) <= 2
    assert apart[1] < apart[0]


def quick_run_with_parts(target, texts, out, shape, seen, share, teacher):
    quick_run(target, texts, out, shape, steps=30, validate_every=1, teacher=teacher,
              distillation=share, cross_entropy=0.0, distance=1.0)  # fmt: skip
    for line in (out / "train_log.jsonl").read_text().splitlines():
        seen.append(json.loads(line)["teacher"])


def test_a_teacher_that_does_not_fit_is_refused(target, texts, tmp_path):
    taught = quick_run(target, texts, tmp_path / "teacher", steps=1)
    folder = tmp_path / "saved"
    save_checkpoint(taught.checkpoint, folder, layout="speculators",
                    include_embed=False, include_head=False)  # fmt: skip
    with pytest.raises(ConfigError, match="must draft at least 5"):
        quick_run(target, texts, tmp_path / "a", DrafterShape(1, 5), teacher=str(folder))
    with pytest.raises(ConfigError, match="taps must include"):
        quick_run(target, texts, tmp_path / "b", DrafterShape(1, 4, (1,)), teacher=str(folder))


def test_the_learning_rate_rises_and_falls_to_a_tenth():
    settings = TrainSettings(steps=100, warmup_steps=10, learning_rate=1.0)
    rates = [learning_rate(step, settings) for step in range(101)]
    assert rates[:10] == pytest.approx([k / 10 for k in range(1, 11)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("steps", 0), ("precision", "fp8"), ("validation_share", 1.0), ("learning_rate", 0.0)],
)
def test_settings_that_cannot_be_honoured_are_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        TrainSettings(**{name: value})
