"""The ragged kernel against its reference.

Regimes: one token, drafts of several lengths, a prompt in tiles (a tile that starts mid-run), runs
without tokens; groups of 1, 3 and 8; unequal widths; keys over several splits with short rows
beside long ones (empty splits), with long runs in the same step (rows the merge must not touch);
window starting mid-tile; soft-cap; sinks, also with splits (counted once); NaN beyond every run.
"""

import pytest
import torch

from dspark_kernels.ragged_attention.op import make_plan, ragged_attention
from dspark_kernels.ragged_attention.reference import ragged_attention_reference
from dspark_kernels.testing.bounds import RELATIVE_RMS, assert_close, poisoned
from dspark_kernels.testing.interpreter import count_launches

SHAPES = {  # (slot, past, count) per run, (Hq, Hkv), (D, Dv), form
    "one-token": (((0, 0, 1),), (1, 1), (16, 16), {}),
    "drafts": (((2, 30, 5), (0, 7, 1), (1, 0, 3)), (6, 2), (24, 24), {}),
    "no-tokens": (((0, 9, 2), (1, 5, 0), (2, 4, 1)), (2, 1), (16, 16), {}),
    "prompt-and-draft": (((0, 0, 45), (1, 20, 2)), (4, 2), (16, 16), {}),
    "latent-values": (((0, 33, 3),), (2, 2), (24, 12), {}),
    "splits": (((1, 1100, 2), (0, 10, 1)), (2, 1), (16, 16), {}),
    "splits-and-prompt": (((1, 530, 2), (0, 3, 40)), (4, 2), (16, 16), {}),
    "window": (((0, 60, 3), (1, 5, 2)), (2, 1), (16, 16), {"window": 17}),
    "window-splits": (((0, 900, 2),), (2, 1), (16, 16), {"window": 600}),
    "prompt-window": (((0, 10, 70),), (1, 1), (16, 16), {"window": 9}),
    "softcap": (((0, 33, 2),), (8, 1), (16, 16), {"softcap": 2.0}),
    "sinks": (((0, 33, 2), (1, 0, 40)), (4, 2), (16, 16), {"sinks": True}),
    "sinks-splits": (((0, 600, 2), (1, 4, 1)), (2, 1), (16, 16), {"sinks": True}),
}


def make_inputs(shape, dtype, device):
    segments, (heads, num_kv), (dim, dim_v), form = shape
    generator = torch.Generator().manual_seed(heads)
    total = sum(count for _, _, count in segments)
    longest = max(past + count for _, past, count in segments)
    key = torch.full((len(segments) + 1, num_kv, longest + 5, dim), torch.nan)
    value = torch.full((len(segments) + 1, num_kv, longest + 5, dim_v), torch.nan)
    for slot, past, count in segments:
        end = past + count
        key[slot, :, :end] = torch.randn(num_kv, end, dim, generator=generator)
        value[slot, :, :end] = torch.randn(num_kv, end, dim_v, generator=generator)
    query = torch.randn(total, heads, dim, generator=generator)
    form = {"scale": 0.3, **form}
    if form.get("sinks"):
        form["sinks"] = torch.linspace(-1, 2, heads, device=device)
    return [tensor.to(device, dtype) for tensor in (query, key, value)], list(segments), form


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_attends_like_the_reference(shape, dtype, device, monkeypatch):
    from dspark_kernels.ragged_attention import kernel

    inputs, segments, form = make_inputs(shape, dtype, device)
    out = poisoned((*inputs[0].shape[:2], inputs[2].shape[-1]), dtype, device)
    launches = count_launches(monkeypatch, kernel._ragged_attention_fwd_kernel)
    plan = make_plan(segments, *inputs, form.get("window"))
    kernel.ragged_attention_fwd(*inputs, plan, out.tensor, **form)
    expected = ragged_attention_reference(*inputs, segments, **form)
    assert_close(out.tensor, expected, RELATIVE_RMS[dtype])
    out.assert_intact()
    assert launches


@pytest.mark.parametrize("name", ["drafts", "splits-and-prompt", "sinks-splits"])
def test_a_run_does_not_depend_on_its_neighbours(name, device):
    from dspark_kernels.ragged_attention import kernel

    (query, key, value), segments, form = make_inputs(SHAPES[name], torch.float32, device)
    together = query.new_empty(*query.shape[:2], value.shape[-1])
    plan = make_plan(segments, query, key, value)
    kernel.ragged_attention_fwd(query, key, value, plan, together, **form)
    start = 0
    for segment in segments:
        rows = slice(start, start + segment[2])
        alone = torch.empty_like(together[rows])
        plan = make_plan([segment], query, key, value)
        kernel.ragged_attention_fwd(query[rows], key, value, plan, alone, **form)
        assert torch.equal(alone, together[rows])
        start = rows.stop


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_cpu_path_attends_like_the_reference(shape):
    inputs, segments, form = make_inputs(shape, torch.float32, "cpu")
    out = ragged_attention(*inputs, segments, **form)
    expected = ragged_attention_reference(*inputs, segments, **form)
    assert_close(out, expected, RELATIVE_RMS[torch.float32])


def test_a_plan_uploads_its_tables_once():
    inputs, segments, _ = make_inputs(SHAPES["prompt-and-draft"], torch.float32, "cpu")
    plan = make_plan(segments, *inputs)
    device = torch.device("cpu")
    assert plan.table(0, device) is plan.table(0, device)
    assert plan.places(device).tolist() == [45, 46]


def test_wrong_segments_are_named():
    inputs, _, form = make_inputs(SHAPES["one-token"], torch.float32, "cpu")
    with pytest.raises(ValueError, match="must add up to the 1 of query; got 2"):
        ragged_attention(*inputs, [(0, 0, 2)], **form)
    with pytest.raises(ValueError, match="got slot 9, past 0, count 1"):
        ragged_attention(*inputs, [(9, 0, 1)], **form)
    with pytest.raises(ValueError, match="window must be at least 1"):
        ragged_attention(*inputs, [(0, 0, 1)], scale=1.0, window=0)
