"""Acceptance rules: which token a position commits, given the target's scores and a draft token.

Whatever the drafter proposes, the committed token is distributed as the target's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from dspark_hf.errors import CheckpointError, ConfigError, InputError, ShapeError

_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Decision:
    """What one verified position commits.

    Attributes:
        token: The token committed at this position, always distributed as the target's.
        accepted: True when it is the draft token and the draft goes on.
    """

    token: int
    accepted: bool


class AcceptanceRule(Protocol):
    """Chooses the token of one position of one row; each row holds its own rule."""

    def decide(
        self,
        scores: torch.Tensor,
        draft: int | None,
        draft_probs: torch.Tensor | None,
        position: int,
    ) -> Decision:
        """Commit one token.

        Args:
            scores: Processed target logits of shape (V,), any device; may hold -inf.
            draft: Draft token at this position, or None past the end of the draft: the bonus
                token, a plain draw that counts as not accepted.
            draft_probs: The distribution (V,) the draft token was drawn from, or None when the
                draft is deterministic (a one-point distribution).
            position: Number of tokens of the row before this one, padding not included.

        Returns:
            Decision: The committed token and whether the draft goes on after it.

        Raises:
            CheckpointError: If the draft token is outside the target's vocabulary.
            InputError: If a draw finds no token to choose (NaN, +inf, or all scores -inf).
            ShapeError: If `scores` or `draft_probs` are not of shape (V,).
        """


@dataclass(frozen=True)
class Greedy:
    """Commits the highest score; a draft token is accepted when it is that token.

    Cost: one argmax over (V,); waits for the device of the scores.
    """

    def decide(
        self,
        scores: torch.Tensor,
        draft: int | None,
        draft_probs: torch.Tensor | None,
        position: int,  # noqa: ARG002 - part of the protocol
    ) -> Decision:
        """Commit the argmax; see `AcceptanceRule.decide`."""
        _check(scores, draft, draft_probs)
        token = int(scores.argmax(dim=-1))
        return Decision(token, token == draft)


@dataclass(frozen=True)
class Rejection:
    """Keeps a draft token with probability min(1, p/q), else draws from what q left of p.

    The two cases together emit exactly p, provided that `draft_probs` is the distribution the
    token was drawn from and that the choice to verify it did not look at it.

    Attributes:
        generator: The row's source of randomness, on the CPU for every device of the scores.

    Cost: one softmax over (V,); waits for the device of the scores; a rejection or a bonus token
    also copies (V,) to the CPU.
    Source: Leviathan et al., arXiv:2211.17192, algorithm 1; Chen et al., arXiv:2302.01318.
    """

    generator: torch.Generator

    def __post_init__(self) -> None:
        """Refuse a generator that cannot draw on the CPU."""
        if self.generator.device.type != "cpu":
            raise ConfigError(
                f"generator must be a CPU generator; got one on {self.generator.device}. "
                "Pass torch.Generator()."
            )

    def decide(
        self,
        scores: torch.Tensor,
        draft: int | None,
        draft_probs: torch.Tensor | None,
        position: int,  # noqa: ARG002 - part of the protocol
    ) -> Decision:
        """Accept the draft token or draw from the residual; see `AcceptanceRule.decide`.

        Raises:
            CheckpointError: Also if `draft_probs` gives the draft token no probability.
        """
        _check(scores, draft, draft_probs)
        target = torch.softmax(scores.float(), dim=-1)
        if draft is None:
            return Decision(self._draw(target), accepted=False)
        claimed = None if draft_probs is None else _like_target(draft_probs, target)
        chance = float(acceptance_probability(target, draft, claimed))
        if math.isnan(chance):
            raise _explain_nan(target, draft)
        if float(torch.rand((), dtype=torch.float64, generator=self.generator)) < chance:
            return Decision(draft, accepted=True)
        return Decision(self._draw(residual_distribution(target, draft, claimed)), accepted=False)

    def _draw(self, probs: torch.Tensor) -> int:
        probs = probs.cpu()
        # One NaN in a softmax makes all of it NaN.
        if math.isnan(float(probs[0])):
            raise _no_token()
        return int(torch.multinomial(probs, 1, generator=self.generator))


@dataclass(frozen=True)
class Coupled:
    """Draws with noise fixed by (key, position); a draft token is accepted when it is the draw.

    The token is argmax(log p + Gumbel noise), a draw from p. As nothing but the scores, the key
    and the position enters, the text does not depend on drafter, schedule or batch; how often a
    draft token is accepted does.

    Attributes:
        key: Names the row's noise, any integer, taken modulo 2**64; distinct rows need distinct
            keys, or their draws are the same.

    Numerics: the noise is made on the CPU in float64 from NumPy's Philox words, which are the
    same on every machine, and added in float32 on the device of the scores.
    Cost: V noise values per position (about 2 ms for V = 152k on one CPU core), their copy to
    the device and one argmax; waits for the device of the scores.
    Source: the Gumbel-max trick, Maddison et al., arXiv:1411.0030.
    """

    key: int

    def decide(
        self,
        scores: torch.Tensor,
        draft: int | None,
        draft_probs: torch.Tensor | None,
        position: int,
    ) -> Decision:
        """Commit the draw of (key, position); see `AcceptanceRule.decide`."""
        _check(scores, draft, draft_probs)
        noise = gumbel_noise(self.key, position, scores.shape[-1])
        perturbed = torch.log_softmax(scores.float(), dim=-1) + noise.float().to(scores.device)
        best, index = perturbed.max(dim=-1)
        if not math.isfinite(float(best)):
            raise _no_token()
        token = int(index)
        return Decision(token, token == draft)


def acceptance_probability(
    target_probs: torch.Tensor, draft: int, draft_probs: torch.Tensor | None
) -> torch.Tensor:
    """The probability of keeping a draft token: min(1, p(x)/q(x)).

    Args:
        target_probs: Target distribution p of shape (V,).
        draft: The draft token x.
        draft_probs: The distribution q of shape (V,) that x was drawn from, or None for one point.

    Returns:
        torch.Tensor: A scalar in [0, 1]; NaN if q(x) is 0, as such a token cannot be drawn.

    Source: Leviathan et al., arXiv:2211.17192, section 2.3.
    """
    target = target_probs[draft]
    if draft_probs is None:
        return target
    drawn = draft_probs[draft]
    return torch.where(drawn > 0, (target / drawn).clamp(max=1), torch.nan)


def residual_distribution(
    target_probs: torch.Tensor, draft: int, draft_probs: torch.Tensor | None
) -> torch.Tensor:
    """What a rejected position draws from: the positive part of p - q, normalised.

    The rejected token itself has no mass in it. Where q covers p completely a rejection has
    probability zero; rounding can still lead here, and then p itself is returned.

    Args:
        target_probs: Target distribution p of shape (V,).
        draft: The rejected draft token.
        draft_probs: The distribution q of shape (V,) it was drawn from, or None for one point.

    Returns:
        torch.Tensor: A distribution of shape (V,), with the dtype and device of `target_probs`.

    Source: Leviathan et al., arXiv:2211.17192, section 2.3.
    """
    if draft_probs is None:
        rest = target_probs.clone()
        rest[draft] = 0
    else:
        rest = (target_probs - draft_probs).clamp(min=0)
    mass = rest.sum()
    return torch.where(mass > 0, rest / mass, target_probs)


def gumbel_noise(key: int, position: int, size: int) -> torch.Tensor:
    """Standard Gumbel noise that is a pure function of its arguments.

    Philox takes (key, position) whole. Seeding a torch.Generator would not do: its CPU engine
    reads 32 bits of the seed, so among 100,000 positions a pair with the same noise is likely.

    Args:
        key: Any integer, taken modulo 2**64.
        position: Any integer, taken modulo 2**64.
        size: Number of values.

    Returns:
        torch.Tensor: Finite float64 values of shape (size,) on the CPU, from -3.7 to 36.8.

    Source: Philox4x64-10, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
    """
    words = np.random.Philox(key=np.array([key & _WORD, position & _WORD], dtype=np.uint64))
    # Midpoints of 2**52 cells are exact in float64 and never 0 or 1, where the logs are infinite.
    uniform = ((words.random_raw(size) >> 12) + 0.5) * 2.0**-52
    return torch.from_numpy(-np.log(-np.log(uniform)))


def _like_target(draft_probs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    converted = draft_probs.to(target.device, target.dtype)
    if draft_probs.dtype in (torch.float16, torch.bfloat16):
        # A draw normalises its weights, and 16-bit probabilities sum to one only within 1 %.
        converted = converted / converted.sum()
    return converted


def _check(scores: torch.Tensor, draft: int | None, draft_probs: torch.Tensor | None) -> None:
    if scores.dim() != 1:
        raise ShapeError(
            f"scores must have shape (V,), one position of one row; got {tuple(scores.shape)}. "
            "Call decide once per position."
        )
    size = scores.shape[0]
    if draft is not None and not 0 <= draft < size:
        raise CheckpointError(
            f"a draft token must be in the target's vocabulary, 0 to {size - 1}; got {draft}. "
            "Use a drafter made for this target."
        )
    if draft_probs is not None and draft_probs.shape != scores.shape:
        raise ShapeError(
            f"draft_probs must have the shape of scores, {tuple(scores.shape)}; "
            f"got {tuple(draft_probs.shape)}. Map the drafter's distribution to the target's "
            "vocabulary."
        )


def _explain_nan(target: torch.Tensor, draft: int) -> Exception:
    if bool(torch.isnan(target[draft])):
        return _no_token()
    return CheckpointError(
        "draft_probs must be the distribution the draft token was drawn from; got no "
        f"probability for token {draft}. Return the probabilities sampled from, or None for a "
        "token that was not drawn at random."
    )


def _no_token() -> InputError:
    return InputError(
        "scores must hold at least one finite value, and neither NaN nor +inf; got scores that "
        "leave no token to choose. Check the logits processors and the model's dtype."
    )
