"""ModelDrafter: any smaller causal LM that shares the target's tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from dspark_hf import compat
from dspark_hf.errors import CheckpointError
from dspark_hf.targets.select import Choice, choose_target, position_limit
from dspark_hf.values import DraftRequest, Feed, Proposal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dspark_hf.targets.base import Target


@dataclass
class _Draft:
    """One row's draft while it grows."""

    request: DraftRequest
    ids: list[int] = field(default_factory=list)
    probs: list[torch.Tensor] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)


class ModelDrafter:
    """Drafts with a causal LM, all rows in one forward per token, over a cache of its own.

    The confidence of a token is the largest probability of the distribution it is drawn or taken
    from: of a greedy draft the token's own probability. It is known before the draw, so that it
    cannot tell which token was drawn; and being the same quantity in both cases, one calibration
    serves both. It says how sure the drafter is, not how right: schedules learn that by themselves.
    """

    def __init__(self, model: PreTrainedModel, target_vocab_size: int, name: str = "model") -> None:
        """Prepare a drafter.

        Args:
            model: The drafting model; its tokenizer must be the target's (see `check_tokenizers`).
            target_vocab_size: Rows of the target's output, in tokens. The drafter's may differ by
                padding: ids only one of them knows are never proposed.
            name: Name in logs and statistics.

        Raises:
            CheckpointError: If the model generates nothing (not a causal LM).
        """
        if not isinstance(model, PreTrainedModel) or not model.can_generate():
            raise CheckpointError(
                f"a drafting model must be a causal LM; got {type(model).__name__}. Load it with "
                "AutoModelForCausalLM."
            )
        self.model = model
        self.name = name
        self.target_vocab_size = target_vocab_size
        self.vocab_size = int(compat.text_config(model).vocab_size)
        self.limit, _ = position_limit(model)
        self._choice: Choice | None = None
        self._target: Target | None = None
        self._fed: dict[int, list[int]] = {}
        self._committed: dict[int, int] = {}
        self._blocked: set[int] = set()

    @torch.no_grad()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Draft token by token, as the Drafter protocol says."""
        drafts = [_Draft(request) for request in requests]
        for request in requests:
            self._note_foreign_ids(request)
        growing = [draft for draft in drafts if self._wanted(draft) > 0]
        feeds = [self._catch_up(draft.request) for draft in growing]
        is_first = True
        while growing:
            logits = self._get_target().forward(feeds)
            for draft, feed, row_logits in zip(growing, feeds, logits, strict=True):
                self._fed[feed.row_id].extend(feed.ids)
                if is_first:
                    self._get_target().hold(feed.row_id)
                self._extend(draft, row_logits[-1:])
            is_first = False
            growing = [draft for draft in growing if len(draft.ids) < self._wanted(draft)]
            feeds = [Feed(draft.request.row_id, draft.ids[-1:], 1) for draft in growing]
        return [
            Proposal(
                draft.ids,
                torch.stack(draft.probs) if draft.probs else None,
                confidence=draft.confidence,
            )
            for draft in drafts
        ]

    def free(self, row_id: int) -> None:
        """Forget a row."""
        if self._fed.pop(row_id, None) is not None and self._target is not None:
            self._target.free(row_id)
        self._committed.pop(row_id, None)
        self._blocked.discard(row_id)
        if not self._fed:
            # Nothing is kept between calls: neither memory nor tensors made in inference mode.
            self._target = None

    def _get_target(self) -> Target:
        if self._target is None:
            self._choice = self._choice or choose_target(self.model)
            self._target = self._choice.build(self.model, 256)
        return self._target

    def _wanted(self, draft: _Draft) -> int:
        """Return how many tokens the row may be given: none past the drafter's last position."""
        request = draft.request
        if request.row_id in self._blocked:
            return 0
        if self.limit is None:
            return request.max_tokens
        return min(request.max_tokens, self.limit - len(request.ids) + 1)

    def _note_foreign_ids(self, request: DraftRequest) -> None:
        """Stop drafting for a row that holds an id this model has no embedding for."""
        known = self._committed.get(request.row_id, 0)
        if any(token >= self.vocab_size for token in request.ids[known:]):
            self._blocked.add(request.row_id)

    def _catch_up(self, request: DraftRequest) -> Feed:
        """Roll back to what was committed and feed the rest."""
        row_id, ids = request.row_id, request.ids
        fed = self._fed.setdefault(row_id, [])
        end = min(len(fed), len(ids) - 1)
        # What was committed at the last call is still there; drafts fed since may differ.
        common = min(self._committed.get(row_id, 0), end)
        while common < end and fed[common] == ids[common]:
            common += 1
        self._committed[row_id] = len(ids)
        if fed:
            self._get_target().rollback(row_id, common)
        del fed[common:]
        return Feed(row_id, ids[common:], 1)

    def _extend(self, draft: _Draft, logits: torch.Tensor) -> None:
        logits = logits[:, : self.target_vocab_size]
        warp = draft.request.warp
        if warp is None:
            draft.ids.append(int(logits.argmax(dim=-1)))
            log_prob = logits[0].max() - torch.logsumexp(logits[0], dim=-1)
            draft.confidence.append(_confidence(log_prob.exp()))
            return
        probs = warp(logits)[0].cpu()
        draft.confidence.append(_confidence(probs.max()))
        draft.ids.append(int(torch.multinomial(probs, 1, generator=draft.request.generator)))
        missing = self.target_vocab_size - len(probs)
        draft.probs.append(torch.nn.functional.pad(probs, (0, missing)) if missing else probs)


def _confidence(prob: torch.Tensor) -> float:
    """Return a probability without rounding beyond 1, and none where there is no number."""
    return max(0.0, min(float(prob), 1.0))


def check_tokenizers(
    target_size: int,
    drafter_size: int,
    target_vocab: dict[str, int] | None,
    drafter_vocab: dict[str, int] | None,
) -> None:
    """Refuse a drafter whose token ids mean something else.

    Args:
        target_size: Rows of the target's output, in tokens.
        drafter_size: Rows of the drafter's output.
        target_vocab: The target tokenizer's tokens and ids, None when unknown.
        drafter_vocab: The drafter tokenizer's.

    Raises:
        CheckpointError: If the tokenizers differ, or if the sizes do and nobody knows the
            tokenizers.
    """
    sizes = f"the target has {target_size} token ids, the drafter {drafter_size}"
    if target_vocab is not None and drafter_vocab is not None:
        if target_vocab == drafter_vocab:
            return
        raise CheckpointError(
            f"the drafter must use the target's tokenizer; theirs differ ({sizes}; "
            f"{len(target_vocab)} and {len(drafter_vocab)} tokens). Choose a drafter of the same "
            "family."
        )
    if target_size != drafter_size:
        raise CheckpointError(
            f"the drafter must use the target's tokenizer; {sizes}. If the difference is padding, "
            "pass both tokenizers (tokenizer=, drafter_tokenizer=); otherwise choose a drafter of "
            "the same family."
        )
