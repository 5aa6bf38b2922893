"""Public op: one step of a draft head with a low-rank Markov term."""

from __future__ import annotations

import math

import torch

from dspark_kernels.checks import (
    FLOATS,
    require_dtype,
    require_last_axis_contiguous,
    require_range,
    require_same_device,
    require_shape,
    runs_triton,
)
from dspark_kernels.markov_step.reference import markov_step_reference


def markov_step(
    base: torch.Tensor,  # [R, V]
    weight: torch.Tensor,  # [V, r]
    code: torch.Tensor,  # [R, r]
    *,
    noise: torch.Tensor | None = None,  # [R, V]
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # [R], [R], [R]
    """Choose each row's next draft token from `base + weight @ code` without writing that sum.

    The position's own scores are known for the whole block at once; what depends on the token just
    chosen is the low-rank term, one such step per token of the block.

    Args:
        base: The position's scores, of shape (R, V).
        weight: `markov_w2`, of shape (V, r).
        code: Code of the previous token of each row (a row of `markov_w1`, gated or not), (R, r).
        noise: None for the argmax. With standard Gumbel noise of shape (R, V) the choice is a draw
            from softmax(scores / temperature).
        temperature: Divides the scores, above 0.

    Returns:
        tuple[torch.Tensor, torch.Tensor, torch.Tensor]: Tokens, int64; their scores over the
        temperature, without noise, float32; and the log-sum-exp of all scores over the temperature,
        so that `exp(score - lse)` is the probability the token was drawn with. Each of shape (R,).

    Raises:
        ValueError: If shapes, types or devices do not fit, or the temperature is not above 0.

    Limits: V below 2**31.
    Numerics: products and sums in float32. Among equal scores the lowest token, as in
    `torch.argmax`; scores that differ by rounding may be chosen differently than by another kernel.
    Bounds tested: scores and log-sum-exp 2e-5 relative RMS for float32 and bfloat16 alike, as
    bfloat16 products are exact.
    Layout: last axes contiguous.
    Batch: a row's result does not depend on other rows; they are 16 to a tile for any number.
    Cost: V * r + R * V elements read, 20 * R bytes written per 128 entries of the vocabulary.
    Source: DSpark, arXiv:2607.05147 (the Markov head); Maddison et al., arXiv:1411.0030 (noise).
    """
    require_shape("base", base, ("R", "V"))
    num_rows, num_tokens = base.shape
    require_range("V", num_tokens, 1, 2**31 - 2)
    require_shape("weight", weight, (num_tokens, "r"))
    require_shape("code", code, (num_rows, weight.shape[1]))
    for name, tensor in (("base", base), ("weight", weight), ("code", code)):
        require_dtype(name, tensor, FLOATS)
        require_last_axis_contiguous(name, tensor)
    require_dtype("code", code, (weight.dtype,))
    if noise is not None:
        require_shape("noise", noise, base.shape)
        require_dtype("noise", noise, (torch.float32,))
        require_last_axis_contiguous("noise", noise)
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(
            f"temperature must be above 0; got {temperature}. Leave noise out for the argmax."
        )
    device = require_same_device(base=base, weight=weight, code=code, noise=noise)
    if not runs_triton(device):
        return markov_step_reference(base, weight, code, noise=noise, temperature=temperature)
    from dspark_kernels.markov_step.kernel import markov_step_fwd

    token = torch.empty(num_rows, dtype=torch.int64, device=device)
    chosen, lse = torch.empty(2, num_rows, device=device)
    markov_step_fwd(base, weight, code, noise, token, chosen, lse, temperature=temperature)
    return token, chosen, lse
