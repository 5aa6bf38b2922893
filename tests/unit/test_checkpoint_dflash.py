"""DFlash drafters of z-lab and of Transformers, and what is told apart from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from checkpoint_files import BACKBONE, DEEPSPEC, SPECULATORS, ZLAB, changed, random_tensors, write
from dspark_hf.drafting.block.model import BlockModel, TextMemory
from dspark_hf.drafting.checkpoints.base import UnsupportedCheckpointError
from dspark_hf.drafting.checkpoints.detect import detect_kind
from dspark_hf.drafting.checkpoints.load import load_checkpoint, read_spec
from dspark_hf.drafting.checkpoints.save import save_checkpoint
from dspark_hf.errors import CheckpointError

HIDDEN_BOUND = 1e-5
"""Largest difference of float32 hidden states near 1 after two layers: rounding alone."""


@pytest.fixture
def assistant() -> Any:
    torch.manual_seed(0)
    config = MuseGlimmerAssistantConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, rope_parameters={"rope_type": "default",
        "rope_theta": 1e4}, layer_types=["full_attention"] * 2, block_size=4, mask_token_id=39,
        target_layer_ids=[0, 2],
    )  # fmt: skip
    return MuseGlimmerAssistantModel(config).eval()


def test_a_dflash_assistant_saved_by_transformers_loads_and_computes_the_same(
    assistant: Any, tmp_path: Path
) -> None:
    assistant.save_pretrained(tmp_path)
    checkpoint = load_checkpoint(tmp_path, vocab_size=40)
    assert checkpoint.kind == "hf-dflash"
    assert not checkpoint.spec.reads_anchor
    model = BlockModel(checkpoint.spec)
    model.load_state_dict(checkpoint.tensors, strict=True)
    features, noise = torch.randn(1, 7, 32), torch.randn(1, 4, 16)
    with torch.no_grad():
        theirs = assistant(noise_embeds=noise, context_hidden_states=features).last_hidden_state
        context = model.context(model.project(features), model.rotary(torch.arange(7)[None]))
        memory = TextMemory(checkpoint.spec, context, torch.tensor([[7]]))
        ours = model(noise, model.rotary(torch.arange(7, 11)[None]), memory)
    assert (ours - theirs).abs().max() < HIDDEN_BOUND


def test_a_dflash_assistant_needs_to_know_the_targets_vocabulary(
    assistant: Any, tmp_path: Path
) -> None:
    assistant.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="vocab_size must be known"):
        load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="below the embedding's 39 rows; got 39"):
        load_checkpoint(tmp_path, vocab_size=39)


def test_a_zlab_drafter_loads_with_its_own_fields_nested_or_at_the_top(tmp_path: Path) -> None:
    nested = load_checkpoint(write(tmp_path / "nested", ZLAB, random_tensors(ZLAB)))
    assert nested.kind == "zlab-dflash"
    assert nested.spec.target_layers == (1, 3)
    assert nested.spec.num_drafts == 3
    assert not nested.spec.markov_rank
    assert nested.embed is None
    own = {"block_size": 4, "mask_token_id": 39, "target_layer_ids": [1, 3]}
    flat = changed(ZLAB, dflash_config=..., **own)
    assert load_checkpoint(write(tmp_path / "flat", flat, random_tensors(flat))).spec == nested.spec
    inner = changed(ZLAB, block_size=..., dflash_config=own)
    checkpoint = load_checkpoint(write(tmp_path / "inner", inner, random_tensors(inner)))
    assert checkpoint.spec == nested.spec


def test_a_zlab_drafter_becomes_a_speculators_one_with_the_same_weights(tmp_path: Path) -> None:
    source = load_checkpoint(write(tmp_path / "zlab", ZLAB, random_tensors(ZLAB)))
    save_checkpoint(
        source, tmp_path / "out", layout="speculators", include_embed=False, include_head=False
    )
    made = load_checkpoint(tmp_path / "out")
    assert made.kind == "speculators-dflash"
    assert made.spec == source.spec
    assert all(torch.equal(made.tensors[name], tensor) for name, tensor in source.tensors.items())
    assert made.config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    with pytest.raises(CheckpointError, match="must read its first draft at the anchor row"):
        save_checkpoint(
            source, tmp_path / "no", layout="deepspec", include_embed=True, include_head=True
        )


def test_the_logit_cap_and_embedding_scale_of_a_zlab_drafter_are_kept() -> None:
    own = ZLAB["dflash_config"] | {"final_logit_softcapping": 30.0, "input_embedding_scale": 4.0}
    spec = read_spec(changed(ZLAB, dflash_config=own), kind="zlab-dflash")
    assert spec.logit_softcap == 30.0
    assert spec.scales_embedding


@pytest.mark.parametrize(
    "own",
    [{"input_embedding_scale": 3.0}, {"output_multiplier": 0.5}, {"use_swa": True}],
    ids=["scale", "multiplier", "use_swa"],
)
def test_zlab_fields_that_would_change_the_result_are_refused(own: dict[str, Any]) -> None:
    config = changed(ZLAB, dflash_config=ZLAB["dflash_config"] | own)
    with pytest.raises(UnsupportedCheckpointError):
        read_spec(config, kind="zlab-dflash")


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (DEEPSPEC, "deepspec-dspark"),
        (changed(DEEPSPEC, markov_rank=0), "deepspec-dflash"),
        (SPECULATORS, "speculators-dspark"),
        (changed(SPECULATORS, speculators_model_type="dflash"), "speculators-dflash"),
        (ZLAB, "zlab-dflash"),
        (changed(ZLAB, architectures=...), "zlab-dflash"),
        (BACKBONE, None),
        (changed(BACKBONE, architectures=["Qwen3ForCausalLM"]), None),
        (changed(BACKBONE, architectures=None), None),
        ({}, None),
    ],
    ids=["deepspec", "rank-0", "spec", "spec-dflash", "zlab", "zlab-bare", "backbone", "lm",
         "null", "empty"],
)  # fmt: skip
def test_the_kind_is_told_from_the_raw_fields(config: dict[str, Any], kind: str | None) -> None:
    assert detect_kind(config) == kind


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "EAGLE"),
        ({"architectures": ["Qwen3Eagle3Model"]}, "EAGLE"),
        ({"speculators_model_type": "eagle3"}, "EAGLE"),
        ({"eagle_config": {}}, "EAGLE"),
        ({"speculators_model_type": "dflash2"}, "dflash2"),
        ({"speculators_model_type": "mtp"}, "mtp"),
        ({"architectures": ["DFlash2DraftModel"], "dflash_config": {}}, "DFlash2DraftModel"),
        (changed(ZLAB, dflash_config={"selector_rank": 4}), "DFlash2"),
        (changed(ZLAB, dflash_config={"projector_type": "domino"}), "domino"),
        (changed(ZLAB, dflash_config={"attention_mode": "mla"}), "mla"),
        (changed(ZLAB, architectures=["DSparkDraftModel"]), "DSparkDraftModel"),
        ({"architectures": ["Qwen3_5DSparkModel"]}, "Qwen3_5DSparkModel"),
        (changed(DEEPSPEC, architectures=["OtherModel"]), "OtherModel"),
    ],
)
def test_drafters_of_other_kinds_are_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=f"got .*{named}.*not supported") as caught:
        detect_kind(config)
    assert isinstance(caught.value, NotImplementedError)
    assert isinstance(caught.value, CheckpointError)
