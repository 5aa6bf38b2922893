"""One round of speculative decoding: propose, schedule, verify, accept, commit.

Source: DSpark, arXiv:2607.05147, section 3.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from dspark_hf.drafting.checks import checked_proposal
from dspark_hf.errors import CheckpointError
from dspark_hf.tracing import RoundTrace
from dspark_hf.values import DraftRequest, Feed, Proposal
from dspark_hf.verification.acceptance import Decision
from dspark_hf.verification.schedules.base import Draft, RowOutcome, RowState
from dspark_hf.verification.ties import margin_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dspark_hf.drafting.base import Drafter
    from dspark_hf.rows import Row
    from dspark_hf.targets.base import Target
    from dspark_hf.verification.schedules.base import Schedule


@dataclass(frozen=True)
class Recheck:
    """When two scores are too close to trust a forward of several tokens.

    Attributes:
        dtype: Type the target computes in.
        margin: Least gap that is trusted, in logit units; a gap within rounding never is.
    """

    dtype: torch.dtype
    margin: float

    def is_near_tie(self, scores: torch.Tensor) -> bool:
        """Tell whether the two best of the scores (V,) are too close."""
        best, second = scores.topk(2).values.tolist()
        return bool(best - second <= margin_limit(self.dtype, best, self.margin))


@dataclass
class Decoder:
    """What rows are decoded with; rows join by `start` and leave by `finish`.

    Attributes:
        target: The model that decides.
        drafter: Who guesses; None for plain decoding.
        schedule: How many guesses are made and verified.
        vocab_size: Token ids the target knows.
        recheck: Decides near-ties of greedy rows by a one-token forward; None never looks again.
        prefill_tokens: Most prompt tokens fed at once; None for all.
        trace: Told of every row's every round; None records nothing.
        on_failure: Told of a row whose own processors, criteria or streamer raise; the row is then
            finished and the others go on. None lets the error end the round.
        ends_together: Whether everybody waits for the last row, as callers of `generate()` do.
    """

    target: Target
    drafter: Drafter | None
    schedule: Schedule
    vocab_size: int
    recheck: Recheck | None = None
    prefill_tokens: int | None = None
    trace: Callable[[RoundTrace], None] | None = None
    on_failure: Callable[[Row, Exception], None] | None = None
    ends_together: bool = False

    def start(self, rows: Sequence[Row]) -> None:
        """Feed the rows' prompts and commit each row's first token."""
        waiting = list(rows)
        while waiting:
            self.round([], [(row, self.prefill_tokens) for row in waiting])
            waiting = [row for row in waiting if not row.num_new_tokens]

    def round(self, rows: Sequence[Row], starting: Sequence[tuple[Row, int | None]] = ()) -> None:
        """Advance every row by at least one token; feed starting rows a part of their prompts.

        A starting row whose prompt ends in its part commits its first token. A row that has tokens
        and lost its cache is started again: all but its newest token are fed.

        Args:
            rows: Started rows that are not finished.
            starting: Rows that are not `is_fed`, and how much each is fed at most; None for all.
        """
        begin = perf_counter()
        states = [self._state(row) for row in rows]
        proposals = self._propose(rows, states)
        drafted = perf_counter()
        drafts = [
            Draft(len(p.ids), p.signal, p.confidence, row.is_resampled and p.probs is not None)
            for row, p in zip(rows, proposals, strict=True)
        ]
        lengths = self.schedule.cut(states, drafts) if rows else []
        feeds = [
            Feed(row.row_id, [row.ids[-1], *proposal.ids[:length]], length + 1)
            for row, proposal, length in zip(rows, proposals, lengths, strict=True)
        ]
        feeds += [self._part(row, most) for row, most in starting]
        start = perf_counter()
        logits = self._verify(feeds)
        verified = perf_counter()
        outcomes = []
        verdicts = zip(rows, proposals, lengths, logits[: len(rows)], strict=True)
        for row, proposal, length, row_logits in verdicts:
            outcome = self._settle(row, proposal, length, row_logits)
            if outcome is not None:
                outcomes.append(outcome)
        for (row, _), row_logits in zip(starting, logits[len(rows) :], strict=True):
            if not row.num_new_tokens and self.target.length(row.row_id) == len(row.ids):
                self._guarded(row, Proposal(), row_logits)
        if outcomes:
            # What a forward costs that also reads prompts says nothing of drafts.
            is_mixed = bool(starting) or len(outcomes) < len(rows)
            seconds = None if is_mixed else verified - start
            num_tokens = sum(len(feed.ids) for feed in feeds[: len(rows)])
            context = sum(state.context for state in states)
            self.schedule.observe(outcomes, num_tokens, context, seconds)
        other = perf_counter() - verified + start - drafted
        num_rows = len(rows) + len(starting)
        for row in rows:
            row.record.draft_s += (drafted - begin) / len(rows)
        for row in [*rows, *(row for row, _ in starting)]:
            row.record.verify_s += (verified - start) / num_rows
            row.record.other_s += other / num_rows if row.record.rounds else 0.0

    def is_fed(self, row: Row) -> bool:
        """Tell whether a row is ready for a round: all but its newest token are cached."""
        return row.num_new_tokens > 0 and self.target.length(row.row_id) == len(row.ids) - 1

    def _part(self, row: Row, most: int | None) -> Feed:
        """Return the next tokens that a row must be fed before it can go on."""
        cached = self.target.length(row.row_id)
        end = len(row.ids) - bool(row.num_new_tokens)
        if most is not None:
            end = min(end, cached + most)
        return Feed(row.row_id, row.ids[cached:end], 1, is_prompt=True)

    def _settle(
        self, row: Row, proposal: Proposal, length: int, logits: torch.Tensor
    ) -> RowOutcome | None:
        """Commit what a row's verified draft comes to; None if the row failed."""
        kept = dataclasses.replace(
            proposal, ids=proposal.ids[:length], confidence=proposal.confidence[:length]
        )
        settled = self._guarded(row, kept, logits)
        if settled is None:
            return None
        accepted, cut = settled
        row.record.count_round(len(proposal.ids), length, accepted, cut=cut)
        self._note(row, proposal, length, cut=cut)
        self.target.rollback(row.row_id, len(row.ids) - 1)
        return RowOutcome(row.row_id, kept.signal, length, accepted, kept.confidence, is_cut=cut)

    def _guarded(
        self, row: Row, proposal: Proposal, logits: torch.Tensor
    ) -> tuple[int, bool] | None:
        """Accept as `_accept` does; a row that fails is finished alone where somebody is told."""
        if self.on_failure is None:
            return self._accept(row, proposal, logits.to(row.device))
        try:
            return self._accept(row, proposal, logits.to(row.device))
        except Exception as error:  # noqa: BLE001 - whatever a caller's own code raises
            row.finished = True
            self.on_failure(row, error)
            return None

    def finish(self, row: Row) -> None:
        """Release what is held for a row, finished or not."""
        self.target.free(row.row_id)
        self.schedule.free(row.row_id)
        if self.drafter is not None:
            self.drafter.free(row.row_id)

    def _state(self, row: Row) -> RowState:
        limit = row.criteria.max_tokens if self.ends_together else None
        left = limit - len(row.ids) if limit else None
        return RowState(row.row_id, len(row.ids) - 1, row.room(), left)

    def _propose(self, rows: Sequence[Row], states: Sequence[RowState]) -> list[Proposal]:
        proposals = [Proposal() for _ in rows]
        if self.drafter is None or not rows:
            return proposals
        asked = self.schedule.ask(states)
        places = [i for i, length in enumerate(asked) if length > 0]
        if not places:
            return proposals
        begin = perf_counter()
        answers = self.drafter.propose(
            [
                DraftRequest(rows[i].row_id, rows[i].ids, asked[i], rows[i].warp, rows[i].generator)
                for i in places
            ]
        )
        if len(answers) != len(places):
            raise CheckpointError(
                f"drafter {self.drafter.name!r} must return one proposal per request; got "
                f"{len(answers)} for {len(places)}. Return an empty Proposal() to say nothing."
            )
        for i, answer in zip(places, answers, strict=True):
            proposals[i] = checked_proposal(answer, asked[i], self.vocab_size, self.drafter.name)
        longest = max(len(proposal.ids) for proposal in proposals)
        # A row's first draft also pays for reading its prompt.
        if longest and all(rows[i].record.drafted for i in places):
            self.schedule.observe_draft(longest, perf_counter() - begin, len(places))
        return proposals

    def _note(self, row: Row, proposal: Proposal, length: int, *, cut: bool) -> None:
        if self.trace is not None:
            self.trace(RoundTrace.of(row, proposal, self.drafter, verified=length, cut=cut))

    def _verify(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        logits = self.target.forward(feeds)
        if logits[0].device.type != "cpu":
            # Every token below waits for the device anyway; waiting here makes seconds honest.
            torch.accelerator.synchronize(logits[0].device)
        return logits

    def _accept(self, row: Row, proposal: Proposal, logits: torch.Tensor) -> tuple[int, bool]:
        """Commit the row's tokens of this round, one at a time, each on its true prefix.

        Returns:
            tuple[int, bool]: Draft tokens accepted, and whether the round ended at one of them.
        """
        length = len(proposal.ids)
        is_plain = row.greedy and not row.processors.processors
        best = logits.argmax(dim=-1).tolist() if is_plain else []
        k = 0
        while True:
            draft = proposal.ids[k] if k < length else None
            raw, is_rechecked = logits[k], False
            scores = raw if is_plain else row.processors(row.prefix, raw)
            if length and row.greedy and self.recheck and self.recheck.is_near_tie(scores):
                choice, is_rechecked = int(scores.argmax()), True
                raw = self._step_alone(row)
                scores = row.processors(row.prefix, raw)
                row.record.flips += int(scores.argmax()) != choice
            if is_plain and not is_rechecked:
                decision = Decision(best[k], best[k] == draft)
            else:
                probs = None if proposal.probs is None or draft is None else proposal.probs[k]
                decision = row.rule.decide(scores, draft, probs, len(row.ids))
            row.emit(decision.token, scores, raw, drafted=decision.accepted)
            k += decision.accepted
            # What was verified behind a rechecked token saw the cache before it was put right.
            if row.finished or is_rechecked or not decision.accepted:
                return k, decision.accepted

    def _step_alone(self, row: Row) -> torch.Tensor:
        """Feed the row's newest token alone, as plain decoding does, and return its logits."""
        row.record.rechecks += 1
        begin = perf_counter()
        self.target.rollback(row.row_id, len(row.ids) - 1)
        logits = self._verify([Feed(row.row_id, row.ids[-1:], 1)])[0][0].to(row.device)
        row.record.verify_s += perf_counter() - begin
        return logits
