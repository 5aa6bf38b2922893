"""Predictors: which pages the next queries will attend to, from page summaries.

Source of the bound: Quest (Tang et al., 2024); softening it by alpha < 1 and averaging softmaxed
scores over the heads of a group selects better at the same cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_JOINED = 20e6
"""Operations up to which all heads are multiplied with the pages of all: most of it is thrown away,
but it takes one product in place of one a head, and small products cost little but their call."""


class Predictor(Protocol):
    """Scores pages. A frozen dataclass with this method is a predictor.

    One that scores each query by itself may say so by `packs_tokens = True`: prompts then ask it
    about several tokens at once, their queries packed as R = heads of a group x tokens.
    """

    def scores(
        self,
        query: torch.Tensor,  # [Hkv, R, D]
        summary: torch.Tensor,  # [Hkv, P, 2 D]
        layer: int,
        scale: float,
    ) -> torch.Tensor:  # [Hkv, R, P]
        """Return an estimate of each page's largest logit, float32.

        Args:
            query: Queries of a row's first new token, those of one group packed: R heads.
            summary: Of the row's pages: middle and half spread of their keys.
            layer: Index of the layer.
            scale: Factor on dot products.
        """


@runtime_checkable
class TrainedPredictor(Protocol):
    """What a predictor has besides, if it only fits the model it was trained for."""

    def require_fit(self, model: PreTrainedModel) -> None:
        """Refuse another model, by a CheckpointError, before it decodes anything."""


@dataclass(frozen=True)
class BoundPredictor:
    """q . middle + alpha |q| . half: at alpha 1 no key of the page scores higher (Quest).

    Attributes:
        alpha: Share of the half spread that counts.
    """

    packs_tokens: ClassVar[bool] = True
    alpha: float = 0.5

    def scores(
        self,
        query: torch.Tensor,
        summary: torch.Tensor,
        layer: int,  # noqa: ARG002 - the protocol's signature
        scale: float,
    ) -> torch.Tensor:
        """Score as the Predictor protocol says: one product of [q ; alpha |q|] and summaries."""
        return page_products(softened(query, self.alpha), summary).float() * scale


@dataclass(frozen=True)
class RecentPredictor:
    """Prefers the newest pages: with the sinks that are always kept, a window (StreamingLLM)."""

    packs_tokens: ClassVar[bool] = True

    def scores(
        self,
        query: torch.Tensor,
        summary: torch.Tensor,
        layer: int,  # noqa: ARG002 - the protocol's signature
        scale: float,  # noqa: ARG002 - as above
    ) -> torch.Tensor:
        """Score as the Predictor protocol says, by position alone."""
        order = torch.arange(summary.shape[1], device=query.device, dtype=torch.float32)
        # Within one unit, so that no softmax of them underflows and leaves the order to chance.
        return (order / len(order)).expand(query.shape[0], query.shape[1], -1)


def softened(query: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return [q ; alpha |q|], what the softened bound multiplies with a summary; (..., 2 D)."""
    return torch.cat([query, query.abs() * alpha], dim=-1)


def page_products(weights: torch.Tensor, summary: torch.Tensor) -> torch.Tensor:
    """Return the products of every query's weights and every page's summary.

    Args:
        weights: Of shape (Hkv, R, 2 D).
        summary: Of shape (Hkv, P, 2 D).

    Returns:
        torch.Tensor: Of shape (Hkv, R, P), in their type.
    """
    num_kv, rows, dim = weights.shape
    apart, num_pages = summary.stride(0) // dim, summary.shape[1]
    held = (num_kv - 1) * apart + num_pages
    is_cheap = 2 * num_kv * rows * held * dim <= MAX_JOINED
    if is_cheap and summary.stride() == (apart * dim, dim, 1) and apart >= num_pages:
        # Summaries lie in a buffer with room behind each head's: with the room they are one matrix.
        every = torch.mm(weights.flatten(0, 1), summary.as_strided((held, dim), (dim, 1)).T)
        own = [every[h * rows : (h + 1) * rows, h * apart :][:, :num_pages] for h in range(num_kv)]
        return torch.stack(own)
    # Head by head: a product over a slice of a larger buffer is several times slower in bf16.
    return torch.stack([torch.mm(w, pages.T) for w, pages in zip(weights, summary, strict=True)])


def scores_of_tokens(
    predictor: Predictor,
    query: torch.Tensor,  # [Hkv, G, N, D]
    summary: torch.Tensor,  # [Hkv, P, 2 D]
    layer: int,
    scale: float,
) -> torch.Tensor:  # [Hkv, G, N, P]
    """Ask a predictor about several tokens, at once where it says that it can.

    Args:
        predictor: Who is asked.
        query: Queries of N tokens, by key head and head of its group.
        summary: As the Predictor protocol says.
        layer: Index of the layer.
        scale: Factor on dot products.
    """
    if getattr(predictor, "packs_tokens", False):
        scores = predictor.scores(query.flatten(1, 2), summary, layer, scale)
        return scores.view(*query.shape[:3], -1)
    tokens = [predictor.scores(part, summary, layer, scale) for part in query.unbind(dim=2)]
    return torch.stack(tokens, dim=2)


def page_weights(scores: torch.Tensor) -> torch.Tensor:
    """Return each page's share of a group's attention: softmax per query, then the mean.

    Args:
        scores: Of shape (Hkv, R, P).

    Returns:
        torch.Tensor: Of shape (Hkv, P); each head's sum is 1.
    """
    return torch.softmax(scores, dim=-1).mean(dim=1)
