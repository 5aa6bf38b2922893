"""The table of a pruned draft vocabulary: offsets from draft ids to target ids."""

from __future__ import annotations

import torch

from dspark_hf.errors import CheckpointError

GET = "Get the checkpoint with its table; without it, ids would mean other tokens."


def target_ids(d2t: torch.Tensor) -> torch.Tensor:
    """Return the target's id of every draft id.

    Args:
        d2t: Offsets, integers of shape (V_draft,).

    Returns:
        torch.Tensor: int64 of shape (V_draft,).
    """
    return torch.arange(len(d2t), dtype=torch.int64, device=d2t.device) + d2t.to(torch.int64)


def kept_mask(d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return which target ids the drafter can propose (t2d).

    Args:
        d2t: Offsets, integers of shape (V_draft,).
        vocab_size: Ids of the target.

    Returns:
        torch.Tensor: bool of shape (V,).
    """
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[target_ids(d2t)] = True
    return mask


def checked_table(
    d2t: torch.Tensor | None, t2d: torch.Tensor | None, *, vocab_size: int, draft_vocab_size: int
) -> torch.Tensor | None:
    """Check a table against the vocabularies and, if there is one, against its inverse.

    Args:
        d2t: Offsets as found in the checkpoint.
        t2d: Which target ids are kept, bool of shape (V,), as found in the checkpoint.
        vocab_size: Ids of the target.
        draft_vocab_size: Ids of the drafter.

    Returns:
        torch.Tensor | None: Offsets, int64 of shape (V_draft,); None if nothing is pruned.

    Raises:
        CheckpointError: If the vocabulary is pruned and the table is missing or wrong.
    """
    if draft_vocab_size == vocab_size:
        if d2t is not None and bool(d2t.to(torch.int64).ne(0).any()):
            raise CheckpointError(
                f"d2t must be zero where draft_vocab_size is the target's {vocab_size}; got other "
                f"offsets. {GET}"
            )
        return None
    if draft_vocab_size > vocab_size:
        raise CheckpointError(
            f"draft_vocab_size must be at most the target's {vocab_size}; got {draft_vocab_size}. "
            "Repair the drafter's config.json."
        )
    if d2t is None:
        raise CheckpointError(
            f"a draft vocabulary of {draft_vocab_size} out of {vocab_size} ids must come with the "
            f"table d2t; got none. {GET}"
        )
    if tuple(d2t.shape) != (draft_vocab_size,) or d2t.is_floating_point():
        raise CheckpointError(
            f"d2t must be integers of shape ({draft_vocab_size},); got {d2t.dtype} of shape "
            f"{tuple(d2t.shape)}. {GET}"
        )
    ids = target_ids(d2t)
    if bool((ids.diff() <= 0).any()):
        raise CheckpointError(
            "draft id + d2t[draft id] must increase with the draft id, as d2t holds offsets; got "
            f"ids that do not. {GET}"
        )
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise CheckpointError(
            f"draft id + d2t[draft id] must lie between 0 and {vocab_size - 1}; got "
            f"{int(ids[0])} to {int(ids[-1])}. {GET}"
        )
    if t2d is None and not bool(d2t.ne(0).any()):
        raise CheckpointError(
            f"d2t must say which {draft_vocab_size} of {vocab_size} ids are kept; got zeros and no "
            f"t2d that confirms the first {draft_vocab_size}. {GET}"
        )
    if t2d is not None:
        _check_inverse(d2t, t2d, vocab_size)
    return d2t.to(torch.int64)


def _check_inverse(d2t: torch.Tensor, t2d: torch.Tensor, vocab_size: int) -> None:
    if tuple(t2d.shape) != (vocab_size,):
        raise CheckpointError(
            f"t2d must have one entry for each of the target's {vocab_size} ids; got shape "
            f"{tuple(t2d.shape)}. {GET}"
        )
    if not torch.equal(t2d.bool(), kept_mask(d2t, vocab_size)):
        raise CheckpointError(
            f"t2d must keep the {len(d2t)} ids that d2t maps to; got {int(t2d.bool().sum())} ids, "
            f"not the same ones. {GET}"
        )
