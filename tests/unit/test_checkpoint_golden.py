"""Drafters made by the public implementations come back as they were, in either layout."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from checkpoint_files import (
    DEEPSPEC_SETS,
    GOLDEN,
    SETS,
    SPECULATORS_SETS,
    changed,
    drafter_of,
    golden_config,
    golden_tensors,
    write,
)
from dspark_hf.drafting.block.model import BlockModel
from dspark_hf.drafting.checkpoints.base import BlockCheckpoint
from dspark_hf.drafting.checkpoints.load import load_checkpoint, read_config
from dspark_hf.drafting.checkpoints.save import save_checkpoint
from dspark_hf.drafting.checkpoints.target import read_target, with_target
from dspark_hf.errors import CheckpointError


def save(checkpoint: BlockCheckpoint, folder: Path, layout: str) -> Path:
    return save_checkpoint(
        checkpoint,
        folder,
        layout=layout,
        include_embed=checkpoint.embed is not None,
        include_head=checkpoint.head is not None,
    )


def assert_same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("name", SETS)
def test_a_golden_drafter_saved_in_its_own_layout_is_unchanged(name: str, tmp_path: Path) -> None:
    layout = "speculators" if name in SPECULATORS_SETS else "deepspec"
    save(load_checkpoint(drafter_of(name)), tmp_path, layout)
    assert_same_tensors(golden_tensors(name), load_file(tmp_path / "model.safetensors"))
    assert json.loads((tmp_path / "config.json").read_text()) == golden_config(name)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("name", DEEPSPEC_SETS)
def test_deepspec_to_speculators_and_back_changes_nothing(name: str, tmp_path: Path) -> None:
    first = load_checkpoint(drafter_of(name))
    there = load_checkpoint(save(first, tmp_path / "there", "speculators"))
    assert there.kind == "speculators-dspark"
    assert there.spec == first.spec
    assert_same_tensors(first.tensors, there.tensors)
    back = load_checkpoint(save(there, tmp_path / "back", "deepspec"))
    assert back.spec == first.spec
    assert_same_tensors(golden_tensors(name), load_file(tmp_path / "back" / "model.safetensors"))
    assert back.config == changed(golden_config(name), transformers_version=...)


def test_the_fields_written_for_speculators_are_those_of_its_own_files(tmp_path: Path) -> None:
    save(load_checkpoint(drafter_of("vanilla_b5")), tmp_path, "speculators")
    written, golden = read_config(tmp_path), golden_config("speculators_pruned_b5")
    # auto_map names code that is not there; the other is the version of Transformers that saved it.
    assert golden.keys() - written.keys() == {"auto_map", "transformers_version"}
    # The way back needs them; other readers keep fields they do not know.
    assert written.keys() - golden.keys() == {"num_target_layers", "max_anchors"}
    inner = "transformer_layer_config"
    assert written[inner].keys() == golden[inner].keys()
    assert written["speculators_config"].keys() == golden["speculators_config"].keys()
    assert written["aux_hidden_state_layer_ids"] == [1, 3, 5]


@pytest.mark.parametrize("name", SETS)
def test_the_weights_of_a_golden_drafter_fit_the_model(name: str) -> None:
    checkpoint = load_checkpoint(drafter_of(name))
    BlockModel(checkpoint.spec).load_state_dict(checkpoint.tensors, strict=True)
    assert checkpoint.num_parameters == sum(
        p.numel() for p in BlockModel(checkpoint.spec).parameters()
    )


def test_embedding_and_head_of_a_target_make_a_deepspec_checkpoint(tmp_path: Path) -> None:
    golden = load_checkpoint(drafter_of("vanilla_b5"))
    bare = dataclasses.replace(golden, embed=None, head=None)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight"):
        save(bare, tmp_path / "no", "deepspec")
    target = read_target(GOLDEN / "vanilla_b5" / "target")
    full = with_target(bare, target)
    assert target.num_layers == 6
    assert torch.equal(full.embed, golden.embed)
    assert torch.equal(full.head, golden.head)
    save(full, tmp_path / "yes", "deepspec")
    assert_same_tensors(
        golden_tensors("vanilla_b5"), load_file(tmp_path / "yes" / "model.safetensors")
    )


def test_the_head_rows_of_a_pruned_drafter_are_the_targets_at_the_mapped_ids() -> None:
    golden = load_checkpoint(drafter_of("speculators_pruned_b5"))
    target = read_target(GOLDEN / "speculators_pruned_b5" / "target")
    filled = with_target(dataclasses.replace(golden, head=None), target)
    assert torch.equal(filled.head, golden.head)
    assert filled.embed.shape == (160, 32)


def test_a_tied_target_gives_its_embedding_as_head(tmp_path: Path) -> None:
    embed = torch.randn(50, 16)
    write(tmp_path, {"num_hidden_layers": 6}, {"model.embed_tokens.weight": embed})
    target = read_target(tmp_path)
    assert torch.equal(target.head, embed)
    assert target.vocab_size == 50


def test_a_target_of_another_family_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"num_hidden_layers": 6}, {"wte.weight": torch.randn(5, 2)})
    with pytest.raises(CheckpointError, match="embedding must be one of"):
        read_target(tmp_path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("speculators_pruned_b5", "draft vocabulary of 96"), ("speculators_rnn_maskfill_b6", "mask")],
)
def test_what_deepspec_cannot_express_is_refused(name: str, reason: str, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(drafter_of(name))
    target = read_target(GOLDEN / name / "target")
    with pytest.raises(CheckpointError, match=reason):
        save(with_target(checkpoint, target), tmp_path, "deepspec")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"target_layers": (0, 2, 5)}, "leave out the target's last block"),
        ({"target_layers": (4, 0, 2)}, "must increase"),
        ({"layer_types": ("sliding_attention",) * 2, "sliding_window": 4}, "full attention"),
        ({"rope_partial": 0.5}, "rope_partial must be 1.0"),
    ],
)
def test_a_drafter_that_deepspec_would_read_differently_is_not_written(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    golden = load_checkpoint(drafter_of("vanilla_b5"))
    odd = dataclasses.replace(golden, spec=dataclasses.replace(golden.spec, **changes))
    with pytest.raises(NotImplementedError, match=reason):
        save(odd, tmp_path, "deepspec")


def test_a_new_drafter_without_config_is_written_from_its_spec(tmp_path: Path) -> None:
    golden = load_checkpoint(drafter_of("gated_b7"))
    fresh = dataclasses.replace(golden, config={})
    assert load_checkpoint(save(fresh, tmp_path, "deepspec")).spec == golden.spec


def test_a_config_that_no_longer_fits_the_drafter_is_written_anew(tmp_path: Path) -> None:
    golden = load_checkpoint(drafter_of("gated_b7"))
    spec = dataclasses.replace(golden.spec, rope_theta=12345.0)
    save(dataclasses.replace(golden, spec=spec), tmp_path, "deepspec")
    assert load_checkpoint(tmp_path).spec.rope_theta == 12345.0


def test_calibration_comes_and_goes_with_the_checkpoint(tmp_path: Path) -> None:
    golden = load_checkpoint(drafter_of("vanilla_b5"))
    assert golden.calibration is None
    table = {"temperatures": [1.0, 1.25]}
    save(dataclasses.replace(golden, calibration=table), tmp_path, "deepspec")
    assert load_checkpoint(tmp_path).calibration == table
    save(golden, tmp_path, "deepspec")
    assert load_checkpoint(tmp_path).calibration is None


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    tensors = golden_tensors("vanilla_b5")
    write(tmp_path, golden_config("vanilla_b5"), None)
    places = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        save_file({k: v for k, v in tensors.items() if places[k] == file}, tmp_path / file)
    index = {"metadata": {}, "weight_map": places}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same_tensors(
        load_checkpoint(tmp_path).tensors, load_checkpoint(drafter_of("vanilla_b5")).tensors
    )
    with pytest.raises(CheckpointError, match="no other weights"):
        save(load_checkpoint(tmp_path), tmp_path, "deepspec")
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no 'part-1\.safetensors'"):
        load_checkpoint(tmp_path)


def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    write(tmp_path / "secret", {}, golden_tensors("vanilla_b5"))
    folder = write(tmp_path / "drafter", golden_config("vanilla_b5"), None)
    index = {"weight_map": {"fc.weight": "../secret/model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="must lie beside it"):
        load_checkpoint(folder)
