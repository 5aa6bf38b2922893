"""Packed attention against the reference.

Regimes: one query and several; one head per group, grouped and a single key head; unequal value
width; a slice of a longer cache whose unused part is NaN (a kernel that reads it shows); masks
with ragged rows; soft-cap; sinks. Float32 to rounding, bfloat16 to its own.
"""

import pytest
import torch

from dspark_kernels.ragged_attention import op
from dspark_kernels.ragged_attention.op import pack_mask, packed_attention
from dspark_kernels.ragged_attention.reference import packed_attention_reference
from dspark_kernels.ragged_attention.splitting import num_parts, split_attention

RELATIVE_RMS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""float32: sums of a few hundred terms; bfloat16: the inputs' own 8 bits of mantissa."""

SHAPES = {
    "one-query": (1, 4, 4, 1, 8, 8, 17),
    "grouped": (2, 6, 2, 1, 16, 16, 33),
    "single-key-head": (3, 4, 1, 5, 8, 8, 40),
    "odd": (2, 9, 3, 7, 24, 24, 65),
    "latent-values": (1, 4, 4, 3, 24, 12, 20),
}


def make_inputs(shape, dtype, seed=0):
    rows, heads, kv_heads, queries, dim, value_dim, length = shape
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, heads, queries, dim, generator=generator).to(dtype)
    cache = torch.full((rows, kv_heads, length + 11, dim), torch.nan, dtype=dtype)
    cache[:, :, :length] = torch.randn(rows, kv_heads, length, dim, generator=generator).to(dtype)
    values = torch.full((rows, kv_heads, length + 11, value_dim), torch.nan, dtype=dtype)
    values[:, :, :length] = torch.randn(rows, kv_heads, length, value_dim, generator=generator)
    past = torch.randint(0, length - queries + 1, (rows,), generator=generator)
    place = past[:, None] + torch.arange(queries)
    visible = torch.arange(length)[None, None] <= place[..., None]
    return query, cache[:, :, :length], values[:, :, :length], visible


def relative_rms(ours, expected):
    return float((ours.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("dtype", RELATIVE_RMS, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(("softcap", "with_sinks"), [(None, False), (5.0, False), (None, True)])
def test_packed_attention_equals_the_reference(shape, dtype, softcap, with_sinks):
    query, keys, values, visible = make_inputs(shape, dtype)
    sinks = torch.linspace(-1, 2, shape[1]) if with_sinks else None
    mask = pack_mask(visible, shape[1] // shape[2], dtype)
    form = {"scale": 0.3, "softcap": softcap, "sinks": sinks}
    ours = packed_attention(query, keys, values, mask, **form)
    expected = packed_attention_reference(query, keys, values, visible, **form)
    assert ours.shape == expected.shape
    assert relative_rms(ours, expected) <= RELATIVE_RMS[dtype]


def test_without_a_mask_everything_is_visible():
    query, keys, values, visible = make_inputs(SHAPES["grouped"], torch.float32)
    ours = packed_attention(query, keys, values, None, scale=0.3)
    expected = packed_attention_reference(query, keys, values, torch.ones_like(visible), scale=0.3)
    assert relative_rms(ours, expected) <= RELATIVE_RMS[torch.float32]


def test_a_row_does_not_depend_on_its_neighbours():
    query, keys, values, visible = make_inputs(SHAPES["odd"], torch.float32)
    mask = pack_mask(visible, 3, torch.float32)
    together = packed_attention(query, keys, values, mask, scale=0.3)
    alone = packed_attention(query[1:], keys[1:], values[1:], mask[1:], scale=0.3)
    assert torch.equal(together[1:], alone)


@pytest.mark.parametrize("dtype", RELATIVE_RMS, ids=str)
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize(("length", "parts"), [(64, 2), (65, 2), (71, 4), (33, 16)])
def test_keys_in_parts_give_what_all_keys_give(dtype, is_masked, length, parts):
    query, keys, values, visible = make_inputs((3, 6, 2, 5, 16, 16, length), dtype)
    # A row that sees its first keys only: whole parts are hidden from it.
    visible[0, :, 2:] = False
    visible[0, :, :2] = True
    if not is_masked:
        visible[:] = True
    mask = pack_mask(visible, 3, dtype) if is_masked else None
    packed = query.reshape(3, 2, 15, 16)
    with torch.no_grad():
        ours = split_attention(packed, keys, values, mask, scale=0.3, parts=parts)
    ours = ours.view(3, 2, 3, 5, 16).permute(0, 3, 1, 2, 4).reshape(3, 5, 6, 16)
    expected = packed_attention_reference(query, keys, values, visible, scale=0.3)
    assert relative_rms(ours, expected) <= RELATIVE_RMS[dtype]


def test_long_caches_are_split_where_threads_would_idle(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    query, keys, values, visible = make_inputs((1, 4, 2, 1, 8, 8, 8192), torch.float32)
    visible[:] = True
    calls = []
    monkeypatch.setattr(
        op, "split_attention", lambda *a, **k: calls.append(k["parts"]) or split_attention(*a, **k)
    )
    with torch.no_grad():
        ours = packed_attention(query, keys, values, None, scale=0.3)
    assert calls == [2]
    expected = packed_attention_reference(query, keys, values, visible, scale=0.3)
    assert relative_rms(ours, expected) <= RELATIVE_RMS[torch.float32]
    # With gradients the kernel that has them is called.
    packed_attention(query, keys, values, None, scale=0.3)
    assert calls == [2]


@pytest.mark.parametrize(
    ("rows", "heads", "length", "threads", "expected"),
    [
        (1, 3, 6144, 2, 2),  # three half turns instead of two whole ones
        (1, 3, 6143, 2, 1),  # too short
        (1, 4, 32768, 2, 1),  # even already
        (1, 3, 32768, 1, 1),
        (2, 3, 32768, 2, 1),
        (1, 3, 32768, 16, 5),
        (2, 2, 32768, 16, 8),
    ],
)
def test_parts_even_out_what_threads_do(rows, heads, length, threads, expected):
    assert num_parts(rows, heads, length, threads) == expected
