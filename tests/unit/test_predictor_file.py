"""Files of learned page predictors: what comes back, and what is refused by its name."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark_hf.attention.learned import LearnedPredictor, load_predictor
from dspark_hf.attention.predictors import BoundPredictor, RecentPredictor
from dspark_hf.errors import CheckpointError, ConfigError
from page_gates import DIM, RANK, SCALE, inputs, random_gate, shape_of


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
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
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
