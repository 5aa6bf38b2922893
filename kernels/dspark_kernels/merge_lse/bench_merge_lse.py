"""The merge of paged attention's splits, against the same arithmetic in PyTorch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from dspark_kernels import costs
from dspark_kernels.merge_lse.op import merge_lse
from dspark_kernels.merge_lse.reference import merge_lse_reference
from dspark_kernels.testing.bounds import BFLOAT16_RMS, relative_rms
from dspark_kernels.testing.timing import Case, main, shapes, title
from dspark_kernels.tiles import ceil_div

if TYPE_CHECKING:
    from dspark_kernels.costs import Shape


def make_case(shape: Shape, device: str) -> Case:
    """Build one case: as many parts as the kept tokens have splits."""
    parts = ceil_div(shape.kept, costs.SPLIT_LISTED)
    whole = (parts, shape.rows, shape.heads, shape.tokens)
    outs = torch.randn(*whole, shape.dim, device=device)
    lses = 5 * torch.randn(whole, device=device)

    def check() -> float:
        out, _ = merge_lse(outs, lses, dtype=torch.bfloat16)
        return relative_rms(out, merge_lse_reference(outs, lses)[0])

    return Case(
        title(shape),
        partial(merge_lse, outs, lses, dtype=torch.bfloat16),
        partial(merge_lse_reference, outs, lses),
        "PyTorch",
        check,
        BFLOAT16_RMS,
        costs.merge_lse(shape).floor_us,
    )


def cases(device: str) -> list[Case]:
    """Return the cases of this op."""
    return [make_case(shape, device) for shape in shapes(device)]


if __name__ == "__main__":
    main(cases)
