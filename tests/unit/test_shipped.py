"""The drafter that ships for a target is found by what the target looks like."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload
from transformers import PreTrainedModel

from block_drafters import block_spec, random_model
from dspark_hf import DSparkConfig
from dspark_hf.drafting import shipped
from dspark_hf.drafting.block.drafter import BlockDrafter
from dspark_hf.drafting.checkpoints.base import BlockCheckpoint
from dspark_hf.drafting.checkpoints.save import save_checkpoint
from dspark_hf.drafting.choice import DrafterChoice
from dspark_hf.drafting.lookup import LookupDrafter
from dspark_hf.drafting.resolve import resolve_drafter
from dspark_hf.errors import CheckpointError
from harness import generate, wrapped
from tiny import VOCAB, llama, mistral, plain_generate, prompt


def ship(target: PreTrainedModel, folder: Path) -> Path:
    """Store a random drafter for a target as those that ship are stored."""
    spec = block_spec(target, num_target_layers=3)
    checkpoint = BlockCheckpoint(spec, random_model(spec).state_dict(), kind="speculators-dspark")
    save_checkpoint(
        checkpoint, folder, layout="speculators", include_embed=False, include_head=False
    )
    signature = json.dumps(shipped.target_signature(target))
    (folder / shipped.TARGET_FILE).write_text(signature)
    return folder


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What ships: at first a drafter for another model only."""
    found = [ship(mistral(), tmp_path / "other")]
    monkeypatch.setattr(shipped, "shipped_folders", lambda: found)
    return found


def disturbed(model: PreTrainedModel, scale: float) -> PreTrainedModel:
    weight = model.get_input_embeddings().weight
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        weight += noise * weight.std() * scale
    return model


def test_a_target_is_known_by_its_embedding_whatever_its_type() -> None:
    signature = json.loads(json.dumps(shipped.target_signature(llama())))
    assert shipped.matches(llama(), signature)
    assert shipped.matches(llama().bfloat16(), signature)
    assert shipped.matches(disturbed(llama(), 0.1), signature)
    assert not shipped.matches(llama(seed=6), signature)
    assert not shipped.matches(disturbed(llama(), 1.0), signature)


@pytest.mark.parametrize(
    "changes", [{"num_hidden_layers": 4}, {"hidden_size": 48, "head_dim": 12}, {"vocab_size": 170}]
)
def test_a_target_of_another_shape_is_another(changes: dict[str, int]) -> None:
    signature = shipped.target_signature(llama())
    assert not shipped.matches(llama(**changes), signature)
    assert not shipped.matches(mistral(), signature)


def test_an_offloaded_target_is_known_too() -> None:
    signature = shipped.target_signature(llama())
    model = llama()
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.get_input_embeddings().weight.is_meta
    assert shipped.matches(model, signature)


def test_auto_takes_the_shipped_drafter_with_lookup_beside_it(
    folders: list[Path], tmp_path: Path
) -> None:
    model = llama()
    folders.append(ship(model, tmp_path / "mine"))
    drafter = resolve_drafter("auto", model)
    assert isinstance(drafter, DrafterChoice)
    block, lookup = drafter.members
    assert isinstance(block, BlockDrafter)
    assert isinstance(lookup, LookupDrafter)
    assert drafter.name == "mine+lookup"
    ids = [prompt(9, seed=2), prompt(5, seed=3)]
    plain = plain_generate(model, ids, max_new_tokens=12)
    with wrapped(model, "auto", DSparkConfig(schedule="fixed")):
        out = generate(model, ids, max_new_tokens=12)
    assert out.sequences.tolist() == plain.tolist()
    assert sum(record.drafted for record in out.speculation) > 0


def test_auto_without_a_shipped_drafter_is_lookup_and_says_so(
    folders: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        drafter = resolve_drafter("auto", llama())
    assert isinstance(drafter, LookupDrafter)
    assert "No drafter ships for LlamaForCausalLM" in caplog.text
    assert "dspark-hf train" in caplog.text


def test_a_path_names_the_drafter_of_that_folder(tmp_path: Path) -> None:
    model = llama()
    for given in (ship(model, tmp_path / "mine"), str(tmp_path / "mine")):
        drafter = resolve_drafter(given, model)
        assert isinstance(drafter, BlockDrafter)
        assert drafter.name == "mine"
        assert drafter.target is model
    with pytest.raises(CheckpointError, match="hidden_size must be the target's 48"):
        resolve_drafter(str(tmp_path / "mine"), llama(hidden_size=48, head_dim=12))
    with pytest.raises(CheckpointError, match="3"):
        resolve_drafter(str(tmp_path / "mine"), llama(num_hidden_layers=4))
    with pytest.raises(CheckpointError, match=f"at least the drafter's {VOCAB} rows; got 96"):
        resolve_drafter(str(tmp_path / "mine"), llama(vocab_size=96))


def test_folders_that_ship_hold_drafters_for_the_targets_they_describe() -> None:
    for folder in shipped.shipped_folders():
        signature = json.loads((folder / shipped.TARGET_FILE).read_text())
        assert set(signature) >= {
            "model_type",
            "hidden_size",
            "num_hidden_layers",
            "rows",
            "sample",
        }
        assert (folder / "config.json").is_file()
