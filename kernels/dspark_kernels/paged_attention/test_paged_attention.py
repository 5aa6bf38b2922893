"""Attention over page lists.

Regimes: one token and several; odd lengths and lengths at a page's edge (a mask off by one); a row
shorter than its tokens and an empty row (-inf minus -inf); one head per key head, groups of 3 and
8; odd and unequal widths (masks along D); gaps in the list (a kernel that walks the sequence);
lists over several splits (the merge) of which some are empty; NaN in unused memory (anything that
is read without being seen); pages of 8 and 64.
"""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's own abbreviation

from dspark_kernels.paged_attention.op import paged_attention
from dspark_kernels.paged_attention.reference import paged_attention_reference
from dspark_kernels.testing.bounds import RELATIVE_RMS, assert_close, poisoned
from dspark_kernels.testing.caches import make_paged
from dspark_kernels.testing.interpreter import count_launches

SHAPES = {  # lengths, (Hq, Hkv), T, (D, Dv), page, kept
    "one-token": ((1,), (1, 1), 1, (16, 16), 16, 1.0),
    "page-edges": ((15, 16, 17), (2, 1), 1, (16, 16), 16, 1.0),
    "odd-group-verify": ((37, 5), (6, 2), 5, (24, 24), 16, 0.6),
    "group-of-8": ((40,), (8, 1), 2, (32, 32), 16, 0.5),
    "latent-values": ((33, 20), (2, 2), 3, (24, 12), 16, 1.0),
    "empty-row": ((0, 3), (2, 1), 4, (16, 16), 16, 1.0),
    "two-splits": ((280, 30), (4, 2), 2, (16, 16), 16, 1.0),
    "small-pages": ((70,), (2, 1), 2, (16, 16), 8, 0.7),
    "large-pages": ((130,), (2, 1), 1, (16, 16), 64, 1.0),
}


def launch(inputs, page_size=16):
    from dspark_kernels.paged_attention import kernel

    shape = (*inputs.query.shape[:3], inputs.value.shape[-1])
    out = poisoned(shape, inputs.query.dtype, inputs.query.device)
    lse = poisoned(shape[:3], torch.float32, inputs.query.device)
    kernel.paged_attention_fwd(
        *vars(inputs).values(), out.tensor, lse.tensor, scale=0.3, page_size=page_size
    )
    out.assert_intact()
    lse.assert_intact()
    return out.tensor, lse.tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_attends_like_the_reference(shape, dtype, device, monkeypatch):
    from dspark_kernels.paged_attention import kernel

    lengths, heads, num_queries, dims, page, keep = shape
    inputs = make_paged(lengths, heads, num_queries, dims, dtype, device, page_size=page, keep=keep)
    launches = count_launches(monkeypatch, kernel._paged_attention_fwd_kernel)
    out, lse = launch(inputs, page)
    expected, expected_lse = paged_attention_reference(
        *vars(inputs).values(), scale=0.3, page_size=page, dtype=torch.float64
    )
    assert_close(out, expected, RELATIVE_RMS[dtype], "output")
    assert_close(lse, expected_lse, RELATIVE_RMS[dtype], "log-sum-exp")
    assert len(launches) == 1
    assert launches[0][:2] == (len(lengths), heads[1])


def test_a_row_does_not_depend_on_its_neighbours_lists(device):
    inputs = make_paged((30, 300, 17), (4, 2), 2, (16, 16), torch.float32, device)
    together, lse = launch(inputs)
    for row in (0, 2):
        alone = inputs.rows(slice(row, row + 1))
        short = type(alone)(**{**vars(alone), "pages": alone.pages[..., :2].contiguous()})
        out, scores = launch(short)
        assert torch.equal(out[0], together[row])
        assert torch.equal(scores[0], lse[row])


def test_with_every_page_the_reference_is_dense_attention():
    inputs = make_paged((37,), (6, 2), 5, (16, 16), torch.float32, "cpu")
    out, lse = paged_attention(*vars(inputs).values(), scale=0.3)
    key, value = inputs.key[1:2, :, :37], inputs.value[1:2, :, :37]
    mask = torch.ones(37, 37, dtype=torch.bool).tril()[-5:]
    dense = F.scaled_dot_product_attention(
        inputs.query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True
    )
    assert_close(out, dense, RELATIVE_RMS[torch.float32])
    assert lse.isfinite().all()


def test_wrong_arguments_are_named():
    inputs = vars(make_paged((20,), (2, 1), 1, (16, 16), torch.float32, "cpu"))
    with pytest.raises(ValueError, match="page_size must be a power of two"):
        paged_attention(*inputs.values(), scale=1.0, page_size=12)
    with pytest.raises(ValueError, match=r"counts must be one of torch.int32; got torch.int64"):
        paged_attention(*{**inputs, "counts": inputs["counts"].long()}.values(), scale=1.0)
    with pytest.raises(ValueError, match=r"lengths must have shape \(1,\)"):
        paged_attention(*{**inputs, "lengths": torch.ones(2).long()}.values(), scale=1.0)
    heads = {name: inputs[name].repeat(1, 3, 1, 1) for name in ("key", "value")}
    with pytest.raises(ValueError, match="query heads must be a multiple of the key heads"):
        paged_attention(*{**inputs, **heads}.values(), scale=1.0)
