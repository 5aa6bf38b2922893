"""Dense attention of a ragged step, against SDPA with grouped heads."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - the field's own abbreviation

from dspark_kernels import costs
from dspark_kernels.ragged_attention.op import ragged_attention
from dspark_kernels.testing.bounds import BFLOAT16_RMS, relative_rms
from dspark_kernels.testing.timing import Case, main, shapes, title

if TYPE_CHECKING:
    from dspark_kernels.costs import Shape


def make_case(shape: Shape, device: str) -> Case:
    """Build one case: rows of the same length, so that SDPA can take them as a batch."""
    cache = (shape.rows, shape.kv_heads, shape.context, shape.dim)
    key = torch.randn(cache, device=device, dtype=torch.bfloat16)
    value = torch.randn(cache, device=device, dtype=torch.bfloat16)
    total, past = shape.rows * shape.tokens, shape.context - shape.tokens
    query = torch.randn(total, shape.heads, shape.dim, device=device).bfloat16()
    segments = [(row, past, shape.tokens) for row in range(shape.rows)]
    scale = shape.dim**-0.5
    batched = query.unflatten(0, (shape.rows, shape.tokens)).transpose(1, 2)
    place = past + torch.arange(shape.tokens, device=device)[:, None]
    mask = torch.arange(shape.context, device=device) <= place
    dense = partial(F.scaled_dot_product_attention, attn_mask=mask, scale=scale, enable_gqa=True)

    def check() -> float:
        ours = ragged_attention(query, key, value, segments, scale=scale)
        exact = dense(batched.float(), key.float(), value.float())
        return relative_rms(ours, exact.transpose(1, 2).flatten(0, 1))

    return Case(
        title(shape),
        partial(ragged_attention, query, key, value, segments, scale=scale),
        partial(dense, batched, key, value),
        "SDPA with a mask",
        check,
        BFLOAT16_RMS,
        costs.ragged_attention(shape).floor_us,
    )


def cases(device: str) -> list[Case]:
    """Return the cases of this op."""
    return [make_case(shape, device) for shape in shapes(device)]


if __name__ == "__main__":
    main(cases)
