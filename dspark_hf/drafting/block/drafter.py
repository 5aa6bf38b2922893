"""BlockDrafter: drafts a block per row and round from the target's own features."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from dspark_hf import compat
from dspark_hf.drafting.block.context import DraftContext
from dspark_hf.drafting.block.model import block_ids
from dspark_hf.values import Proposal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from dspark_hf.drafting.block.model import BlockModel
    from dspark_hf.drafting.block.vocabulary import Vocabulary
    from dspark_hf.values import DraftRequest

logger = logging.getLogger(__name__)


class BlockDrafter:
    """DSpark's drafter over any published checkpoint, all rows in one ragged pass.

    A row is drafted for when the features of all its committed tokens but the newest are known;
    the target delivers them through `take` while it verifies.
    """

    def __init__(
        self,
        model: BlockModel,
        vocabulary: Vocabulary,
        target: PreTrainedModel,
        *,
        temperatures: Sequence[float] = (),
        name: str = "block",
    ) -> None:
        """Prepare a drafter.

        Args:
            model: Its parameters, of the target's dtype and on its device.
            vocabulary: Embedding and output head.
            target: The model it drafts for.
            temperatures: Of the confidences, one per position, from calibration; empty for 1.
            name: Name in logs and statistics.
        """
        self.model, self.vocabulary, self.target = model, vocabulary, target
        self.name = name
        self.temperatures = tuple(temperatures)
        spec = model.spec
        self.target_layers = spec.target_layers
        self.block_size = spec.num_drafts
        self.vocab_size = int(compat.text_config(target).vocab_size)
        self._context: DraftContext | None = None
        self._has_warned = False

    @property
    def context(self) -> DraftContext:
        """Rows' context; nothing is kept between calls."""
        if self._context is None:
            self._context = DraftContext(self.model)
        return self._context

    @torch.no_grad()
    def take(self, row_id: int, start: int, features: torch.Tensor) -> None:
        """Take in the target's features of a row's tokens.

        Args:
            row_id: The row.
            start: Position of the first token.
            features: Of shape (T, m * d).
        """
        self.context.take(row_id, start, features)

    @torch.no_grad()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Draft a block for every row whose context is known, as the Drafter protocol says."""
        proposals = [Proposal() for _ in requests]
        places = [i for i, request in enumerate(requests) if self._is_ready(request)]
        if not places:
            return proposals
        rows = [requests[i].row_id for i in places]
        self.context.project(rows)
        order, positions = self.context.open_blocks(rows)
        asked = [requests[places[i]] for i in order]
        device = self.model.device
        anchors = torch.tensor([request.ids[-1] for request in asked], device=device)
        embeds = self.vocabulary.embed(block_ids(anchors, self.model.spec), self.model.dtype)
        hidden = self.model(embeds.flatten(0, 1)[None], self.model.rotary(positions), self.context)
        hidden = hidden[0].unflatten(0, (len(rows), -1))  # [R, N, d]
        for i, proposal in zip(order, self._draft(asked, hidden, anchors), strict=True):
            proposals[places[i]] = proposal
        return proposals

    def free(self, row_id: int) -> None:
        """Forget a row."""
        if self._context is not None:
            self._context.free(row_id)
            if self._context.is_empty:
                self._context = None

    def _is_ready(self, request: DraftRequest) -> bool:
        """Roll the row's context back to what is committed; tell whether it is all there."""
        known, limit = len(request.ids) - 1, self.model.spec.max_positions
        if limit is not None and known + self.model.spec.block_size > limit:
            return False
        if self.context.length(request.row_id) < known:
            return False
        self.context.truncate(request.row_id, known)
        return True

    def _draft(
        self, requests: Sequence[DraftRequest], hidden: torch.Tensor, anchors: torch.Tensor
    ) -> list[Proposal]:
        """Choose the tokens of every row's block, left to right.

        Args:
            requests: One per row.
            hidden: Of shape (R, N, d).
            anchors: Newest committed tokens, (R,).
        """
        spec, markov = self.model.spec, self.model.markov_head
        first = 0 if spec.reads_anchor else 1
        most = max(min(request.max_tokens, spec.num_drafts) for request in requests)
        base = self.vocabulary.logits(hidden[:, first : first + most]).float()
        previous, state = anchors, None
        ids: list[list[int]] = [[] for _ in requests]
        probs: list[list[torch.Tensor]] = [[] for _ in requests]
        confidences = []
        for k in range(-first, most):
            row_hidden, token = hidden[:, k + first], None
            logits = base[:, max(k, 0)]
            if markov is not None:
                token = markov.markov_w1(previous)
                state = markov.start(token) if state is None else state
                code, state = markov.step(state, token, row_hidden)
                if k >= 0:
                    logits = logits + markov.markov_w2(code).float()
            if k < 0:
                # The anchor's row is not read; it only starts a recurrent head's state.
                continue
            if self.model.confidence_head is not None:
                confidences.append(self.model.confidence_head(row_hidden, token))
            previous = self._choose(requests, logits, ids, probs)
        survival = self._confidence(confidences)
        return [
            Proposal(
                ids[i][: request.max_tokens],
                torch.stack(probs[i])[: request.max_tokens] if probs[i] else None,
                confidence=survival[i][: request.max_tokens] if survival else (),
            )
            for i, request in enumerate(requests)
        ]

    def _choose(
        self,
        requests: Sequence[DraftRequest],
        logits: torch.Tensor,
        ids: list[list[int]],
        probs: list[list[torch.Tensor]],
    ) -> torch.Tensor:
        """Append one token per row, greedy or drawn; return them (R,) as the target's ids."""
        chosen = logits.argmax(dim=-1)
        for i, request in enumerate(requests):
            if request.warp is None:
                continue
            row = request.warp(logits[i : i + 1])
            drawn = torch.rand(1, generator=request.generator, dtype=torch.float64)
            total = row[0].double().cumsum(dim=0)
            place = torch.searchsorted(total, drawn.to(total.device) * total[-1], right=True)
            place = place.clamp_max(int(row[0].nonzero()[-1]))
            chosen[i] = place[0]
            probs[i].append(self.vocabulary.scatter(row, self.vocab_size)[0].cpu())
        chosen = self.vocabulary.to_target(chosen)
        for i, token in enumerate(chosen.tolist()):
            ids[i].append(token)
        return chosen

    def _confidence(self, logits: list[torch.Tensor]) -> list[list[float]]:
        """Return each row's calibrated confidences."""
        if not logits:
            return []
        stacked = torch.stack(logits, dim=-1).float()  # [R, N]
        if self.temperatures:
            heat = torch.tensor(self.temperatures[: stacked.shape[1]], device=stacked.device)
            stacked = stacked / heat
        return [[float(c) for c in row] for row in torch.sigmoid(stacked).tolist()]
