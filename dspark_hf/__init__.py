"""dspark_hf: the same generate() call, the same tokens, sooner."""

from dspark_hf.config import DSparkConfig
from dspark_hf.drafting.base import Drafter
from dspark_hf.metrics import SpeculationRecord
from dspark_hf.model import DSparkForCausalLM
from dspark_hf.values import DraftRequest, Proposal

__all__ = [
    "DSparkConfig",
    "DSparkForCausalLM",
    "DraftRequest",
    "Drafter",
    "Proposal",
    "SpeculationRecord",
]
