"""Acceptance and one draw per row, against the same rule with PyTorch's own draw."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from dspark_kernels import costs
from dspark_kernels.rejection_sampling.op import rejection_sample
from dspark_kernels.rejection_sampling.reference import rejection_sample_reference
from dspark_kernels.testing.timing import Case, main, shapes

if TYPE_CHECKING:
    from dspark_kernels.costs import Shape

DRAFTS = 7
"""Tokens of a draft block."""


def make_case(shape: Shape, device: str) -> Case:
    """Build one case: drafts of a drafter that agrees with the target more often than not."""
    scores = torch.randn(shape.rows, DRAFTS + 1, shape.vocabulary, device=device)
    noise = 0.3 * torch.randn(shape.rows, DRAFTS, shape.vocabulary, device=device)
    target = torch.softmax(3 * scores, -1)
    draft = torch.softmax(3 * (scores[:, :-1] + noise), -1)
    ids = torch.multinomial(draft.flatten(0, 1), 1).view(shape.rows, DRAFTS)
    lengths = torch.full((shape.rows,), DRAFTS, device=device)
    uniforms = torch.rand(shape.rows, DRAFTS + 1, device=device)
    given = (ids, target, draft, lengths, uniforms)

    def plain() -> torch.Tensor:
        index = ids[..., None]
        ratio = (target[:, :-1].gather(-1, index) / draft.gather(-1, index))[..., 0]
        count = (uniforms[:, :-1] < ratio).long().cumprod(-1).sum(-1)
        rows = torch.arange(len(count), device=device)
        padded = torch.cat([draft, torch.zeros_like(draft[:, :1])], 1)
        rest = (target[rows, count] - padded[rows, count]).clamp(min=0)
        return torch.multinomial(rest, 1)

    def check() -> float:
        ours, expected = rejection_sample(*given), rejection_sample_reference(*given)
        return float((ours[0] != expected[0]).float().mean())

    run, floor = partial(rejection_sample, *given), costs.rejection_sampling(shape).floor_us
    name = f"{shape.rows} rows, vocabulary {shape.vocabulary}"
    return Case(name, run, plain, "PyTorch", check, 0.0, floor)


def cases(device: str) -> list[Case]:
    """Return the cases of this op, one per batch size."""
    return [make_case(shape, device) for shape in shapes(device) if shape.tokens != 8]


if __name__ == "__main__":
    main(cases)
