"""dspark_hf: the same generate() call, the same tokens, sooner."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark_hf.config import DSparkConfig
    from dspark_hf.drafting.base import Drafter
    from dspark_hf.metrics import SpeculationRecord
    from dspark_hf.model import DSparkForCausalLM
    from dspark_hf.queue_settings import QueueConfig
    from dspark_hf.serving.queue import GenerationQueue
    from dspark_hf.values import DraftRequest, Proposal

__version__ = "0.1.0"
__all__ = [
    "DSparkConfig",
    "DSparkForCausalLM",
    "DraftRequest",
    "Drafter",
    "GenerationQueue",
    "Proposal",
    "QueueConfig",
    "SpeculationRecord",
]

_HOMES = {
    "DSparkConfig": "config",
    "DSparkForCausalLM": "model",
    "DraftRequest": "values",
    "Drafter": "drafting.base",
    "GenerationQueue": "serving.queue",
    "Proposal": "values",
    "QueueConfig": "queue_settings",
    "SpeculationRecord": "metrics",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: torch and Transformers take seconds to import."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
