"""A row's view of Transformers' logits processors and stopping criteria.

Both are called exactly once per emitted token, in order, on that row's true prefix (its left
padding included, as plain generate() shows it), so even a processor that keeps state sees the
sequence of calls it would see in plain decoding.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation import logits_process as lp
from transformers.generation import stopping_criteria as sc

if TYPE_CHECKING:
    from collections.abc import MutableSequence, Sequence

HISTORY_FREE = frozenset(
    {
        lp.TemperatureLogitsWarper, lp.TopKLogitsWarper, lp.TopPLogitsWarper, lp.TopHLogitsWarper,
        lp.MinPLogitsWarper, lp.TypicalLogitsWarper, lp.EpsilonLogitsWarper, lp.EtaLogitsWarper,
        lp.InfNanRemoveLogitsProcessor, lp.LogitNormalization, lp.SuppressTokensLogitsProcessor,
    }
)  # fmt: skip
"""Processors whose answer depends on the scores alone: the drafter's logits get them too."""
STATELESS = HISTORY_FREE | {
    lp.MinLengthLogitsProcessor, lp.MinNewTokensLengthLogitsProcessor,
    lp.RepetitionPenaltyLogitsProcessor, lp.NoRepeatNGramLogitsProcessor,
    lp.SequenceBiasLogitsProcessor, lp.NoBadWordsLogitsProcessor,
    lp.ForcedBOSTokenLogitsProcessor, lp.ForcedEOSTokenLogitsProcessor,
    lp.ExponentialDecayLengthPenalty, lp.SuppressTokensAtBeginLogitsProcessor,
    lp.WatermarkLogitsProcessor, lp.EncoderRepetitionPenaltyLogitsProcessor,
    lp.EncoderNoRepeatNGramLogitsProcessor, lp.PrefixConstrainedLogitsProcessor,
}  # fmt: skip
"""Processors whose answer depends on the scores, the row's prefix and its place in the batch."""
STATEFUL = frozenset(
    {lp.UnbatchedClassifierFreeGuidanceLogitsProcessor, lp.SynthIDTextWatermarkLogitsProcessor}
)
"""Processors that carry state for the whole batch from call to call."""
PER_ROW_CRITERIA = frozenset(
    {sc.MaxLengthCriteria, sc.MaxTimeCriteria, sc.StopStringCriteria, sc.EosTokenCriteria}
)
PER_ROW = "dspark_per_row"
"""Attribute a user's own processor or criterion sets to True to declare that its answer for a row
depends on that row alone; needed only in batches."""


def refusal(processors: Sequence[Any], criteria: Sequence[Any], batch_size: int) -> str | None:
    """Say why these processors and criteria cannot be evaluated row by row.

    Args:
        processors: The call's logits processors.
        criteria: The call's stopping criteria.
        batch_size: Rows of the call.

    Returns:
        str | None: The reason, for the log line; None when they can.
    """
    for processor in processors:
        if type(processor) in STATEFUL:
            return f"{type(processor).__name__} keeps state for the whole batch"
    if batch_size == 1:
        return None
    for item, known in [(p, STATELESS) for p in processors] + [
        (c, PER_ROW_CRITERIA) for c in criteria
    ]:
        if type(item) not in known and not getattr(item, PER_ROW, False):
            return (
                f"{type(item).__name__} may depend on the whole batch; set "
                f"{PER_ROW} = True on it if each row's answer depends on that row alone"
            )
    has_eos = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    if not has_eos and any(type(c) is not sc.MaxLengthCriteria for c in criteria):
        return "without an end token, rows that stop go on until the last one stops"
    return None


def for_row(processor: Any, row: int, batch_size: int) -> Any:
    """Bind a processor that holds per-row state to one row.

    Args:
        processor: Any processor `refusal` lets through.
        row: Index of the row in the expanded batch.
        batch_size: Rows of the expanded batch.

    Returns:
        Any: The processor itself, or a copy that answers for a batch of that row alone.
    """
    kind = type(processor)
    if kind is lp.RepetitionPenaltyLogitsProcessor:
        ignore = getattr(processor, "prompt_ignore_length", None)
        if isinstance(ignore, torch.Tensor):
            processor = copy.copy(processor)
            processor.prompt_ignore_length = ignore[row : row + 1]
    elif kind is lp.EncoderRepetitionPenaltyLogitsProcessor:
        ids = processor.encoder_input_ids
        processor = copy.copy(processor)
        place = row * ids.shape[0] // batch_size
        processor.encoder_input_ids = ids[place : place + 1]
    elif kind is lp.EncoderNoRepeatNGramLogitsProcessor:
        place = row * processor.batch_size // batch_size
        processor = copy.copy(processor)
        processor.generated_ngrams = [processor.generated_ngrams[place]]
        processor.batch_size = 1
    elif kind is lp.PrefixConstrainedLogitsProcessor:
        allowed = processor._prefix_allowed_tokens_fn  # noqa: SLF001 - its only handle
        place = row // processor._num_beams  # noqa: SLF001 - as above
        processor = lp.PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(place, ids), 1)
    return processor


