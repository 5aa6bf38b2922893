"""A tiny random block drafter is hardly ever right; this one knows some texts beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dspark_hf.values import DraftRequest, Proposal

WRONG_EVERY = 5
"""Of so many positions of a text one is drafted wrong: blocks are accepted in part."""


class KnowingDrafter:
    """Drafts every second row from a text that it was told, if it was; the others by a drafter.

    The drafter drafts them all, so that what it keeps of rows is what it would keep.
    """

    def __init__(self, inner: Any, vocab_size: int) -> None:
        """Know nothing yet.

        Args:
            inner: A drafter that reads features.
            vocab_size: Token ids of the target.
        """
        self.inner, self.name, self.vocab_size = inner, inner.name, vocab_size
        self.block_size, self.target_layers = inner.block_size, inner.target_layers
        self._texts: Sequence[list[int]] = ()
        self._rows: dict[int, list[int]] = {}

    def learn(self, texts: Sequence[list[int]]) -> None:
        """Know these texts from now on, prompts included."""
        self._texts = texts

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Propose what comes next in a text that begins like the row."""
        answers: list[Proposal] = self.inner.propose(requests)
        for i, request in enumerate(requests):
            length = len(answers[i].ids)
            if request.row_id % 2 and length:
                known = self._next(request, length)
                answers[i] = Proposal(known) if known else answers[i]
        return answers

    def take(self, row_id: int, start: int, features: torch.Tensor) -> None:
        """Pass on."""
        self.inner.take(row_id, start, features)

    def free(self, row_id: int) -> None:
        """Forget a row."""
        self._rows.pop(row_id, None)
        self.inner.free(row_id)

    def _next(self, request: DraftRequest, length: int) -> list[int]:
        ids, start = request.ids, len(request.ids)
        text = self._rows.get(request.row_id, [])
        if text[:start] != ids:
            text = next((whole for whole in self._texts if whole[:start] == ids), [])
            self._rows[request.row_id] = text
        return [
            token if (start + place) % WRONG_EVERY else (token + 1) % self.vocab_size
            for place, token in enumerate(text[start : start + length])
        ]
