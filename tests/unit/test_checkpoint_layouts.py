"""What each layout's fields mean: block size, readout, layer ids, vocabulary, mask, angles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_files import (
    BACKBONE,
    DEEPSPEC,
    GEMMA4,
    SPECULATORS,
    ZLAB,
    changed,
    drafter_of,
    golden_config,
    golden_tensors,
    random_tensors,
    write,
)
from dspark_hf.drafting.block.model import BlockModel
from dspark_hf.drafting.block.spec import BlockSpec
from dspark_hf.drafting.checkpoints.base import UnsupportedCheckpointError, tensor_shapes
from dspark_hf.drafting.checkpoints.detect import detect_kind
from dspark_hf.drafting.checkpoints.load import check_against_target, load_checkpoint, read_spec
from dspark_hf.drafting.checkpoints.vocabulary import target_ids
from dspark_hf.errors import CheckpointError

PRUNED = "speculators_pruned_b5"
OLD_ROPE = {key: value for key, value in BACKBONE.items() if key != "rope_theta"}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}


def spec_of(config: dict[str, Any]) -> BlockSpec:
    kind = detect_kind(config)
    assert kind is not None
    return read_spec(config, kind=kind)


def speculators(inner: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    config = changed(SPECULATORS, **changes)
    return config | {"transformer_layer_config": changed(BACKBONE, **(inner or {}))}


def test_s08_the_block_size_is_the_checkpoints_own_and_gives_the_number_of_drafts() -> None:
    drafts = {
        name: load_checkpoint(drafter_of(name)).spec.num_drafts
        for name in ("vanilla_b5", "gated_b7", "dflashlike_b6", "speculators_rnn_maskfill_b6")
    }
    assert drafts == {
        "vanilla_b5": 5, "gated_b7": 7, "dflashlike_b6": 6, "speculators_rnn_maskfill_b6": 5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "reads_anchor"),
    [
        (DEEPSPEC, True),
        (changed(DEEPSPEC, markov_rank=0, confidence_head_with_markov=False), True),
        (ZLAB, False),
        (SPECULATORS, True),
        (speculators(sample_from_anchor=False), False),
        (speculators(speculators_model_type="dflash", sample_from_anchor=...), False),
        (speculators(speculators_model_type="dflash", sample_from_anchor=True), True),
    ],
    ids=["deepspec", "deepspec-rank-0", "zlab", "spec-true", "spec-false", "dflash", "dflash-true"],
)
def test_s10_the_readout_follows_from_the_checkpoints_fields(
    config: dict[str, Any], reads_anchor: bool
) -> None:
    spec = spec_of(config)
    assert spec.reads_anchor is reads_anchor
    assert spec.num_drafts == (4 if reads_anchor else 3)


@pytest.mark.parametrize(("proposed", "reads_anchor"), [(4, True), (3, False)])
def test_s10_without_the_field_the_published_number_of_drafts_tells_the_readout(
    proposed: int, reads_anchor: bool
) -> None:
    methods = {"proposal_methods": [{"speculative_tokens": proposed}]}
    config = speculators(sample_from_anchor=..., speculators_config=methods)
    assert spec_of(config).reads_anchor is reads_anchor


@pytest.mark.parametrize("methods", [[], [{"speculative_tokens": 2}], None])
def test_s10_a_readout_that_cannot_be_told_is_an_error_and_not_a_guess(methods: Any) -> None:
    config = speculators(sample_from_anchor=..., speculators_config={"proposal_methods": methods})
    with pytest.raises(CheckpointError, match="must say sample_from_anchor"):
        spec_of(config)


def test_s11_both_formats_of_a_drafter_tap_the_same_blocks() -> None:
    assert spec_of(DEEPSPEC).target_layers == (0, 2)
    assert spec_of(SPECULATORS).target_layers == (0, 2)
    assert spec_of(ZLAB).target_layers == (1, 3)
    embedding = speculators(aux_hidden_state_layer_ids=[0, 3])
    assert spec_of(embedding).target_layers == (-1, 2)
    assert spec_of(changed(DEEPSPEC, target_layer_ids=[-1, 2])).target_layers == (-1, 2)


def test_s11_a_layer_id_equal_to_the_layer_count_raises() -> None:
    with pytest.raises(CheckpointError, match=r"below num_target_layers 6; got 6"):
        spec_of(changed(DEEPSPEC, target_layer_ids=[0, 6]))
    spec = spec_of(speculators(aux_hidden_state_layer_ids=[1, 7]))
    with pytest.raises(CheckpointError, match=r"-1 \(the embedding\) and 5 .* got 6"):
        check_against_target(spec, hidden_size=16, num_layers=6, vocab_size=40)


def test_s11_the_last_block_may_be_tapped_only_where_the_format_reads_it_unnormed(
    tmp_path: Path,
) -> None:
    shape = {"hidden_size": 16, "num_layers": 6, "vocab_size": 40}
    config = speculators(aux_hidden_state_layer_ids=[1, 6])
    raw = load_checkpoint(write(tmp_path / "raw", config, random_tensors(config)))
    check_against_target(raw, **shape)
    config = changed(DEEPSPEC, target_layer_ids=[0, 5])
    normed = load_checkpoint(write(tmp_path / "normed", config, random_tensors(config)))
    with pytest.raises(CheckpointError, match=r"below 5, the target's last block.*norms; got 5"):
        check_against_target(normed, **shape)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"hidden_size": 32}, "hidden_size must be the target's 32; got 16"),
        ({"num_layers": 12}, "target of 12 blocks; got one for 6"),
        ({"vocab_size": 39}, "at least the drafter's 40 rows; got 39"),
    ],
)
def test_s11_a_drafter_for_another_target_is_refused_with_both_numbers(
    shape: dict[str, int], message: str
) -> None:
    fitting = {"hidden_size": 16, "num_layers": 6, "vocab_size": 40}
    check_against_target(spec_of(DEEPSPEC), **fitting)
    with pytest.raises(CheckpointError, match=message):
        check_against_target(spec_of(DEEPSPEC), **(fitting | shape))


def test_s12_what_is_borrowed_is_told_by_the_tensors_that_are_present(tmp_path: Path) -> None:
    tensors = random_tensors(SPECULATORS)
    bare = load_checkpoint(write(tmp_path / "bare", SPECULATORS, tensors))
    assert bare.embed is None
    assert bare.head is None
    # A padded target is larger and still the drafter's own.
    check_against_target(bare, hidden_size=16, num_layers=6, vocab_size=64)
    own = tensors | {"lm_head.weight": torch.ones(40, 16)}
    with_head = load_checkpoint(write(tmp_path / "own", SPECULATORS, own))
    assert with_head.embed is None
    assert torch.equal(with_head.head, torch.ones(40, 16))


def test_s13_the_table_holds_offsets_and_maps_into_the_kept_ids() -> None:
    checkpoint = load_checkpoint(drafter_of(PRUNED))
    kept = golden_tensors(PRUNED)["t2d"].nonzero().flatten()
    assert checkpoint.spec.is_pruned
    assert checkpoint.d2t.dtype == torch.int64
    assert torch.equal(target_ids(checkpoint.d2t), kept)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d2t": None, "t2d": None}, "96 out of 160 ids must come with the table d2t; got none"),
        ({"d2t": torch.zeros(96, dtype=torch.int64), "t2d": None}, "got zeros and no t2d"),
        ({"d2t": torch.zeros(96, dtype=torch.int64)}, "t2d must keep the 96 ids"),
        ({"d2t": torch.zeros(95, dtype=torch.int64)}, r"shape \(96,\); got .* of shape \(95,\)"),
        ({"d2t": torch.zeros(96)}, "must be integers"),
        ({"d2t": torch.arange(96, 0, -1)}, "must increase"),
        ({"d2t": torch.arange(96)}, r"between 0 and 159; got 0 to 190"),
        ({"d2t": torch.full((96,), -1)}, r"between 0 and 159; got -1 to 94"),
        ({"t2d": torch.ones(150, dtype=torch.bool)}, r"target's 160 ids; got shape \(150,\)"),
        ({"t2d": torch.zeros(160, dtype=torch.bool)}, "t2d must keep the 96 ids"),
    ],
    ids=["none", "zeros", "zeros-t2d", "short", "float", "falling", "high", "low", "t2d-short",
         "t2d-empty"],
)  # fmt: skip
def test_s13_a_reduced_vocabulary_without_a_valid_table_is_an_error(
    changes: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    tensors = {**golden_tensors(PRUNED), **changes}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(write(tmp_path, golden_config(PRUNED), tensors))


def test_s13_the_first_ids_are_kept_only_if_the_inverse_says_so(tmp_path: Path) -> None:
    zeros, first = torch.zeros(96, dtype=torch.int64), torch.arange(160) < 96
    tensors = {**golden_tensors(PRUNED), "d2t": zeros, "t2d": first}
    checkpoint = load_checkpoint(write(tmp_path, golden_config(PRUNED), tensors))
    assert torch.equal(target_ids(checkpoint.d2t), torch.arange(96))


def test_s13_a_table_beside_the_whole_vocabulary_must_change_nothing(tmp_path: Path) -> None:
    tensors = random_tensors(SPECULATORS)
    zeros = torch.zeros(40, dtype=torch.int64)
    loaded = load_checkpoint(write(tmp_path / "a", SPECULATORS, tensors | {"d2t": zeros}))
    assert loaded.d2t is None
    with pytest.raises(CheckpointError, match="d2t must be zero"):
        load_checkpoint(write(tmp_path / "b", SPECULATORS, tensors | {"d2t": zeros + 1}))


@pytest.mark.parametrize(
    "places",
    [
        {"mask_token_id": 39, "dflash_config": {"target_layer_ids": [1, 3]}},
        {"dflash_config": {"target_layer_ids": [1, 3], "mask_token_id": 39}},
        {"mask_token_id": 39, "dflash_config": {"target_layer_ids": [1, 3], "mask_token_id": 39}},
    ],
    ids=["top", "nested", "both"],
)
def test_s14_the_mask_token_is_found_at_the_top_or_nested(places: dict[str, Any]) -> None:
    assert spec_of(changed(ZLAB, **places)).mask_token_id == 39


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed(ZLAB, mask_token_id=38), "mask_token_id 38, dflash_config.mask_token_id 39"),
        (changed(ZLAB, dflash_config={"target_layer_ids": [1]}), "got neither"),
        (changed(DEEPSPEC, mask_token_id=...), "got neither"),
        (speculators(mask_token_id=None), "got neither"),
        (speculators(mask_token_id=40), "below the embedding's 40 rows; got 40"),
        (changed(DEEPSPEC, mask_token_id=41), "below the embedding's 40 rows; got 41"),
        (changed(DEEPSPEC, mask_token_id=-1), "at least 0; got -1"),
    ],
    ids=["differ", "absent-zlab", "absent-deepspec", "null", "too-high", "higher", "negative"],
)
def test_s14_a_mask_token_that_is_absent_doubtful_or_out_of_range_is_an_error(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_of(config)


@pytest.mark.parametrize("layout", [DEEPSPEC, ZLAB, SPECULATORS], ids=["deepspec", "zlab", "spec"])
@pytest.mark.parametrize(
    ("place", "base"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, 5e5),
        ({"rope_theta": 5e5, "rope_parameters": None, "rope_scaling": None}, 5e5),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, 5e5),
        ({}, None),
        ({"rope_parameters": {"rope_type": "default"}}, None),
        ({"rope_parameters": {"rope_theta": None}}, None),
    ],
    ids=["top", "nested", "nested-first", "null-nested", "by-type", "none", "empty", "null"],
)
def test_s15_the_rotary_base_is_nested_or_at_the_top_and_never_a_default(
    layout: dict[str, Any], place: dict[str, Any], base: float | None
) -> None:
    backbone = {"rope_theta": ..., **place}
    config = speculators(backbone) if layout is SPECULATORS else changed(layout, **backbone)
    if base is None:
        with pytest.raises(CheckpointError, match="rope_theta; got neither"):
            spec_of(config)
    else:
        assert spec_of(config).rope_theta == base


def test_s15_layer_types_and_windows_are_honoured() -> None:
    spec = spec_of(changed(ZLAB, **MIXED))
    assert spec.layer_types == ("sliding_attention", "full_attention")
    assert spec.sliding_window == 8
    assert spec_of(changed(ZLAB, sliding_window=8)).sliding_window is None
    qwen3 = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    assert spec_of(changed(ZLAB, **qwen3)).layer_types == ("full_attention", "sliding_attention")
    with pytest.raises(CheckpointError, match="use_sliding_window must be true"):
        spec_of(changed(ZLAB, **MIXED, use_sliding_window=False))
    with pytest.raises(CheckpointError, match="must say sliding_window"):
        spec_of(changed(ZLAB, layer_types=MIXED["layer_types"]))


def test_s15_rotary_bases_by_layer_type_are_kept_apart() -> None:
    by_type = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    spec = spec_of(changed(ZLAB, **MIXED, rope_parameters=by_type))
    assert (spec.rope_theta, spec.sliding_rope_theta) == (1e6, 1e4)
    # The speculators library takes the sliding entry for every layer.
    spec = spec_of(speculators({**MIXED, "rope_parameters": by_type}))
    assert (spec.rope_theta, spec.sliding_rope_theta) == (1e4, None)


@pytest.mark.parametrize(
    ("config", "is_causal"),
    [
        (changed(ZLAB, **MIXED), True),
        (changed(ZLAB, **MIXED, is_causal=False), False),
        (changed(ZLAB, **SLIDING, is_causal=True), True),
        (changed(ZLAB, **SLIDING, dflash_config={**ZLAB["dflash_config"], "causal": False}), False),
        (ZLAB, False),
        (speculators(MIXED), True),
        (speculators(MIXED, sliding_window_non_causal=True), False),
        (speculators(), False),
        (DEEPSPEC, False),
    ],
    ids=["zlab", "zlab-false", "zlab-true", "zlab-nested", "zlab-full", "spec", "spec-non-causal",
         "spec-full", "deepspec"],
)  # fmt: skip
def test_s15_the_causal_flag_inside_the_block_is_honoured(
    config: dict[str, Any], is_causal: bool
) -> None:
    assert spec_of(config).sliding_is_causal is is_causal


def test_s15_causal_full_layers_are_refused() -> None:
    with pytest.raises(UnsupportedCheckpointError, match="is_causal must be false"):
        spec_of(changed(ZLAB, is_causal=True))


@pytest.mark.parametrize(
    "scaled",
    [
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"partial_rotary_factor": 0.5},
    ],
)
def test_s15_scaled_rotary_angles_are_refused_and_not_ignored(scaled: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=r"rope_type|partial_rotary_factor"):
        spec_of(changed(ZLAB, **scaled))


def test_a_gemma4_drafter_of_deepspec_is_read_with_all_that_differs(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(write(tmp_path, GEMMA4, random_tensors(GEMMA4)))
    spec = checkpoint.spec
    assert (spec.flavour, spec.hidden_act) == ("gemma4", "gelu_pytorch_tanh")
    assert (spec.head_dim_of(0), spec.kv_heads_of(0)) == (12, 1)
    assert (spec.rope_theta, spec.rope_partial) == (1e6, 0.25)
    assert (spec.attention_scale, spec.logit_softcap) == (1.0, 30.0)
    assert spec.scales_embedding
    assert spec.shares_key_value
    assert "layers.0.self_attn.v_proj.weight" not in checkpoint.tensors
    BlockModel(spec).load_state_dict(checkpoint.tensors, strict=True)
    unshared = changed(GEMMA4, attention_k_eq_v=False)
    assert tensor_shapes(spec_of(unshared))["layers.0.self_attn.v_proj.weight"] == (24, 16)


@pytest.mark.parametrize(
    "changes",
    [
        {"enable_moe_block": True},
        {"hidden_size_per_layer_input": 8},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
    ],
)
def test_gemma4_layers_that_deepspec_has_no_code_for_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedCheckpointError):
        spec_of(changed(GEMMA4, **changes))
