"""Summaries of pages.

Regimes: one token, a page's edges, a run over several pages (a page too few at the end), ragged
rows, an empty row; odd widths (a missing mask); NaN beyond the row's length (a maximum over
positions not in use); every rollback offset within a page against a rebuild from nothing; slots in
another order than rows; summaries of pages that were not touched stay bit for bit.
"""

import pytest
import torch

from dspark_kernels.page_summary.op import rebuild_tail_pages, update_page_summaries
from dspark_kernels.page_summary.reference import update_page_summaries_reference
from dspark_kernels.testing.bounds import assert_close, guarded
from dspark_kernels.testing.interpreter import count_launches

EXACT = {torch.float32: 0.0, torch.bfloat16: 2**-7}
"""float32: the same operations; bfloat16: one rounding, by truncation in the interpreter."""
UNTOUCHED = -3.0

SHAPES = {  # past and length per row, Hkv, D, page
    "first-token": (((0, 1),), 1, 16, 16),
    "page-edges": (((15, 16), (16, 17), (14, 18)), 2, 16, 16),
    "prompt": (((0, 53), (3, 40)), 2, 24, 16),
    "empty-row": (((0, 0), (30, 33)), 1, 7, 16),
    "small-pages": (((5, 29),), 3, 8, 8),
}


def make_cache(shape, dtype, device):
    spans, num_kv, dim, page = shape
    generator = torch.Generator().manual_seed(dim)
    longest = max(end for _, end in spans)
    key = torch.full((len(spans) + 1, num_kv, longest + 9, dim), torch.nan)
    slots = torch.arange(len(spans), 0, -1)
    for slot, (_, end) in zip(slots.tolist(), spans, strict=True):
        key[slot, :, :end] = torch.randn(num_kv, end, dim, generator=generator)
    summary = torch.full((len(spans) + 1, num_kv, longest // page + 3, dim), UNTOUCHED)
    past, lengths = torch.tensor(spans, device=device).unbind(1)
    where = [slots.to(device), past.contiguous(), lengths.contiguous()]
    return key.to(device, dtype), summary.to(device, dtype), where


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_summarises_like_the_reference(shape, dtype, device, monkeypatch):
    from dspark_kernels.page_summary import kernel

    key, summary, where = make_cache(shape, dtype, device)
    centre, half = guarded(summary), guarded(summary)
    expected = [summary.clone(), summary.clone()]
    most = max(end - start for start, end in shape[0])
    launches = count_launches(monkeypatch, kernel._page_summary_fwd_kernel)
    kernel.update_page_summaries_fwd(
        key, centre.tensor, half.tensor, *where, max_new_tokens=most, page_size=shape[3]
    )
    update_page_summaries_reference(key, *expected, *where, page_size=shape[3])
    for ours, reference in ((centre, expected[0]), (half, expected[1])):
        assert_close(ours.tensor, reference, EXACT[dtype])
        same = reference == UNTOUCHED
        assert torch.equal(ours.tensor[same], reference[same])
        ours.assert_intact()
    assert len(launches) == 1


@pytest.mark.parametrize("length", range(16, 50))
def test_after_a_rollback_summaries_equal_a_rebuild(length):
    key, summary, where = make_cache((((0, 50),), 2, 8, 16), torch.float32, "cpu")
    slots = where[0]
    used = -(-length // 16)
    rolled, rebuilt = [summary.clone(), summary.clone()], [summary.clone(), summary.clone()]
    update_page_summaries(key, *rolled, *where, max_new_tokens=50)
    rebuild_tail_pages(key, *rolled, slots, torch.tensor([length]))
    update_page_summaries(
        key, *rebuilt, slots, torch.tensor([0]), torch.tensor([length]), max_new_tokens=50
    )
    for ours, expected in zip(rolled, rebuilt, strict=True):
        assert torch.equal(ours[slots, :, :used], expected[slots, :, :used])


def test_token_by_token_equals_all_at_once():
    key, summary, where = make_cache((((0, 37),), 2, 8, 16), torch.float32, "cpu")
    stepped, whole = [summary.clone(), summary.clone()], [summary.clone(), summary.clone()]
    for past in range(37):
        span = (torch.tensor([past]), torch.tensor([past + 1]))
        update_page_summaries(key, *stepped, where[0], *span, max_new_tokens=1)
    update_page_summaries(key, *whole, *where, max_new_tokens=37)
    assert torch.equal(stepped[0], whole[0])
    assert torch.equal(stepped[1], whole[1])


def test_wrong_arguments_are_named():
    key, summary, where = make_cache(SHAPES["first-token"], torch.float32, "cpu")
    with pytest.raises(ValueError, match="half must have shape"):
        update_page_summaries(key, summary, summary[:, :, :1], *where, max_new_tokens=1)
    with pytest.raises(ValueError, match="page_size must be a power of two; got 12"):
        update_page_summaries(key, summary, summary, *where, max_new_tokens=1, page_size=12)
