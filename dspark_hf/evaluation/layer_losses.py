"""What each layer of a model loses when it reads few pages of a text, by the number of pages.

A text is read densely, and at some of its tokens every layer that selects is asked what reading the
first 1, 2, ... pages would have lost, first in the order in which the policy would read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's own abbreviation

from dspark_hf.attention.pages import PAGE
from dspark_hf.attention.policy import FlatBudget
from dspark_hf.attention.predictors import page_weights
from dspark_hf.attention.sparse import SparseRow, SparseStats, best_pages
from dspark_hf.targets.flat import FlatTarget
from dspark_hf.values import Feed

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from dspark_hf.attention.policy import SparsePolicy
    from dspark_hf.targets.cache import DSparkCache, DSparkLayer


@dataclass
class LayerLosses:
    """Losses of a layer when each key head reads 1, 2, ... pages on average, the mean over tokens.

    Attributes:
        missed: Share of attention on pages not read, the mean over heads.
        error: Squared error of the layer's attention output, relative to the output's own square.
        num_tokens: Tokens they are the mean of.
    """

    missed: NDArray[np.float64]
    error: NDArray[np.float64]
    num_tokens: int = 0

    def add(self, missed: torch.Tensor, error: torch.Tensor) -> None:
        """Take in a token's losses; with more pages than those nothing is lost."""
        self.num_tokens += 1
        for mean, token in ((self.missed, missed), (self.error, error)):
            losses = np.zeros_like(mean)
            losses[: len(token)] = token.cpu().numpy()
            mean += (losses - mean) / self.num_tokens


@dataclass(frozen=True)
class LossMeter:
    """A predictor that scores as a policy's own and measures what reading in that order loses.

    It is asked in steps that read everything, of a row in slot 0.

    Attributes:
        policy: Whose predictor, sink and recent pages count.
        cache: Of the target that asks; the row's length is still that before the step.
        num_pages: Of the longest context.
        losses: By layer.
    """

    policy: SparsePolicy
    cache: DSparkCache
    num_pages: int
    losses: dict[int, LayerLosses] = field(default_factory=dict)

    def scores(
        self, query: torch.Tensor, summary: torch.Tensor, layer: int, scale: float
    ) -> torch.Tensor:
        """Score as the Predictor protocol says."""
        scores = self.policy.predictor.scores(query, summary, layer, scale)
        weights = page_weights(scores)
        order = best_pages(
            weights, weights.numel(), self.policy.sink_pages, self.policy.recent_pages
        )
        if layer not in self.losses:
            nothing = np.zeros(self.num_pages)
            self.losses[layer] = LayerLosses(nothing, nothing.copy())
        held = cast("DSparkLayer", self.cache.layers[layer])
        span = slice(0, self.cache.lengths[0] + 1)
        self.losses[layer].add(
            *losses_in_order(query, held.keys[0, :, span], held.values[0, :, span], order, scale)
        )
        return scores


def losses_in_order(
    query: torch.Tensor,  # [Hkv, G, D]
    keys: torch.Tensor,  # [Hkv, S, D]
    values: torch.Tensor,  # [Hkv, S, Dv]
    order: torch.Tensor,  # [Hkv * P]
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # [P], [P]
    """Return what a token loses when each key head reads 1, 2, ... P pages on average.

    Args:
        query: Of the token, by key head.
        keys: Of the token and those before it.
        values: As `keys`.
        order: All (head, page) pairs, each h * P + p, in the order in which they are read.
        scale: Factor on the dot products.

    Returns:
        tuple: Share of attention missed, and the output's relative squared error, as `LayerLosses`.

    Cost: one key head at a time; its mixed values of every page, (G, P, Dv).
    """
    num_kv = len(keys)
    num_pages = len(order) // num_kv
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    reads = torch.arange(1, num_pages + 1, device=order.device) * num_kv
    missed = torch.zeros(num_pages, dtype=torch.float64, device=keys.device)
    error, square = torch.zeros_like(missed), missed.new_zeros(())
    for head, ranks in enumerate(rank.view(num_kv, num_pages)):
        shares, mixed = _by_page(query[head], keys[head], values[head], scale)
        whole = mixed.sum(dim=1)
        ranks, pages = ranks.sort()
        # How many of this head's pages are among those read; for none, nothing is mixed.
        counts = torch.searchsorted(ranks, reads)
        captured = F.pad(shares[:, pages].cumsum(dim=1), (1, 0))
        parts = F.pad(mixed[:, pages].cumsum(dim=1), (0, 0, 1, 0))
        out = parts / captured.clamp_min(torch.finfo(captured.dtype).tiny)[..., None]
        lost = (out - whole[:, None]).square().sum(dim=(0, 2))
        error += lost[counts]
        square += whole.square().sum()
        missed += 1 - captured.mean(dim=0)[counts]
    return (missed / num_kv).clamp(0, 1), error / square.clamp_min(torch.finfo(square.dtype).tiny)


def _by_page(
    query: torch.Tensor,  # [G, D]
    keys: torch.Tensor,  # [S, D]
    values: torch.Tensor,  # [S, Dv]
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # [G, P], [G, P, Dv]
    """Return each page's share of the queries' attention and its part in their output."""
    weights = torch.softmax((query.float() @ keys.float().T) * scale, dim=-1).double()
    padding = -len(keys) % PAGE
    weights = F.pad(weights, (0, padding)).unflatten(1, (-1, PAGE))
    held = F.pad(values.double(), (0, 0, 0, padding)).unflatten(0, (-1, PAGE))
    return weights.sum(dim=2), torch.einsum("gpt,ptd->gpd", weights, held)


def measure_losses(
    model: PreTrainedModel,
    windows: list[list[int]],
    per_window: int,
    policy: SparsePolicy,
    observer: Callable[[int], None] | None = None,
) -> dict[int, LayerLosses]:
    """Read windows densely and measure at tokens spread evenly over each one's second half.

    Args:
        model: A causal LM that runs on the flat target.
        windows: Token ids, all of one length.
        per_window: Tokens measured in each, or as many as its half has.
        policy: Whose predictor, sink, recent and dense pages count.
        observer: Told after every token measured.

    Returns:
        dict[int, LayerLosses]: By layer; without those that never select.
    """
    losses: dict[int, LayerLosses] = {}
    for ids in windows:
        target = FlatTarget(model, len(ids))
        # Its steps read everything, so that they compute what dense ones do.
        watched = policy.replace(
            tokens=max(policy.tokens, len(ids) + PAGE),
            predictor=LossMeter(policy, target.cache, -(-len(ids) // PAGE), losses),
            budget=FlatBudget(),
            mass=None,
            most_tokens=None,
            prefill=None,
        )
        target.read_sparsely(0, SparseRow(watched, SparseStats(), 0))
        places = np.linspace(len(ids) // 2, len(ids) - 1, per_window).round().astype(int)
        read = 0
        for place in np.unique(places).tolist():
            if place > read:
                target.forward([Feed(0, ids[read:place], 1, is_prompt=True)])
            target.forward([Feed(0, ids[place : place + 1], 1)])
            read = place + 1
            if observer is not None:
                observer(1)
    return losses
