"""A draft step over the whole vocabulary, against the sum and argmax in PyTorch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from dspark_kernels import costs
from dspark_kernels.markov_step.op import markov_step
from dspark_kernels.markov_step.reference import markov_step_reference
from dspark_kernels.testing.bounds import FLOAT32_RMS, relative_rms
from dspark_kernels.testing.timing import Case, main, shapes

if TYPE_CHECKING:
    from dspark_kernels.costs import Shape


def make_case(shape: Shape, device: str) -> Case:
    """Build one case: greedy, bfloat16."""
    base = torch.randn(shape.rows, shape.vocabulary, device=device).bfloat16()
    weight = torch.randn(shape.vocabulary, shape.rank, device=device).bfloat16() / shape.rank**0.5
    code = torch.randn(shape.rows, shape.rank, device=device).bfloat16()

    def plain() -> torch.Tensor:
        scores: torch.Tensor = base + code @ weight.T
        return scores.argmax(-1)

    def check() -> float:
        _, chosen, lse = markov_step(base, weight, code)
        _, best, total = markov_step_reference(base, weight, code)
        # By score: which of two that differ by rounding is chosen is free.
        return max(relative_rms(chosen, best), relative_rms(lse, total))

    return Case(
        f"{shape.rows} rows, vocabulary {shape.vocabulary}",
        partial(markov_step, base, weight, code),
        plain,
        "PyTorch",
        check,
        FLOAT32_RMS,
        costs.markov_step(shape).floor_us,
    )


def cases(device: str) -> list[Case]:
    """Return the cases of this op, one per batch size."""
    return [make_case(shape, device) for shape in shapes(device) if shape.tokens != 8]


if __name__ == "__main__":
    main(cases)
