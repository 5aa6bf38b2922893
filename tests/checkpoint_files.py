"""Checkpoints of block drafters for tests: golden ones, and tiny hand-made ones of each layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dspark_hf.drafting.checkpoints.base import tensor_shapes
from dspark_hf.drafting.checkpoints.load import read_spec

GOLDEN = Path(__file__).parent / "data" / "golden"
DEEPSPEC_SETS = ("vanilla_b5", "gated_b7", "rnn_b4", "dflashlike_b6", "noconf_b5")
SPECULATORS_SETS = ("speculators_pruned_b5", "speculators_rnn_maskfill_b6")
SETS = DEEPSPEC_SETS + SPECULATORS_SETS

BACKBONE: dict[str, Any] = {
    "attention_bias": False, "head_dim": 8, "hidden_act": "silu", "hidden_size": 16,
    "intermediate_size": 24, "max_position_embeddings": 128, "model_type": "qwen3",
    "num_attention_heads": 2, "num_hidden_layers": 2, "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "vocab_size": 40,
}  # fmt: skip
ZLAB: dict[str, Any] = {
    **BACKBONE, "architectures": ["DFlashDraftModel"], "num_target_layers": 6, "block_size": 4,
    "dflash_config": {"mask_token_id": 39, "target_layer_ids": [1, 3]},
}  # fmt: skip
DEEPSPEC: dict[str, Any] = {
    **BACKBONE, "architectures": ["Qwen3DSparkModel"], "block_size": 4, "mask_token_id": 39,
    "target_layer_ids": [0, 2], "num_target_layers": 6, "num_anchors": 8, "markov_rank": 4,
    "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip
GEMMA4: dict[str, Any] = {
    **{key: value for key, value in DEEPSPEC.items() if key not in ("hidden_act", "rope_theta")},
    "architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text",
    "hidden_activation": "gelu_pytorch_tanh", "global_head_dim": 12, "attention_k_eq_v": True,
    "num_key_value_heads": 2, "num_global_key_value_heads": 1, "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
SPECULATORS: dict[str, Any] = {
    "architectures": ["DSparkDraftModel"], "speculators_model_type": "dspark",
    "aux_hidden_state_layer_ids": [1, 3], "block_size": 4, "draft_vocab_size": 40,
    "mask_token_id": 39, "sample_from_anchor": True, "markov_rank": 4,
    "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True, "transformer_layer_config": BACKBONE,
}  # fmt: skip
KINDS_OF = {
    "Qwen3DSparkModel": "deepspec-dspark", "Gemma4DSparkModel": "deepspec-dspark",
    "DFlashDraftModel": "zlab-dflash", "DSparkDraftModel": "speculators-dspark",
}  # fmt: skip


def drafter_of(name: str) -> Path:
    """Folder of a golden drafter."""
    return GOLDEN / name / "drafter"


def golden_config(name: str) -> dict[str, Any]:
    """Content of a golden drafter's config.json."""
    return json.loads((drafter_of(name) / "config.json").read_text())


def golden_tensors(name: str) -> dict[str, torch.Tensor]:
    """All tensors of a golden drafter's file."""
    return load_file(drafter_of(name) / "model.safetensors")


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Copy a config with fields set, or dropped where the value is `...`."""
    merged = {**config, **changes}
    return {name: value for name, value in merged.items() if value is not ...}


def random_tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Random weights for a config of one of the layouts above."""
    generator = torch.Generator().manual_seed(0)
    spec = read_spec(config, kind=KINDS_OF[config["architectures"][0]])
    return {
        name: torch.randn(shape, generator=generator) for name, shape in tensor_shapes(spec).items()
    }


def write(folder: Path, config: object, tensors: dict[str, torch.Tensor] | None) -> Path:
    """Write a checkpoint as given, right or wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
