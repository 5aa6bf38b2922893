"""Public op: accept drafted tokens or draw in their place."""

from __future__ import annotations

import torch

from dspark_kernels.checks import (
    INTEGERS,
    require_contiguous,
    require_dtype,
    require_range,
    require_same_device,
    require_shape,
    runs_triton,
)
from dspark_kernels.rejection_sampling.reference import rejection_sample_reference


def rejection_sample(
    draft_ids: torch.Tensor,  # [R, N]
    target_probs: torch.Tensor,  # [R, N + 1, V]
    draft_probs: torch.Tensor | None,  # [R, N, V]
    lengths: torch.Tensor,  # [R]
    uniforms: torch.Tensor,  # [R, N + 1]
) -> tuple[torch.Tensor, torch.Tensor]:  # [R], [R]
    """Accept each row's longest surviving draft prefix and draw the token after it.

    Draft token x at position n survives with probability min(1, p(x) / q(x)). At the first that
    does not, the next token is drawn from the positive part of p - q; if all survive, from p at the
    position after them (the bonus token). Together they are distributed as the target's own tokens.

    Args:
        draft_ids: Drafted tokens, int64 of shape (R, N); entries at or beyond `lengths` are
            ignored.
        target_probs: Target probabilities p at positions 0..N, float32 of shape (R, N + 1, V).
        draft_probs: Probabilities q each token was drawn with, float32 of shape (R, N, V); None
            for tokens that were not drawn at random (one-point distributions).
        lengths: Scheduled draft tokens per row, of shape (R,), each in 0..N.
        uniforms: Independent uniform numbers in [0, 1), float32 of shape (R, N + 1): one per draft
            token, then one for the draw.

    Returns:
        tuple[torch.Tensor, torch.Tensor]: Accepted draft tokens (R,), and the token after them
        (R,), both int64.

    Raises:
        ValueError: If shapes, types or devices do not fit.

    Limits: V up to 4,194,304 (block sums of a row in registers). A draft token outside the
    vocabulary is rejected.
    Numerics: float32 sums on a GPU, float64 in the reference; the draw inverts the running sum, so
    for a uniform number within rounding of the edge between two tokens either may come out. A token
    without probability is never drawn. Where rounding leaves no residual, p itself is drawn from.
    Layout: contiguous.
    Batch: a row's result does not depend on other rows.
    Cost: one row of p, and of q where a draft was rejected, read twice per row; no
    synchronisation.
    Source: Leviathan et al., arXiv:2211.17192, algorithm 1; Chen et al., arXiv:2302.01318.
    """
    require_shape("draft_ids", draft_ids, ("R", "N"))
    num_rows, num_drafts = draft_ids.shape
    require_shape("target_probs", target_probs, (num_rows, num_drafts + 1, "V"))
    size = target_probs.shape[-1]
    require_range("V", size, 1, 4_194_304)
    if draft_probs is not None:
        require_shape("draft_probs", draft_probs, (num_rows, num_drafts, size))
    require_shape("lengths", lengths, (num_rows,))
    require_shape("uniforms", uniforms, (num_rows, num_drafts + 1))
    require_dtype("draft_ids", draft_ids, (torch.int64,))
    require_dtype("lengths", lengths, INTEGERS)
    floats = {"target_probs": target_probs, "draft_probs": draft_probs, "uniforms": uniforms}
    for name, tensor in floats.items():
        if tensor is not None:
            require_dtype(name, tensor, (torch.float32,))
            require_contiguous(name, tensor)
    require_contiguous("draft_ids", draft_ids)
    require_contiguous("lengths", lengths)
    device = require_same_device(
        draft_ids=draft_ids, target_probs=target_probs, draft_probs=draft_probs, lengths=lengths,
        uniforms=uniforms,
    )  # fmt: skip
    if not runs_triton(device):
        return rejection_sample_reference(draft_ids, target_probs, draft_probs, lengths, uniforms)
    from dspark_kernels.rejection_sampling.kernel import rejection_sample_fwd

    accepted = torch.empty(num_rows, dtype=torch.int64, device=device)
    token = torch.empty_like(accepted)
    rejection_sample_fwd(draft_ids, target_probs, draft_probs, lengths, uniforms, accepted, token)
    return accepted, token
