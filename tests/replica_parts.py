"""What tests send to replicas' processes, which import it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor


class HoldAt(LogitsProcessor):
    """Changes nothing, but waits at a length of the text until a file is gone."""

    dspark_per_row = True

    def __init__(self, gate: Path, length: int) -> None:
        self.gate, self.length = gate, length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        while input_ids.shape[1] >= self.length and self.gate.exists():
            time.sleep(0.01)
        return scores


class FailAt(LogitsProcessor):
    """Raises at a length of the text."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] >= self.length:
            raise ArithmeticError(f"at {input_ids.shape[1]} tokens")
        return scores


def no_model() -> Any:
    """Raise instead of loading one."""
    raise FileNotFoundError("no such checkpoint")
