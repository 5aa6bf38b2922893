"""One round of speculative decoding: propose, schedule, verify, accept, commit.

Source: DSpark, arXiv:2607.05147, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from dspark_hf.errors import CheckpointError
from dspark_hf.values import DraftRequest, Feed, Proposal
from dspark_hf.verification.acceptance import Decision
from dspark_hf.verification.schedule import RowOutcome, RowState
from dspark_hf.verification.ties import margin_limit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dspark_hf.drafting.base import Drafter
    from dspark_hf.rows import Row
    from dspark_hf.targets.base import Target
    from dspark_hf.verification.schedule import Schedule


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
    """

    target: Target
    drafter: Drafter | None
    schedule: Schedule
    vocab_size: int
    recheck: Recheck | None = None
    prefill_tokens: int | None = None

    def start(self, rows: Sequence[Row]) -> None:
        """Feed the rows' prompts and commit each row's first token."""
        waiting = list(rows)
        while waiting:
            feeds = []
            for row in waiting:
                cached = self.target.length(row.row_id)
                end = len(row.ids)
                if self.prefill_tokens is not None:
                    end = min(end, cached + self.prefill_tokens)
                feeds.append(Feed(row.row_id, row.ids[cached:end], 1))
            begin = perf_counter()
            logits = self._verify(feeds)
            seconds = perf_counter() - begin
            still = []
            for row, row_logits in zip(waiting, logits, strict=True):
                row.record.verify_s += seconds / len(waiting)
                if self.target.length(row.row_id) < len(row.ids):
                    still.append(row)
                else:
                    self._accept(row, Proposal(), row_logits.to(row.device))
            waiting = still

    def round(self, rows: Sequence[Row]) -> None:
        """Advance every row by at least one token.

        Args:
            rows: Started rows that are not finished.
        """
        begin = perf_counter()
        states = [RowState(row.row_id, len(row.ids) - 1, row.room()) for row in rows]
        proposals = self._propose(rows, states)
        drafted = perf_counter()
        lengths = self.schedule.cut(
            states, [len(p.ids) for p in proposals], [p.signal for p in proposals]
        )
        feeds = [
            Feed(row.row_id, [row.ids[-1], *proposal.ids[:length]], length + 1)
            for row, proposal, length in zip(rows, proposals, lengths, strict=True)
        ]
        start = perf_counter()
        logits = self._verify(feeds)
        verified = perf_counter()
        outcomes = []
        for row, proposal, length, row_logits in zip(rows, proposals, lengths, logits, strict=True):
            probs = None if proposal.probs is None else proposal.probs[:length]
            kept = Proposal(proposal.ids[:length], probs, proposal.signal)
            accepted, cut = self._accept(row, kept, row_logits.to(row.device))
            row.record.count_round(len(proposal.ids), length, accepted, cut=cut)
            self.target.rollback(row.row_id, len(row.ids) - 1)
            outcomes.append(RowOutcome(row.row_id, proposal.signal, length, accepted))
        num_tokens, context = sum(len(f.ids) for f in feeds), sum(s.context for s in states)
        self.schedule.observe(outcomes, num_tokens, context, verified - start)
        other = perf_counter() - verified + start - drafted
        for row in rows:
            row.record.draft_s += (drafted - begin) / len(rows)
            row.record.verify_s += (verified - start) / len(rows)
            row.record.other_s += other / len(rows)

    def finish(self, row: Row) -> None:
        """Release what is held for a row, finished or not."""
        self.target.free(row.row_id)
        self.schedule.free(row.row_id)
        if self.drafter is not None:
            self.drafter.free(row.row_id)

    def _propose(self, rows: Sequence[Row], states: Sequence[RowState]) -> list[Proposal]:
        proposals = [Proposal() for _ in rows]
        if self.drafter is None:
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
            proposals[i] = self._checked(answer, asked[i])
        longest = max(len(proposal.ids) for proposal in proposals)
        # A row's first draft also pays for reading its prompt.
        if longest and all(rows[i].record.drafted for i in places):
            self.schedule.observe_draft(longest, perf_counter() - begin)
        return proposals

    def _checked(self, proposal: Proposal, max_tokens: int) -> Proposal:
        """Refuse ids the target does not know; drop tokens beyond those asked for."""
        name = self.drafter.name if self.drafter is not None else ""
        for token in proposal.ids:
            if not 0 <= token < self.vocab_size:
                raise CheckpointError(
                    f"drafter {name!r} must propose ids below the target's {self.vocab_size}; got "
                    f"{token}. Use a drafter made for this target."
                )
        if proposal.probs is not None and len(proposal.probs) < len(proposal.ids):
            raise CheckpointError(
                f"drafter {name!r} must give one distribution per proposed token; got "
                f"{len(proposal.probs)} for {len(proposal.ids)} tokens. Return one row of "
                "probs per token, or None for tokens that were not drawn."
            )
        if len(proposal.ids) <= max_tokens:
            return proposal
        return Proposal(proposal.ids[:max_tokens], proposal.probs, proposal.signal)

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
