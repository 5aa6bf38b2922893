"""What a proposal must satisfy before it is used."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dspark_hf.errors import CheckpointError

if TYPE_CHECKING:
    from dspark_hf.values import Proposal


def checked_proposal(
    proposal: Proposal, max_tokens: int, vocab_size: int, drafter_name: str
) -> Proposal:
    """Refuse ids the target does not know and odd confidences; drop tokens not asked for.

    Args:
        proposal: What a drafter answered.
        max_tokens: Tokens it was asked for.
        vocab_size: Token ids the target knows.
        drafter_name: Who to name in an error.

    Returns:
        Proposal: At most `max_tokens` tokens.

    Raises:
        CheckpointError: If an id, the number of distributions or a confidence is not allowed.
    """
    for token in proposal.ids:
        if not 0 <= token < vocab_size:
            raise CheckpointError(
                f"drafter {drafter_name!r} must propose ids below the target's {vocab_size}; got "
                f"{token}. Use a drafter made for this target."
            )
    if proposal.probs is not None and len(proposal.probs) < len(proposal.ids):
        raise CheckpointError(
            f"drafter {drafter_name!r} must give one distribution per proposed token; got "
            f"{len(proposal.probs)} for {len(proposal.ids)} tokens. Return one row of "
            "probs per token, or None for tokens that were not drawn."
        )
    if len(proposal.confidence) not in (0, len(proposal.ids)):
        raise CheckpointError(
            f"drafter {drafter_name!r} must give one confidence per proposed token; got "
            f"{len(proposal.confidence)} for {len(proposal.ids)} tokens. Return one per token, or "
            "() for none."
        )
    for value in proposal.confidence:
        # NaN fails both comparisons.
        if not 0 <= value <= 1:
            raise CheckpointError(
                f"drafter {drafter_name!r} must give confidences from 0 to 1; got {value}. Return "
                "probabilities, not logits, or () for none."
            )
    if len(proposal.ids) <= max_tokens and not len(proposal.confidence):
        return proposal
    return dataclasses.replace(
        proposal,
        ids=proposal.ids[:max_tokens],
        confidence=tuple(float(value) for value in proposal.confidence[:max_tokens]),
    )
