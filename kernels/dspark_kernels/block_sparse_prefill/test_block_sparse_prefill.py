"""Block-sparse prompt attention.

Regimes: one query, a tile, a tile and a bit; a prompt continued after cached tokens (positions off
by the past); lists with gaps, in full (equals dense causal attention), and empty (zeros, no NaN);
groups of 1 and 3; odd and unequal widths; pages of 8 and 64; NaN beyond the prompt.
"""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's own abbreviation

from dspark_kernels.block_sparse_prefill.op import block_sparse_prefill
from dspark_kernels.block_sparse_prefill.reference import block_sparse_prefill_reference
from dspark_kernels.testing.bounds import RELATIVE_RMS, assert_close, poisoned
from dspark_kernels.testing.interpreter import count_launches

SHAPES = {  # past per row, N, (Hq, Hkv), (D, Dv), page, kept
    "one-query": ((0,), 1, (1, 1), (16, 16), 16, 1.0),
    "tile-and-bit": ((0,), 70, (2, 1), (16, 16), 16, 1.0),
    "continued": ((37, 0), 66, (3, 1), (24, 24), 16, 0.5),
    "latent-values": ((5,), 20, (2, 2), (24, 12), 16, 0.7),
    "empty-lists": ((3,), 65, (2, 1), (16, 16), 16, 0.0),
    "small-pages": ((9,), 40, (1, 1), (16, 16), 8, 0.6),
    "large-pages": ((100,), 30, (1, 1), (16, 16), 64, 0.9),
}


def make_inputs(shape, dtype, device):
    past, num_queries, (heads, num_kv), (dim, dim_v), page, keep = shape
    generator = torch.Generator().manual_seed(num_queries)
    rows, tiles, longest = len(past), -(-num_queries // 64), max(past) + num_queries
    key = torch.full((rows + 1, num_kv, longest + 70, dim), torch.nan)
    value = torch.full((rows + 1, num_kv, longest + 70, dim_v), torch.nan)
    pages = torch.full((rows, num_kv, tiles, -(-longest // page)), 2**20, dtype=torch.int32)
    counts = torch.zeros(rows, num_kv, tiles, dtype=torch.int32)
    slots = torch.arange(rows, 0, -1)
    for row, before in enumerate(past):
        place = (int(slots[row]), slice(None), slice(0, before + num_queries))
        shape = (num_kv, before + num_queries)
        key[place] = torch.randn(*shape, dim, generator=generator)
        value[place] = torch.randn(*shape, dim_v, generator=generator)
        for head in range(num_kv):
            for tile in range(tiles):
                end = before + min(num_queries, (tile + 1) * 64)
                kept = torch.rand(-(-end // page), generator=generator) < keep
                listed = kept.nonzero().flatten().int()
                pages[row, head, tile, : len(listed)] = listed
                counts[row, head, tile] = len(listed)
    query = torch.randn(rows, heads, num_queries, dim, generator=generator)
    floats = [tensor.to(device, dtype) for tensor in (query, key, value)]
    whole = [pages, counts, slots, torch.tensor(past)]
    return [*floats, *(tensor.to(device) for tensor in whole)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_attends_like_the_reference(shape, dtype, device, monkeypatch):
    from dspark_kernels.block_sparse_prefill import kernel

    given = make_inputs(shape, dtype, device)
    form = {"scale": 0.3, "page_size": shape[4]}
    out = poisoned((*given[0].shape[:3], shape[3][1]), dtype, device)
    launches = count_launches(monkeypatch, kernel._block_sparse_prefill_fwd_kernel)
    kernel.block_sparse_prefill_fwd(*given, out.tensor, **form)
    expected = block_sparse_prefill_reference(*given, **form, dtype=torch.float64)
    assert_close(out.tensor, expected, RELATIVE_RMS[dtype])
    out.assert_intact()
    assert len(launches) == 1


def test_with_every_page_the_reference_is_dense_attention():
    given = make_inputs(SHAPES["tile-and-bit"], torch.float32, "cpu")
    out = block_sparse_prefill(*given, scale=0.3)
    key, value = given[1][1:2, :, :70], given[2][1:2, :, :70]
    dense = F.scaled_dot_product_attention(
        given[0], key, value, is_causal=True, scale=0.3, enable_gqa=True
    )
    assert_close(out, dense, RELATIVE_RMS[torch.float32])


def test_wrong_arguments_are_named():
    given = make_inputs(SHAPES["tile-and-bit"], torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"pages must have shape \(1, 1, 2, K\)"):
        block_sparse_prefill(*given[:3], given[3][:, :, :1], *given[4:], scale=1.0)
    with pytest.raises(ValueError, match=r"past must be one of torch.int32, torch.int64"):
        block_sparse_prefill(*given[:6], given[6].float(), scale=1.0)