@dataclass(frozen=True)
class RowProcessors:
    """The processors of one row, in order."""

    processors: tuple[Any, ...]

    @classmethod
    def of(cls, processors: Sequence[Any], row: int, batch_size: int) -> RowProcessors:
        """Bind a call's processors to one row."""
        return cls(tuple(for_row(processor, row, batch_size) for processor in processors))

    @property
    def is_stateless(self) -> bool:
        """Whether calling twice on one prefix is harmless."""
        return all(
            type(processor) in STATELESS or getattr(processor, PER_ROW, False)
            for processor in self.processors
        )

    def __call__(self, prefix: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Process the scores of one position.

        Args:
            prefix: The row's tokens before the position, int64 of shape (1, length).
            scores: Raw logits, float32 of shape (V,).

        Returns:
            torch.Tensor: Processed scores of shape (V,); `scores` itself is left alone.
        """
        if not self.processors:
            return scores
        scores = scores[None].clone()
        for processor in self.processors:
            scores = processor(prefix, scores)
        return scores[0]

    def warp(self, logits: torch.Tensor) -> torch.Tensor:
        """Turn a drafter's logits (T, V) into probabilities by the history-free processors."""
        ids = torch.zeros(logits.shape[0], 1, dtype=torch.long, device=logits.device)
        for processor in self.processors:
            if type(processor) in HISTORY_FREE and type(processor) is not (
                lp.SuppressTokensLogitsProcessor
            ):
                logits = processor(ids, logits)
        return torch.softmax(logits, dim=-1)


class RowCriteria:
    """The stopping criteria of one row; the common ones are decided without tensors."""

    def __init__(self, criteria: Sequence[Any], pad: int) -> None:
        """Sort a call's criteria.

        Args:
            criteria: The call's stopping criteria.
            pad: Left padding of the row, in tokens, which lengths count too.
        """
        self.max_tokens: int | None = None
        self._stops: set[int] = set()
        self._others: list[Any] = []
        for criterion in criteria:
            if type(criterion) is sc.MaxLengthCriteria:
                limit = criterion.max_length - pad
                self.max_tokens = limit if self.max_tokens is None else min(self.max_tokens, limit)
            elif type(criterion) is sc.EosTokenCriteria:
                self._stops.update(criterion.eos_token_id.tolist())
            else:
                self._others.append(criterion)

    @property
    def has_custom(self) -> bool:
        """Whether some criterion is asked with tensors, scores included."""
        return bool(self._others)

    @property
    def is_stateless(self) -> bool:
        """Whether each answer follows from the row's prefix alone."""
        return all(type(c) in PER_ROW_CRITERIA or getattr(c, PER_ROW, False) for c in self._others)

    def restart(self) -> None:
        """Let time limits run from now on: a row that waited for its turn has not decoded yet."""
        restart(self._others)

    def is_met(self, ids: Sequence[int], prefix: torch.Tensor, scores: Any) -> bool:
        """Tell whether the row stops after its newest token.

        Args:
            ids: The row's tokens without padding.
            prefix: The same with padding, int64 of shape (1, length).
            scores: Scores so far as plain generate() passes them, a tuple or None.

        Returns:
            bool: True when any criterion says so; each is asked, as plain decoding asks it.
        """
        stop = ids[-1] in self._stops
        stop |= self.max_tokens is not None and len(ids) >= self.max_tokens
        for criterion in self._others:
            stop |= bool(torch.as_tensor(criterion(prefix, scores)).any())
        return stop


def restart(criteria: MutableSequence[Any]) -> None:
    """Let time limits among a call's criteria run from now on, by new ones in their places."""
    for place, criterion in enumerate(criteria):
        if type(criterion) is sc.MaxTimeCriteria:
            criteria[place] = sc.MaxTimeCriteria(criterion.max_time)
