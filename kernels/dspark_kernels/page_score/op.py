"""Public op: score cache pages for the newest queries."""

from __future__ import annotations

import torch

from dspark_kernels.checks import (
    FLOATS,
    INTEGERS,
    require_contiguous,
    require_dtype,
    require_groups,
    require_last_axis_contiguous,
    require_range,
    require_same_device,
    require_shape,
    runs_triton,
)
from dspark_kernels.page_score.reference import page_score_reference
from dspark_kernels.tiles import MIN_DOT, power_of_two

MAX_ROWS = {2: 128, 4: 32}
"""Query rows of a tile (heads of the group times tokens), by bytes per element: more would spill
registers."""


def page_score(
    query: torch.Tensor,  # [R, Hq, T, D]
    centre: torch.Tensor,  # [slots, Hkv, P, D]
    half: torch.Tensor,  # [slots, Hkv, P, D]
    slots: torch.Tensor,  # [R]
    num_pages: torch.Tensor,  # [R]
    *,
    scale: float,
    alpha: float = 0.5,
    num_queries: torch.Tensor | None = None,  # [R]
    max_pages: int | None = None,
) -> torch.Tensor:  # [R, Hkv, P]
    """Estimate which share of attention each page of a row gets, per key head.

    s = scale * (q . c + alpha * |q| . h) per query head and page, a softmax over the row's pages,
    then the mean over the heads of the group and the tokens: one selection serves the whole group
    and the whole draft, so a page is gathered once. The mean of softmaxes, not the maximum of raw
    scores: scores of different heads have different scales.

    Args:
        query: Queries of the newest T tokens, of shape (R, Hq, T, D).
        centre: Middle of each page's keys per channel, from `page_summary`.
        half: Half of their spread.
        slots: Cache slot of each row, of shape (R,).
        num_pages: Pages in use, of shape (R,).
        scale: Factor on the dot products, as in attention.
        alpha: 1 is Quest's upper bound of a key's score, 0 the score of the centre; 0.5 ranks best.
        num_queries: Real queries of each row, at the end of T; None means all T.
        max_pages: Pages of the result, at least the largest `num_pages`; None means P.

    Returns:
        torch.Tensor: Weights, float32 of shape (R, Hkv, max_pages), summing to 1 over a row's pages
        for each key head; 0 for pages not in use, and everywhere for rows without queries or pages.

    Raises:
        ValueError: If shapes, types or devices do not fit.
        NotImplementedError: On a GPU, for more query rows per key head or wider heads.

    Limits: group * T at most 128, float32 32 (one tile of rows, in registers); D at most 256.
    Numerics: float32 sums; summaries in the type of the queries. Bounds tested: 2e-5 relative RMS
    in float32; bfloat16 within 1.5e-2, as its products are exact and only summed in float32.
    Layout: `query` with a contiguous last axis; `centre` and `half` contiguous and of equal shape.
    Batch: a row's result does not depend on other rows.
    Cost: 2 * P * D elements per row and key head, 1/16 of its keys and values with pages of 16;
    plus 8 * G * T * P bytes of scores written and read.
    Source: Tang et al., Quest, arXiv:2406.10774, section 3 (the bound); softening, softmax and
    group mean are this project's; README.md says what they gain.
    """
    require_shape("query", query, ("R", "Hq", "T", "D"))
    num_rows, num_heads, most, dim = query.shape
    require_range("T", most, 1)
    require_shape("centre", centre, ("slots", "Hkv", "P", dim))
    require_shape("half", half, centre.shape)
    group = require_groups(num_heads, centre.shape[1])
    for name, tensor in (("query", query), ("centre", centre), ("half", half)):
        require_dtype(name, tensor, FLOATS)
        require_dtype(name, tensor, (query.dtype,))
    require_last_axis_contiguous("query", query)
    per_row = {"slots": slots, "num_pages": num_pages, "num_queries": num_queries}
    for name, counts in per_row.items():
        if counts is not None:
            require_shape(name, counts, (num_rows,))
            require_dtype(name, counts, INTEGERS)
            require_contiguous(name, counts)
    max_pages = centre.shape[2] if max_pages is None else max_pages
    require_range("max_pages", max_pages, 0, centre.shape[2])
    device = require_same_device(
        query=query, centre=centre, half=half, slots=slots, num_pages=num_pages,
        num_queries=num_queries,
    )  # fmt: skip
    if not runs_triton(device):
        return page_score_reference(
            query, centre, half, slots, num_pages,
            scale=scale, alpha=alpha, num_queries=num_queries, max_pages=max_pages,
        )  # fmt: skip
    from dspark_kernels.page_score.kernel import page_score_fwd

    require_contiguous("centre", centre)
    require_contiguous("half", half)
    most_rows = MAX_ROWS[query.element_size()]
    if power_of_two(group * most, MIN_DOT) > most_rows or dim > 256:
        raise NotImplementedError(
            f"query heads per key head x tokens must be at most {most_rows} and D at most 256; got "
            f"{group} x {most} and D {dim}. Score fewer tokens per call."
        )
    if num_queries is None:
        num_queries = torch.full_like(slots, most)
    out = torch.empty(num_rows, centre.shape[1], max_pages, dtype=torch.float32, device=device)
    page_score_fwd(
        query, centre, half, slots, num_pages, num_queries, out, scale=scale, alpha=alpha
    )
    return out
