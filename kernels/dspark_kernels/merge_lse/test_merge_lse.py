"""Merging by log-sum-exp.

Regimes: one part, several, more than a step of the loop (a lost carry); odd D (a missing mask);
parts that saw nothing and hold NaN (0 * NaN); rows that nothing saw (-inf minus -inf); scores of
large size (overflow without the shift).
"""

import pytest
import torch

from dspark_kernels.merge_lse.op import merge_lse
from dspark_kernels.merge_lse.reference import merge_lse_reference
from dspark_kernels.testing.bounds import RELATIVE_RMS, assert_close, guarded, poisoned
from dspark_kernels.testing.interpreter import count_launches

SHAPES = {
    "one-part": (1, (3,), 16),
    "odd-width": (3, (2, 5), 7),
    "two-steps": (11, (2, 2), 24),
    "full-step": (8, (1,), 64),
}


def make_parts(shape, dtype, device):
    parts, rows, dim = shape
    generator = torch.Generator().manual_seed(parts)
    outs = torch.randn(parts, *rows, dim, generator=generator).to(dtype)
    lses = 90 * torch.randn(parts, *rows, generator=generator)
    if parts > 1:
        lses[0], outs[0] = -torch.inf, torch.nan
        lses.view(parts, -1)[:, 0], outs.view(parts, -1, dim)[:, 0] = -torch.inf, torch.nan
    return outs.to(device), lses.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_merges_like_the_reference(shape, dtype, device, monkeypatch):
    from dspark_kernels.merge_lse import kernel

    outs, lses = make_parts(shape, dtype, device)
    out = poisoned(tuple(outs.shape[1:]), dtype, device)
    lse = poisoned(tuple(lses.shape[1:]), torch.float32, device)
    launches = count_launches(monkeypatch, kernel._merge_lse_fwd_kernel)
    kernel.merge_lse_fwd(guarded(outs).tensor, guarded(lses).tensor, out.tensor, lse.tensor)
    expected = merge_lse_reference(outs, lses, dtype=torch.float64)
    assert_close(out.tensor, expected[0], RELATIVE_RMS[dtype], "output")
    assert_close(lse.tensor, expected[1], RELATIVE_RMS[torch.float32], "log-sum-exp")
    out.assert_intact()
    lse.assert_intact()
    assert len(launches) == 1


def test_empty_parts_added_behind_change_no_bit(device):
    from dspark_kernels.merge_lse import kernel

    outs, lses = make_parts(SHAPES["two-steps"], torch.float32, device)
    padded = torch.cat([outs, torch.full_like(outs, torch.nan)])
    padded_lses = torch.cat([lses, torch.full_like(lses, -torch.inf)])
    results = []
    for given, scores in ((outs, lses), (padded, padded_lses)):
        out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
        kernel.merge_lse_fwd(given, scores, out, lse)
        results.append((out, lse))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_merging_halves_of_a_softmax_gives_the_whole():
    scores, values = torch.randn(5, 40), torch.randn(40, 8)
    halves = [(scores[:, :13], values[:13]), (scores[:, 13:], values[13:])]
    outs = torch.stack([torch.softmax(s, -1) @ v for s, v in halves])
    lses = torch.stack([torch.logsumexp(s, -1) for s, _ in halves])
    out, lse = merge_lse(outs, lses)
    assert_close(out, torch.softmax(scores, -1) @ values, RELATIVE_RMS[torch.float32])
    assert_close(lse, torch.logsumexp(scores, -1), RELATIVE_RMS[torch.float32])


def test_a_row_nothing_saw_is_zero_and_minus_infinity():
    out, lse = merge_lse(torch.full((2, 1, 4), torch.nan), torch.full((2, 1), -torch.inf))
    assert torch.equal(out, torch.zeros(1, 4))
    assert float(lse) == -torch.inf


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match=r"lses must have shape \(2, 3\); got \(3, 2\)"):
        merge_lse(torch.zeros(2, 3, 4), torch.zeros(3, 2))
