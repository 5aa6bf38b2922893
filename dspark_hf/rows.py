"""Row: one sequence being decoded, with everything that is its own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from dspark_hf.metrics import SpeculationRecord
from dspark_hf.verification.acceptance import Coupled, Greedy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dspark_hf.processing import RowCriteria, RowProcessors
    from dspark_hf.values import Warp
    from dspark_hf.verification.acceptance import AcceptanceRule


@dataclass
class Row:
    """A sequence, its sampling settings and its output.

    Attributes:
        row_id: Name of the row in targets, drafters and schedules.
        ids: Committed tokens without padding; all but the last are in the target's cache.
        pad: Left padding that processors and criteria see before the tokens.
        pad_ids: The tokens it consists of.
        rule: Acceptance rule.
        processors: Logits processors bound to this row.
        criteria: Stopping criteria.
        generator: The row's random stream, on the CPU.
        greedy: Whether tokens are the best ones rather than drawn.
        device: Where processors and criteria want the prefix.
        limit: Positions the model has; None without a limit.
        max_draft_tokens: Most draft tokens of a round, whatever the schedule; None for no limit.
        place: Place in the batch of its call.
        on_token: Called with every committed token, for streaming.
        scores: Processed scores of every emitted token, or None when not wanted.
        logits: Raw logits of every emitted token, or None when not wanted.
        finished: Whether a stop was met.
        record: The row's statistics.
    """

    row_id: int
    ids: list[int]
    pad: int
    pad_ids: list[int]
    rule: AcceptanceRule
    processors: RowProcessors
    criteria: RowCriteria
    generator: torch.Generator
    greedy: bool
    device: torch.device
    limit: int | None = None
    max_draft_tokens: int | None = None
    place: int = 0
    on_token: Callable[[int], None] | None = None
    scores: list[torch.Tensor] | None = None
    logits: list[torch.Tensor] | None = None
    finished: bool = False
    record: SpeculationRecord = field(default_factory=SpeculationRecord)

    def __post_init__(self) -> None:
        """Lay the prompt out as processors and criteria see it."""
        self.num_prompt_tokens = len(self.ids)
        padded = self.pad_ids + self.ids
        self._buffer = torch.empty(len(padded) + 64, dtype=torch.long, device=self.device)
        self._buffer[: len(padded)] = torch.tensor(padded)

    @property
    def num_new_tokens(self) -> int:
        """Tokens committed after the prompt."""
        return len(self.ids) - self.num_prompt_tokens

    @property
    def prefix(self) -> torch.Tensor:
        """Tokens so far with their padding, int64 of shape (1, length)."""
        return self._buffer[None, : self.pad + len(self.ids)]

    @property
    def warp(self) -> Warp | None:
        """The sampling distribution for drafters; None when greedy."""
        return None if self.greedy else self.processors.warp

    @property
    def is_resampled(self) -> bool:
        """Whether which drafts are verified shapes the text: not if greedy, not if coupled."""
        return not isinstance(self.rule, Greedy | Coupled)

    @property
    def can_restore(self) -> bool:
        """Whether tokens alone say how far the row is: no scores are kept, nothing keeps state."""
        keeps_scores = self.scores is not None or self.logits is not None
        is_stateless = self.processors.is_stateless and self.criteria.is_stateless
        return is_stateless and not keeps_scores

    def room(self) -> int:
        """Return how many draft tokens a round may verify, and not pass a limit."""
        room = 1 << 30 if self.max_draft_tokens is None else self.max_draft_tokens
        if self.criteria.max_tokens is not None:
            room = min(room, self.criteria.max_tokens - len(self.ids) - 1)
        if self.limit is not None:
            room = min(room, self.limit - len(self.ids))
        return max(room, 0)

    def emit(
        self, token: int, scores: torch.Tensor, logits: torch.Tensor, *, drafted: bool
    ) -> None:
        """Commit a token: store what was asked for, stream it, and check every stop.

        Args:
            token: The token.
            scores: Processed scores it was chosen by, of shape (V,).
            logits: Raw logits of the position, of shape (V,).
            drafted: Whether it is an accepted draft token.
        """
        if self.scores is not None:
            self.scores.append(scores.clone())
        if self.logits is not None:
            self.logits.append(logits.clone())
        self._append(token, drafted=drafted)
        if self.on_token is not None:
            self.on_token(token)
        history = None
        if self.scores is not None and self.criteria.has_custom:
            history = tuple(score[None] for score in self.scores)
        self.finished = self.criteria.is_met(self.ids, self.prefix, history)

    def restore(self, tokens: Sequence[int]) -> None:
        """Take over tokens that were committed elsewhere; nobody is told of them.

        The row goes on from them. Its random stream starts anew, keyed by how many they are: the
        old stream's numbers have shaped these tokens and must not shape what follows.

        Args:
            tokens: All that the row has had, in order; it must be new, and `can_restore`.
        """
        if not tokens:
            return
        for token in tokens:
            self._append(token, drafted=False)
        name = f"{self.generator.initial_seed()}/{len(tokens)}".encode()
        key = hashlib.blake2b(name, digest_size=8).digest()
        self.generator.manual_seed(int.from_bytes(key, "big") >> 1)
        self.finished = self.criteria.is_met(self.ids, self.prefix, None)

    def _append(self, token: int, *, drafted: bool) -> None:
        length = self.pad + len(self.ids)
        if length == len(self._buffer):
            self._buffer = torch.cat([self._buffer, torch.empty_like(self._buffer)])
        self._buffer[length] = token
        self.ids.append(token)
        self.record.new_tokens += 1
        self.record.accepted_mask.append(drafted)
