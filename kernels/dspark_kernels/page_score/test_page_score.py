"""Scores of pages.

Regimes: one token and several, rows with fewer (a mean over queries that are not there); groups of
1, 3 and 8; odd widths; one page, a block's edge, several blocks (softmax sums across blocks), a row
without pages; NaN in summaries of pages not in use; alpha 0, 0.5 and 1; scores far apart (a softmax
without its shift).
"""

import pytest
import torch

from dspark_kernels.page_score.op import page_score
from dspark_kernels.page_score.reference import page_score_reference
from dspark_kernels.testing.bounds import RELATIVE_RMS, assert_close, poisoned
from dspark_kernels.testing.interpreter import count_launches

SHAPES = {  # pages per row, (Hq, Hkv), T, real queries, D, alpha, scale
    "one-page": ((1,), (1, 1), 1, None, 16, 0.5, 0.3),
    "several-blocks": ((130, 31), (4, 2), 1, None, 16, 0.5, 0.3),
    "block-edges": ((16, 64, 65), (2, 1), 2, None, 24, 1.0, 0.3),
    "ragged-drafts": ((20, 7, 9), (6, 2), 5, (5, 1, 3), 16, 0.5, 0.3),
    "group-of-8": ((12,), (8, 1), 3, None, 32, 0.0, 0.3),
    "no-pages": ((0, 5), (2, 2), 2, None, 16, 0.5, 0.3),
    "far-apart": ((40,), (3, 1), 2, None, 16, 0.5, 30.0),
}


def make_inputs(shape, dtype, device):
    pages, (heads, num_kv), tokens, real, dim, alpha, scale = shape
    generator = torch.Generator().manual_seed(len(pages) + heads)
    query = torch.randn(len(pages), heads, tokens, dim, generator=generator)
    centre = torch.full((len(pages) + 1, num_kv, max(pages) + 2, dim), torch.nan)
    half = torch.full_like(centre, torch.nan)
    slots = torch.arange(len(pages), 0, -1)
    for slot, count in zip(slots.tolist(), pages, strict=True):
        centre[slot, :, :count] = torch.randn(num_kv, count, dim, generator=generator)
        half[slot, :, :count] = torch.rand(num_kv, count, dim, generator=generator)
    given = [query.to(device, dtype), centre.to(device, dtype), half.to(device, dtype)]
    given += [slots.to(device), torch.tensor(pages, device=device)]
    counts = torch.tensor(real or [tokens] * len(pages), device=device)
    return given, {"scale": scale, "alpha": alpha}, counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_scores_like_the_reference(shape, dtype, device, monkeypatch):
    from dspark_kernels.page_score import kernel

    inputs, form, counts = make_inputs(shape, dtype, device)
    num_rows, num_kv, most = len(shape[0]), shape[1][1], max(shape[0])
    out = poisoned((num_rows, num_kv, most + 1), torch.float32, device)
    launches = count_launches(monkeypatch, kernel._page_score_fwd_kernel)
    kernel.page_score_fwd(*inputs, counts, out.tensor, **form)
    expected = page_score_reference(
        *inputs, **form, num_queries=counts, max_pages=most + 1, dtype=torch.float64
    )
    assert_close(out.tensor, expected, RELATIVE_RMS[dtype])
    in_use = torch.arange(most + 1) < torch.tensor(shape[0])[:, None]
    assert (out.tensor.cpu()[~in_use[:, None].expand(-1, num_kv, -1)] == 0).all()
    out.assert_intact()
    assert len(launches) == 1


def test_weights_of_a_key_head_sum_to_one():
    inputs, form, counts = make_inputs(SHAPES["ragged-drafts"], torch.float32, "cpu")
    weights = page_score(*inputs, **form, num_queries=counts)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 2))


def test_queries_that_are_not_there_do_not_count():
    inputs, form, _ = make_inputs(SHAPES["ragged-drafts"], torch.float32, "cpu")
    last = [inputs[0][:, :, -2:], *inputs[1:]]
    two = torch.full((3,), 2)
    assert torch.equal(page_score(*inputs, **form, num_queries=two), page_score(*last, **form))


def test_alpha_one_bounds_every_key_of_the_page():
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 1, 6, 16, 8, generator=generator)
    query = torch.randn(1, 1, 1, 8, generator=generator)
    top, low = keys.amax(3), keys.amin(3)
    bound = (query @ ((top + low) / 2)[0].mT + query.abs() @ ((top - low) / 2)[0].mT).flatten()
    assert (bound >= (keys @ query[..., None])[0, 0, ..., 0].amax(1) - 1e-5).all()


def test_wrong_arguments_are_named():
    inputs, form, _ = make_inputs(SHAPES["one-page"], torch.float32, "cpu")
    with pytest.raises(ValueError, match="max_pages must be between 0 and 3; got 9"):
        page_score(*inputs, **form, max_pages=9)
    with pytest.raises(ValueError, match="half must have shape"):
        page_score(*inputs[:2], inputs[2][:, :, :1], *inputs[3:], **form)
