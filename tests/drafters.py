"""Drafters for tests: always right, always wrong, random, noisy, early to stop, sampled, ragged.

All are pure functions of a row's committed tokens (and, for the sampled one, of its generator), so
a proposal cannot depend on the row's neighbours. Each remembers the rows it was told to forget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from dspark_hf.drafting.base import Drafter
from dspark_hf.values import DraftRequest, Proposal

Oracle = Mapping[tuple[int, ...], Sequence[int]]
"""Prompt ids to the full ids of its known plain continuation, prompt included."""


@dataclass(frozen=True)
class PureDrafter:
    """Base of the test drafters: one method, asked row by row."""

    name: str = field(default="test", kw_only=True)
    freed: list[int] = field(default_factory=list, kw_only=True, compare=False)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Propose for each row on its own."""
        return [self.propose_row(request) for request in requests]

    def propose_row(self, request: DraftRequest) -> Proposal:
        """Propose for one row; overridden by every drafter here."""
        raise NotImplementedError

    def free(self, row_id: int) -> None:
        """Note that a row has finished."""
        self.freed.append(row_id)


@dataclass(frozen=True)
class RightDrafter(PureDrafter):
    """Proposes what the target will say, from its known continuation; silent off that text."""

    oracle: Oracle

    def propose_row(self, request: DraftRequest) -> Proposal:
        """Continue the one known text the row's tokens are a prefix of."""
        ids = tuple(request.ids)
        for prompt, full in self.oracle.items():
            if ids[: len(prompt)] == prompt and tuple(full[: len(ids)]) == ids:
                return Proposal(list(full[len(ids) : len(ids) + request.max_tokens]))
        return Proposal()


@dataclass(frozen=True)
class WrongDrafter(PureDrafter):
    """Proposes the right token plus one, everywhere: nothing can be accepted."""

    right: RightDrafter
    vocab: int

    def propose_row(self, request: DraftRequest) -> Proposal:
        """Shift every token of the right proposal."""
        ids = self.right.propose_row(request).ids
        return Proposal([(token + 1) % self.vocab for token in ids])


@dataclass(frozen=True)
class NoisyDrafter(PureDrafter):
    """Right, but wrong at every `every`-th token of the text, counted from the row's first."""

    right: RightDrafter
    vocab: int
    every: int = 3

    def propose_row(self, request: DraftRequest) -> Proposal:
        """Shift the tokens whose position in the row is a multiple of `every`."""
        start, ids = len(request.ids), self.right.propose_row(request).ids
        return Proposal(
            [
                (token + 1) % self.vocab if (start + offset) % self.every == 0 else token
                for offset, token in enumerate(ids)
            ]
        )


@dataclass(frozen=True)
class RandomDrafter(PureDrafter):
    """Proposes uniformly random tokens, as a deterministic function of the text so far."""

    vocab: int
    seed: int = 0

    def propose_row(self, request: DraftRequest) -> Proposal:
        """Draw `max_tokens` tokens from a stream keyed by the row's tokens."""
        stream = _stream(self.seed, request.ids)
        return Proposal(torch.randint(self.vocab, (request.max_tokens,), generator=stream).tolist())


@dataclass(frozen=True)
class EndOfTextDrafter(PureDrafter):
    """Right, but proposes the end token at one draft position of every round."""

    right: RightDrafter
    eos: int
    at: int

    def propose_row(self, request: DraftRequest) -> Proposal:
        """Replace draft position `at` by the end token, or append it where the text ends."""
        ids = list(self.right.propose_row(request).ids)
        ids[self.at : self.at + 1] = [self.eos]
        return Proposal(ids[: request.max_tokens])


@dataclass(frozen=True)
class SampledDrafter(PureDrafter):
    """Draws from a random soft distribution and reports it, as a small draft model would.

    The logits are a deterministic function of the tokens before each position, so every token is
    drawn from exactly the distribution reported for it.
    """

    vocab: int
    seed: int = 0

    def propose_row(self, request: DraftRequest) -> Proposal:
        """Draw tokens one after another, warped as the row asks."""
        ids, rows = list(request.ids), []
        for _ in range(request.max_tokens):
            logits = torch.randn(1, self.vocab, generator=_stream(self.seed, ids))
            probs = request.warp(logits) if request.warp else logits.softmax(-1)
            draw = torch.multinomial(probs[0], 1, generator=request.generator)
            ids.append(int(draw))
            rows.append(probs[0])
        return Proposal(ids[len(request.ids) :], torch.stack(rows))


@dataclass(frozen=True)
class RaggedDrafter(PureDrafter):
    """Cuts another drafter's proposals to a length that varies by row and round, 0 included."""

    inner: Drafter
    seed: int = 0

    def propose_row(self, request: DraftRequest) -> Proposal:
        """Keep a number of tokens drawn from 0..max_tokens by the row's tokens alone."""
        stream = _stream(self.seed, request.ids)
        keep = int(torch.randint(request.max_tokens + 1, (), generator=stream))
        proposal = self.inner.propose([request])[0]
        probs = None if proposal.probs is None else proposal.probs[:keep]
        return Proposal(proposal.ids[:keep], probs, proposal.signal)


@dataclass(frozen=True)
class StatingDrafter(PureDrafter):
    """States confidences with another drafter's proposals: arbitrary, of tokens before each."""

    inner: Drafter
    seed: int = 0
    levels: Sequence[float] = (0.0, 0.4, 0.7, 0.95, 0.95, 1.0)

    def propose_row(self, request: DraftRequest) -> Proposal:
        """Name a level for each token by the text before it."""
        proposal, ids = self.inner.propose([request])[0], list(request.ids)
        told = []
        for token in proposal.ids:
            stream = _stream(self.seed, ids)
            told.append(self.levels[int(torch.randint(len(self.levels), (), generator=stream))])
            ids.append(token)
        return replace(proposal, confidence=told)


def _stream(seed: int, ids: Sequence[int]) -> torch.Generator:
    """Return a generator keyed by a seed and a row's tokens; hashes of integers never vary."""
    return torch.Generator().manual_seed(hash((seed, *ids)) % 2**63)
