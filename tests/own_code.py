"""What a caller brings along to a request, and what fails after some calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from harness import Recorder


class Raises:
    """A processor, criterion or streamer that fails after some calls."""

    dspark_per_row = True

    def __init__(self, after: int) -> None:
        self.left = after

    def fail(self, value: Any = None) -> Any:
        if self.left == 0:
            raise ArithmeticError("mine")
        self.left -= 1
        return value

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.fail(scores)


class Criterion(Raises):
    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return self.fail(torch.zeros(len(ids), dtype=torch.bool))


class Streamer(Raises, Recorder):
    def __init__(self, after: int) -> None:
        Recorder.__init__(self)
        self.left = after

    def put(self, value: torch.Tensor) -> None:
        self.fail()


class LastWord(Recorder):
    def end(self) -> None:
        raise ArithmeticError("mine")


OWN_CODE: dict[str, Callable[[], dict[str, Any]]] = {
    "a processor": lambda: {"logits_processor": [Raises(3)]},
    "a processor at the first token": lambda: {"logits_processor": [Raises(0)]},
    "a criterion": lambda: {"stopping_criteria": [Criterion(4)]},
    "a streamer": lambda: {"streamer": Streamer(3)},
    "a streamer at its end": lambda: {"streamer": LastWord()},
    "scores that leave no token": lambda: {
        "do_sample": True, "logits_processor": [lambda ids, scores: scores * float("nan")],
    },
}  # fmt: skip
