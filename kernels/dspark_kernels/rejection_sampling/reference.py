"""Reference: one row and one draft token after another, in float64; also the CPU path."""

from __future__ import annotations

import torch


def draw(weights: torch.Tensor, uniform: float) -> int:  # [V]
    """Return the token at which the running sum of weights passes `uniform` of their total.

    Tokens without weight are never drawn, whatever the rounding of the sums.
    """
    running = weights.cumsum(0)
    possible = weights > 0
    passed = (possible & (running > uniform * running[-1])).nonzero()
    return int(passed[0]) if len(passed) else int(possible.nonzero()[-1])


def rejection_sample_reference(
    draft_ids: torch.Tensor,  # [R, N]
    target_probs: torch.Tensor,  # [R, N + 1, V]
    draft_probs: torch.Tensor | None,  # [R, N, V]
    lengths: torch.Tensor,  # [R]
    uniforms: torch.Tensor,  # [R, N + 1]
) -> tuple[torch.Tensor, torch.Tensor]:  # [R], [R]
    """Accept and draw as `rejection_sample`."""
    num_rows, most = draft_ids.shape
    size = target_probs.shape[-1]
    accepted = torch.zeros(num_rows, dtype=torch.int64)
    token = torch.zeros(num_rows, dtype=torch.int64)
    for row, length in enumerate(lengths.tolist()):
        count = 0
        while count < length:
            draft = int(draft_ids[row, count])
            is_known = 0 <= draft < size
            chance = float(target_probs[row, count, draft]) if is_known else 0.0
            if draft_probs is not None and is_known:
                claimed = float(draft_probs[row, count, draft])
                chance = chance / claimed if claimed > 0 else float(chance > 0)
            if not float(uniforms[row, count]) < chance:
                break
            count += 1
        weights = target_probs[row, count].double()
        if count < length:
            rest = weights.clone()
            if draft_probs is not None:
                rest = (weights - draft_probs[row, count].double()).clamp(min=0)
            elif 0 <= draft < size:
                rest[draft] = 0
            # A rejection where q covers p has probability zero; rounding can still lead here.
            weights = rest if float(rest.sum()) > 0 else weights
        accepted[row] = count
        token[row] = draw(weights, float(uniforms[row, most]))
    return accepted.to(draft_ids.device), token.to(draft_ids.device)
