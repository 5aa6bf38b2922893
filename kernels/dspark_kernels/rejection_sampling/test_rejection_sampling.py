"""Rejection sampling.

Regimes: no draft, one, several; nothing scheduled; all accepted (the bonus token), rejected at each
position; one-point proposals; p = q (always accepted); disjoint supports (never); a vocabulary
below, at and above a block; draft tokens outside it; uniform numbers 0 and just below 1 (a token
without probability drawn at an edge); the emitted distribution against the target's.
"""

import pytest
import torch

from dspark_kernels.rejection_sampling.op import rejection_sample
from dspark_kernels.rejection_sampling.reference import rejection_sample_reference
from dspark_kernels.testing.bounds import poisoned
from dspark_kernels.testing.interpreter import count_launches

EDGE = 1e-4
"""Uniform numbers are kept this far (of the total) from where the drawn token changes."""

SHAPES = {  # rows, drafts, vocabulary
    "no-drafts": (3, 0, 5),
    "one-draft": (6, 1, 7),
    "several": (16, 5, 300),
    "block": (4, 3, 1024),
    "blocks": (5, 2, 2500),
}


def make_inputs(shape, device, *, one_point=False, agreement=0.5, seed=0):
    rows, drafts, size = shape
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(rows, drafts + 1, size, generator=generator)
    other = torch.randn(rows, drafts, size, generator=generator)
    draft = agreement * target[:, :drafts] + (1 - agreement) * other
    target, draft = (3 * target).softmax(-1), (3 * draft).softmax(-1)
    target[..., ::3] = 0  # holes: tokens that must never come out
    target[..., 0] += 1e-3
    target /= target.sum(-1, keepdim=True)
    ids = torch.zeros(rows, drafts, dtype=torch.int64)
    if drafts:
        ids = torch.multinomial(draft.flatten(0, 1), 1, generator=generator).view(rows, drafts)
    lengths = torch.randint(0, drafts + 1, (rows,), generator=generator)
    lengths[0] = drafts
    uniforms = torch.rand(rows, drafts + 1, generator=generator)
    given = [ids, target.contiguous(), None if one_point else draft, lengths, uniforms]
    return [None if tensor is None else tensor.to(device) for tensor in given]


def launch(given):
    from dspark_kernels.rejection_sampling import kernel

    rows, device = given[0].shape[0], given[0].device
    accepted = poisoned((rows,), torch.int64, device)
    token = poisoned((rows,), torch.int64, device)
    kernel.rejection_sample_fwd(*given, accepted.tensor, token.tensor)
    accepted.assert_intact()
    token.assert_intact()
    return accepted.tensor, token.tensor


def assert_same(ours, expected, given):
    """Equal, unless the uniform number lies at the edge between the two tokens."""
    assert torch.equal(ours[0].cpu(), expected[0].cpu())
    for row in (ours[1] != expected[1]).nonzero().flatten().tolist():
        nudged = [tensor if tensor is None else tensor[row : row + 1] for tensor in given]
        near = set()
        for shift in (-EDGE, EDGE):
            moved = nudged[4].clone()
            moved[:, -1] = (moved[:, -1] + shift).clamp(0, 1 - 1e-7)
            near.add(int(rejection_sample_reference(*nudged[:4], moved)[1]))
        assert int(ours[1][row]) in near


@pytest.mark.parametrize("one_point", [False, True], ids=["drawn", "one-point"])
@pytest.mark.parametrize("agreement", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_decides_like_the_reference(shape, agreement, one_point, device, monkeypatch):
    from dspark_kernels.rejection_sampling import kernel

    given = make_inputs(shape, device, one_point=one_point, agreement=agreement)
    launches = count_launches(monkeypatch, kernel._pick_fwd_kernel)
    ours = launch(given)
    assert_same(ours, rejection_sample_reference(*given), given)
    assert len(launches) == 1


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24], ids=["zero", "almost-one"])
def test_a_token_without_probability_is_never_drawn(uniform, device):
    given = make_inputs(SHAPES["blocks"], device)
    given[4] = torch.full_like(given[4], uniform)
    accepted, token = launch(given)
    rows = torch.arange(len(token), device=device)
    assert (given[1][rows, accepted, token] > 0).all()


def test_a_draft_token_outside_the_vocabulary_is_rejected(device):
    given = make_inputs(SHAPES["one-draft"], device)
    given[0][:] = 99
    given[3][:] = 1
    accepted, _ = launch(given)
    assert (accepted == 0).all()


def test_equal_distributions_accept_everything(device):
    given = make_inputs(SHAPES["several"], device)
    given[2] = given[1][:, :-1].contiguous()
    given[0] = torch.multinomial(given[2].flatten(0, 1), 1).view(given[0].shape)
    accepted, _ = launch(given)
    assert torch.equal(accepted, given[3])


def test_no_residual_falls_back_to_the_target(device):
    probs = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]], device=device)
    given = [torch.tensor([[0]], device=device), probs, probs[:, :1] * 1.5]
    given += [torch.tensor([1], device=device), torch.tensor([[0.9, 0.1]], device=device)]
    accepted, token = launch([*given[:2], given[2].contiguous(), *given[3:]])
    assert (int(accepted), int(token)) == (0, 0)


def test_what_is_emitted_is_distributed_as_the_target():
    target, draft = torch.tensor([0.5, 0.1, 0.4]), torch.tensor([0.2, 0.7, 0.1])
    grid = (torch.arange(40) + 0.5) / 40
    ids, keep, pick = torch.cartesian_prod(torch.arange(3.0), grid, grid).unbind(1)
    rows = len(ids)
    _, token = given = rejection_sample(
        ids.long()[:, None], target.expand(rows, 2, 3).contiguous(),
        draft.expand(rows, 1, 3).contiguous(), torch.ones(rows, dtype=torch.int64),
        torch.stack([keep, pick], 1),
    )  # fmt: skip
    first = torch.where(given[0] == 1, ids.long(), token)
    share = torch.zeros(3).scatter_add(0, first, draft[ids.long()] / len(grid) ** 2)
    torch.testing.assert_close(share, target, atol=1 / len(grid), rtol=0)


def test_wrong_arguments_are_named():
    given = make_inputs(SHAPES["one-draft"], "cpu")
    with pytest.raises(ValueError, match=r"target_probs must have shape \(6, 2, V\)"):
        rejection_sample(given[0], given[1][:, :1], *given[2:])
    with pytest.raises(ValueError, match=r"draft_ids must be one of torch\.int64"):
        rejection_sample(given[0].int(), *given[1:])
