"""Options of `dspark-hf train`: YAML under flags, types, and the command that repeats them."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from typer.testing import CliRunner

from dspark_hf.cli.app import app
from dspark_hf.cli.train import train
from dspark_hf.errors import ConfigError
from dspark_hf.training.options import TrainOptions
from dspark_hf.training.settings import DrafterShape, TrainSettings

NEEDED = {"target": "t", "out": "o"}


def merge(path=None, **flags):
    return TrainOptions.merge(path, {**NEEDED, **flags})


def test_without_options_everything_is_at_its_default():
    options = merge(tokens=5)
    assert options.shape() == DrafterShape()
    assert options.settings(1000) == TrainSettings()


def test_every_field_of_shape_and_settings_can_be_set():
    changed = {
        "layers": 3, "block_size": 5, "taps": "0,1", "markov_rank": 7, "head": "rnn",
        "confidence": False, "intermediate_size": 11, "draft_vocab_size": 13, "mask_token": 17,
        "reads_anchor": False, "batch_size": 2, "anchors": 3, "learning_rate": 0.5,
        "warmup_steps": 4, "weight_decay": 0.2, "clip_norm": 2.0, "max_tokens": 99, "top_k": 6,
        "validation_share": 0.3, "validate_every": 8, "save_every": 9, "from_target": False,
        "only_answers": False, "precision": "bf16", "seed": 12, "cross_entropy": 0.3,
        "distance": 0.4, "confidence_loss": 0.6, "decay": 5.0, "teacher": "x",
        "distillation": 0.7, "from_bigrams": True,
    }  # fmt: skip
    options = merge(tokens=5, **changed)
    for made, default in (
        (options.shape(), DrafterShape()),
        (options.settings(7), TrainSettings()),
    ):
        for field in dataclasses.fields(made):
            # Excludes from_bigrams; below.
            if field.name != "from_drafter":
                assert getattr(made, field.name) != getattr(default, field.name), field.name
    assert options.shape().target_layers == (0, 1)
    assert merge(tokens=5, from_drafter="y").settings(7).from_drafter == "y"
    with pytest.raises(ConfigError, match="from_bigrams would replace"):
        merge(tokens=5, from_drafter="y", from_bigrams=True).settings(7)


def test_flags_win_over_the_file_and_names_may_have_dashes(tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text("batch-size: 3\nanchors: 5\ntaps: [1, 4]\ntemperatures: 0.5\nseed: 9\n")
    options = merge(path, anchors=6, data="d.jsonl")
    assert (options.batch_size, options.anchors, options.seed) == (3, 6, 9)
    assert (options.taps, options.temperatures) == ((1, 4), (0.5,))


@pytest.mark.parametrize(
    ("text", "message"),
    [("lerning_rate: 1\n", "got 'lerning_rate'"), ("[1, 2]\n", "mapping"), ("a: [\n", "YAML"),
     ("steps: many\n", "steps must be of type int"), ("steps: 1.5\n", "steps must be of type int"),
     ("from_target: 3\n", "from_target must be a bool"), ("taps: [a]\n", "taps must be"),
     ("dtype: int4\n", "dtype must be one of"), ("layout: gguf\n", "layout must be one of"),
     ("steps: 1\ntrain_tokens: 9\n", "give one of them")],
)  # fmt: skip
def test_a_file_that_cannot_be_followed_is_refused(tmp_path, text, message):
    path = tmp_path / "train.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        merge(path)


def test_target_and_folder_must_be_given(tmp_path):
    with pytest.raises(ConfigError, match="--target must be given"):
        TrainOptions.merge(None, {"out": "o"})
    with pytest.raises(ConfigError, match="--config must be a file"):
        merge(tmp_path / "none.yaml")


def test_the_command_line_repeats_the_options():
    options = merge(
        data="some file.jsonl", steps=3, taps="0,1", from_target=False, calibrate=False,
        reads_anchor=False, learning_rate=1e-3,
    )  # fmt: skip
    words = options.arguments()
    assert "--from-scratch" in words
    assert "'some file.jsonl'" in words
    flags = {}
    seen = iter([word.strip("'") for word in words[1:]])
    for word in seen:
        name = word.removeprefix("--").replace("-", "_")
        if name == "from_scratch":
            flags["from_target"] = False
        elif name.startswith("no_"):
            flags[name.removeprefix("no_")] = False
        else:
            flags[name] = next(seen)
    assert TrainOptions.merge(None, flags) == options


def test_every_option_has_a_flag():
    names = set(inspect.signature(train).parameters) - {"ctx", "config"}
    assert names == {field.name for field in dataclasses.fields(TrainOptions)}


def test_a_missing_target_ends_in_one_line():
    result = CliRunner().invoke(app, ["train", "--out", "x"])
    assert result.exit_code == 2
    assert "--target must be given" in result.output
