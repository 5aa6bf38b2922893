"""Drafters that ship with the project, found by what their target looks like."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dspark_hf import compat
from dspark_hf.drafting.block.vocabulary import loaded_weight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

TARGET_FILE = "target.json"
"""Beside a drafter's config.json: what its target looks like."""
SAMPLE_ROWS = 8
"""Embedding rows kept to tell targets of one shape apart."""
SAMPLE_WIDTH = 32
"""Numbers kept of each."""
MIN_SIMILARITY = 0.98
"""Cosine of the samples from which two targets count as one: quantised copies of a model still do,
its other trainings with the same beginnings do too, and unrelated models do not."""


def target_signature(target: PreTrainedModel) -> dict[str, Any]:
    """Return what a target looks like, to be stored beside its drafter."""
    config = compat.text_config(target)
    weight = loaded_weight(target.get_input_embeddings())
    rows = [int(i) for i in torch.linspace(0, weight.shape[0] - 1, SAMPLE_ROWS)]
    sample = weight.detach()[rows, :SAMPLE_WIDTH].float().cpu()
    return {
        "model_type": config.model_type,
        "hidden_size": int(config.hidden_size),
        "num_hidden_layers": int(config.num_hidden_layers),
        "rows": rows,
        "sample": [[round(float(x), 4) for x in row] for row in sample],
    }


def matches(target: PreTrainedModel, signature: dict[str, Any]) -> bool:
    """Tell whether a drafter with this signature was made for the target."""
    own = target_signature(target)
    names = ("model_type", "hidden_size", "num_hidden_layers", "rows")
    if any(own[name] != signature.get(name) for name in names):
        return False
    ours, theirs = torch.tensor(own["sample"]), torch.tensor(signature["sample"])
    cosine = torch.nn.functional.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0)
    return bool(cosine >= MIN_SIMILARITY)


def shipped_folders() -> Sequence[Path]:
    """Return the folders of all drafters that ship: in a checkout, then where pip installs data."""
    checkout = Path(__file__).resolve().parents[2] / "model_cards"
    installed = Path(sysconfig.get_path("data")) / "share" / "dspark_hf" / "model_cards"
    roots = (checkout, installed)
    return [path.parent for root in roots for path in sorted(root.glob(f"*/{TARGET_FILE}"))]


def find_shipped(target: PreTrainedModel) -> Path | None:
    """Return the folder of the drafter that ships for a target, or None."""
    for folder in shipped_folders():
        signature = json.loads((folder / TARGET_FILE).read_text(encoding="utf-8"))
        if matches(target, signature):
            return folder
    return None
