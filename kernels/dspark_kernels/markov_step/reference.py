"""Reference: the sum of both terms, then the choice; also the CPU path."""

from __future__ import annotations

import torch


def markov_step_reference(
    base: torch.Tensor,  # [R, V]
    weight: torch.Tensor,  # [V, r]
    code: torch.Tensor,  # [R, r]
    *,
    noise: torch.Tensor | None = None,  # [R, V]
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # [R], [R], [R]
    """Choose as `markov_step`: token, its score over the temperature, and the log-sum-exp."""
    scores = (base.to(dtype) + code.to(dtype) @ weight.to(dtype).T) / temperature
    perturbed = scores if noise is None else scores + noise.to(dtype)
    token = perturbed.argmax(dim=-1)
    chosen = scores.gather(-1, token[:, None])[:, 0]
    return token, chosen.float(), torch.logsumexp(scores, dim=-1).float()
