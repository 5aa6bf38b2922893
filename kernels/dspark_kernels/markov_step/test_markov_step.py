"""The Markov step.

Regimes: one row, a tile of rows and more; a vocabulary below, at and above a block, odd sizes (an
entry past the end that wins); rank below, at and above a step, odd; argmax and Gumbel noise;
temperatures; equal scores (the lowest token wins within a block and across blocks); all other
scores -inf; strided rows.
"""

import pytest
import torch

from dspark_kernels.markov_step.op import markov_step
from dspark_kernels.markov_step.reference import markov_step_reference
from dspark_kernels.testing.bounds import RELATIVE_RMS, assert_close, poisoned
from dspark_kernels.testing.interpreter import count_launches

SHAPES = {  # rows, vocabulary, rank, noise, temperature
    "one-row": (1, 50, 16, False, 1.0),
    "tile-and-one": (17, 130, 24, False, 0.7),
    "block": (3, 128, 64, True, 1.0),
    "odd": (2, 301, 100, True, 1.3),
    "tiny": (2, 3, 1, True, 1.0),
}
BOUND = RELATIVE_RMS[torch.float32]


def make_inputs(shape, dtype, device):
    rows, size, rank, has_noise, temperature = shape
    generator = torch.Generator().manual_seed(size)
    base = torch.randn(rows, size + 5, generator=generator)[:, :size]
    weight = torch.randn(size, rank, generator=generator) / rank**0.5
    code = torch.randn(rows, rank, generator=generator)
    noise = None
    if has_noise:
        noise = -(-torch.rand(rows, size, generator=generator).clamp(1e-6, 1 - 1e-6).log()).log()
        noise = noise.to(device)
    given = [tensor.to(device, dtype) for tensor in (base, weight, code)]
    return given, noise, temperature


def launch(given, noise, temperature):
    from dspark_kernels.markov_step import kernel

    rows, device = given[0].shape[0], given[0].device
    token = poisoned((rows,), torch.int64, device)
    chosen = poisoned((rows,), torch.float32, device)
    lse = poisoned((rows,), torch.float32, device)
    kernel.markov_step_fwd(
        *given, noise, token.tensor, chosen.tensor, lse.tensor, temperature=temperature
    )
    for result in (token, chosen, lse):
        result.assert_intact()
    return token.tensor, chosen.tensor, lse.tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_chooses_like_the_reference(shape, dtype, device, monkeypatch):
    from dspark_kernels.markov_step import kernel

    given, noise, temperature = make_inputs(shape, dtype, device)
    launches = count_launches(monkeypatch, kernel._markov_step_fwd_kernel)
    token, chosen, lse = launch(given, noise, temperature)
    form = {"noise": noise, "temperature": temperature, "dtype": torch.float64}
    expected = markov_step_reference(*given, **form)
    assert torch.equal(token, expected[0])
    assert_close(chosen, expected[1], BOUND, "score")
    assert_close(lse, expected[2], BOUND, "log-sum-exp")
    assert len(launches) == 1


@pytest.mark.parametrize("places", [(5, 9), (40, 200), (0, 299)], ids=str)
def test_among_equal_scores_the_lowest_token_wins(places, device):
    base = torch.zeros(1, 300, device=device)
    base[0, list(places)] = 2.0
    flat = torch.zeros(300, 16, device=device)
    token, chosen, _ = launch([base, flat, torch.zeros(1, 16, device=device)], None, 1.0)
    assert int(token) == places[0]
    assert float(chosen) == 2.0


def test_a_single_possible_token_is_chosen(device):
    base = torch.full((1, 300), -torch.inf, device=device)
    base[0, 250] = -1e4
    flat = torch.zeros(300, 16, device=device)
    token, chosen, lse = launch([base, flat, torch.zeros(1, 16, device=device)], None, 1.0)
    assert int(token) == 250
    assert float(chosen) == float(lse) == -1e4


def test_the_score_less_the_log_sum_exp_is_the_probability():
    given, noise, temperature = make_inputs(SHAPES["odd"], torch.float32, "cpu")
    token, chosen, lse = markov_step(*given, noise=noise, temperature=temperature)
    probs = torch.softmax((given[0] + given[2] @ given[1].T) / temperature, -1)
    torch.testing.assert_close((chosen - lse).exp(), probs.gather(1, token[:, None])[:, 0])


def test_wrong_arguments_are_named():
    given, noise, _ = make_inputs(SHAPES["block"], torch.float32, "cpu")
    with pytest.raises(ValueError, match="temperature must be above 0; got 0"):
        markov_step(*given, noise=noise, temperature=0.0)
    with pytest.raises(ValueError, match=r"code must have shape \(3, 64\)"):
        markov_step(*given[:2], given[2][:, :10].contiguous())
