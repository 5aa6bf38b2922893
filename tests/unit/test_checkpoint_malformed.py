"""Whatever is wrong with a checkpoint is refused in one sentence that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_files import (
    BACKBONE,
    DEEPSPEC,
    SPECULATORS,
    ZLAB,
    changed,
    random_tensors,
    write,
)
from dspark_hf.drafting.checkpoints.load import load_checkpoint, read_config
from dspark_hf.errors import CheckpointError

INNER = "transformer_layer_config"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed(DEEPSPEC, vocab_size=...), "must say vocab_size"),
        (changed(DEEPSPEC, hidden_size=None), "must say hidden_size"),
        (changed(DEEPSPEC, block_size="4"), "block_size must be a whole number.*got '4'"),
        (changed(DEEPSPEC, block_size=0), "block_size must be a whole number, at least 1; got 0"),
        (changed(DEEPSPEC, block_size=True), "block_size must be a whole number"),
        (changed(DEEPSPEC, num_hidden_layers=1.5), "num_hidden_layers must be a whole number"),
        (changed(DEEPSPEC, rms_norm_eps=0), "rms_norm_eps must be a number above 0; got 0"),
        (changed(DEEPSPEC, rms_norm_eps=...), "must say rms_norm_eps"),
        (changed(DEEPSPEC, target_layer_ids=...), "must say target_layer_ids"),
        (changed(DEEPSPEC, target_layer_ids=[]), "target_layer_ids must be a list of distinct"),
        (changed(DEEPSPEC, target_layer_ids=[1, 1]), "distinct whole numbers"),
        (changed(DEEPSPEC, target_layer_ids=[-2]), "at least -1"),
        (changed(DEEPSPEC, target_layer_ids="0,2"), "target_layer_ids must be a list"),
        (changed(DEEPSPEC, markov_rank=...), "must say markov_rank"),
        (changed(DEEPSPEC, markov_rank=-1), "markov_rank must be a whole number, at least 0"),
        (changed(DEEPSPEC, markov_head_type=...), "must say markov_head_type"),
        (changed(DEEPSPEC, markov_head_type="lstm"), "markov_head_type must be one of.*'lstm'"),
        (changed(DEEPSPEC, markov_rank=0), "confidence_head_with_markov needs a Markov head"),
        (changed(DEEPSPEC, enable_confidence_head=...), "must say enable_confidence_head"),
        (changed(DEEPSPEC, enable_confidence_head="yes"), "must be true or false; got 'yes'"),
        (changed(DEEPSPEC, confidence_head_with_markov=...), "must say confidence_head_with_m"),
        (changed(DEEPSPEC, layer_types=["full_attention"]), "must name all 2 layers; got 1"),
        (changed(DEEPSPEC, layer_types=["linear_attention"] * 2), "got 'linear_attention'"),
        (changed(DEEPSPEC, layer_types="full_attention"), "layer_types must be a list of texts"),
        (changed(DEEPSPEC, quantization_config={"bits": 4}), "quantization_config"),
        (changed(DEEPSPEC, rope_parameters=7), "rope_parameters must be an object; got 7"),
        (changed(DEEPSPEC, hidden_act=3), "hidden_act must be a text; got 3"),
        (changed(SPECULATORS, **{INNER: None}), f"must say {INNER}.num_hidden_layers"),
        (changed(SPECULATORS, **{INNER: [1]}), f"{INNER} must be an object"),
        (changed(SPECULATORS, draft_vocab_size=...), "must say draft_vocab_size"),
        (changed(SPECULATORS, draft_vocab_size=41), "at most the target's 40; got 41"),
        (changed(SPECULATORS, aux_hidden_state_layer_ids=...), "aux_hidden_state_layer_ids"),
        (changed(SPECULATORS, aux_hidden_state_layer_ids=[-1]), "at least 0; got"),
        (changed(SPECULATORS, target_hidden_size=32), "hidden_size 16; got 32"),
        (changed(SPECULATORS, sample_from_anchor="no"), "true or false; got 'no'"),
        (changed(ZLAB, dflash_config=3, block_size=...), "dflash_config must be an object; got 3"),
        (changed(ZLAB, block_size=1), "at least one draft; got 1"),
        (changed(ZLAB, dflash_config={"mask_token_id": 3}), "must say target_layer_ids"),
        (BACKBONE, "ordinary config.json with architectures None"),
        (changed(BACKBONE, architectures="Qwen3DSparkModel"), "ordinary config.json with"),
        ([1, 2], "must be a JSON object; got a list"),
    ],
)  # fmt: skip
def test_a_wrong_config_is_refused_by_the_field(config: Any, message: str, tmp_path: Path) -> None:
    tensors = random_tensors(DEEPSPEC)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(write(tmp_path, config, tensors))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("fc.weight", None, r"hold 'fc\.weight' of shape \(16, 32\); got no such tensor"),
        ("fc.weight", torch.zeros(16, 48), r"shape \(16, 32\) .* got \(16, 48\)"),
        ("layers.1.self_attn.q_norm.weight", torch.zeros(4), r"\(8,\) .* got \(4,\)"),
        ("markov_head.markov_w2.weight", torch.zeros(39, 4), r"\(40, 4\) .* got \(39, 4\)"),
        ("confidence_head.proj.weight", torch.zeros(1, 16), r"\(1, 20\) .* got \(1, 16\)"),
        ("layers.2.mlp.up_proj.weight", torch.zeros(3, 2), r"'layers\.2.*' of shape \(3, 2\)"),
        ("extra", torch.zeros(2), r"got 'extra' of shape \(2,\) as well"),
        ("markov_head.gate_proj.bias", torch.zeros(4), "got 'markov_head.gate_proj.bias'"),
        ("norm.weight", torch.ones(16, dtype=torch.int8), "floating-point tensor; got torch.int8"),
        ("embed_tokens.weight", torch.zeros(41, 16), r"\(40, 16\) .* got \(41, 16\)"),
        ("lm_head.weight", torch.zeros(40, 8), r"\(40, 16\) .* got \(40, 8\)"),
    ],
)
def test_a_missing_unexpected_or_misshapen_tensor_is_refused_by_name(
    name: str, tensor: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    tensors = random_tensors(DEEPSPEC)
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(write(tmp_path, DEEPSPEC, tensors))


def test_copies_of_the_target_that_only_training_reads_are_left_out(tmp_path: Path) -> None:
    tensors = random_tensors(SPECULATORS)
    more = {"verifier_norm.weight": torch.ones(16), "verifier_lm_head.weight": torch.ones(40, 16)}
    assert load_checkpoint(write(tmp_path, SPECULATORS, tensors | more)).tensors.keys() == (
        tensors.keys()
    )


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    assert read_config(tmp_path) is None
    with pytest.raises(CheckpointError, match=r"must have a config\.json; got none"):
        load_checkpoint(tmp_path)


def test_a_config_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json must be JSON"):
        read_config(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"must have model\.safetensors; got no weights"):
        load_checkpoint(write(tmp_path, DEEPSPEC, None))


def test_pickled_weights_are_refused_with_the_reason(tmp_path: Path) -> None:
    write(tmp_path, DEEPSPEC, None)
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(CheckpointError, match=r"run code when loaded; got \['pytorch_model\.bin'"):
        load_checkpoint(tmp_path)


def test_a_broken_weight_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path, DEEPSPEC, random_tensors(DEEPSPEC))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match="whole safetensors file"):
        load_checkpoint(tmp_path)


def test_several_weight_files_need_an_index(tmp_path: Path) -> None:
    write(tmp_path, DEEPSPEC, random_tensors(DEEPSPEC))
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    load_checkpoint(tmp_path)
    (tmp_path / "b.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"must come with model\.safetensors\.index"):
        load_checkpoint(tmp_path)


def test_an_index_without_a_map_is_refused(tmp_path: Path) -> None:
    write(tmp_path, DEEPSPEC, None)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="must hold a weight_map"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("source", ["no-such/drafter", "not a repository", "/no/such/folder"])
def test_a_source_that_is_nowhere_is_refused_in_one_sentence(source: str) -> None:
    assert read_config(source) is None
    with pytest.raises(CheckpointError, match="must be a folder or the id of a repository"):
        load_checkpoint(source)
