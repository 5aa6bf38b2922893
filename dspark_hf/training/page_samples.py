"""What a page predictor learns from: queries of a model, and how much each page holds for them.

Windows of a text are read densely by a `FlatTarget`; at some tokens a predictor that only listens
is asked for scores, and so hears exactly what it would hear in use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from safetensors.torch import load_file, save_file

from dspark_hf.attention.pages import PAGE
from dspark_hf.attention.policy import SparsePolicy
from dspark_hf.attention.sparse import SparseRow, SparseStats
from dspark_hf.targets.flat import FlatTarget, read_prompt
from dspark_hf.values import Feed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

    from dspark_hf.targets.cache import DSparkCache, DSparkLayer


@dataclass(frozen=True)
class PageSamples:
    """Queries of one layer and window, float32.

    Attributes:
        query: Of shape (Hkv, G, Q, D).
        summary: Of the window's pages, of shape (Hkv, P, 2 D).
        log_mass: Log-sum-exp of the logits of each page's tokens, of shape (Hkv, G, Q, P); -inf for
            pages behind a query.
        pages: Pages a query sees, its own included and all of them full, of shape (Q,).
        scale: Factor on dot products.
    """

    query: torch.Tensor
    summary: torch.Tensor
    log_mass: torch.Tensor
    pages: torch.Tensor
    scale: float

    def free(self, policy: SparsePolicy) -> torch.Tensor:
        """Return which pages a policy may read or leave, for each query; bool of shape (Q, P)."""
        page = torch.arange(self.summary.shape[1])
        behind = self.pages[:, None] - policy.recent_pages
        return (page >= policy.sink_pages) & (page < behind)


class SampleFolder:
    """Samples on disk, one file per window and layer: in memory there is one layer at a time."""

    def __init__(self, folder: Path) -> None:
        """Use an empty folder.

        Args:
            folder: To write to; it exists.
        """
        self.folder = folder
        self.layers: list[int] = []

    def write(self, window: int, layer: int, samples: PageSamples) -> None:
        """Keep samples."""
        tensors = {
            "query": samples.query,
            "summary": samples.summary,
            "log_mass": samples.log_mass,
            "pages": samples.pages,
            "scale": torch.tensor(samples.scale, dtype=torch.float64),
        }
        save_file({name: t.contiguous() for name, t in tensors.items()}, self._path(window, layer))
        if layer not in self.layers:
            self.layers = sorted([*self.layers, layer])

    def read(self, window: int, layer: int) -> PageSamples:
        """Return samples that were kept."""
        tensors = load_file(self._path(window, layer))
        return PageSamples(scale=float(tensors.pop("scale")), **tensors)

    def _path(self, window: int, layer: int) -> Path:
        return self.folder / f"{window}-{layer}.safetensors"


@torch.no_grad()
def record_window(
    model: PreTrainedModel, ids: Sequence[int], places: Sequence[int]
) -> dict[int, PageSamples]:
    """Read a window densely and listen at some tokens.

    Args:
        model: A causal LM that runs on the flat target.
        ids: The window's tokens.
        places: Positions of the tokens, rising, each the last of its page: then every page that a
            query sees is full, and one summary of it serves all.

    Returns:
        dict[int, PageSamples]: By layer; without layers whose pages can never be left unread.
    """
    target = FlatTarget(model, len(ids))
    heard: dict[int, list[_Heard]] = {}
    # Reads everything, so that it computes what dense attention does.
    policy = SparsePolicy(tokens=len(ids) + PAGE, predictor=_Listener(target.cache, heard))
    target.read_sparsely(0, SparseRow(policy, SparseStats(), 0))
    read = 0
    for place in places:
        read_prompt(target, ids[read:place])
        target.forward([Feed(0, [ids[place]], 1)])
        read = place + 1
    return {layer: _gathered(queries) for layer, queries in heard.items()}


@dataclass(frozen=True)
class _Heard:
    """One query of each head (Hkv, G, D), its pages' log masses (Hkv, G, P) and summaries."""

    query: torch.Tensor
    log_mass: torch.Tensor
    summary: torch.Tensor
    scale: float


@dataclass(frozen=True)
class _Listener:
    """A predictor that notes what it is asked. The only row is in slot 0, not yet grown."""

    cache: DSparkCache
    heard: dict[int, list[_Heard]]

    def scores(
        self, query: torch.Tensor, summary: torch.Tensor, layer: int, scale: float
    ) -> torch.Tensor:
        """Score all pages alike: all of them are read."""
        keys = cast("DSparkLayer", self.cache.layers[layer]).keys[0, :, : summary.shape[1] * PAGE]
        logits = [q.float() @ k.float().T for q, k in zip(query, keys, strict=True)]
        log_mass = (torch.stack(logits) * scale).unflatten(-1, (-1, PAGE)).logsumexp(dim=-1)
        self.heard.setdefault(layer, []).append(_Heard(query.float(), log_mass, summary, scale))
        return torch.zeros_like(log_mass)


def _gathered(heard: list[_Heard]) -> PageSamples:
    """Stack queries; the last one's summary is of all pages that any of them sees."""
    last = heard[-1]
    shape = (*last.query.shape[:2], len(heard), last.summary.shape[1])
    log_mass = torch.full(shape, float("-inf"))
    for i, each in enumerate(heard):
        log_mass[:, :, i, : each.log_mass.shape[-1]] = each.log_mass
    return PageSamples(
        query=torch.stack([each.query for each in heard], dim=2).cpu(),
        summary=last.summary.float().cpu(),
        log_mass=log_mass,
        pages=torch.tensor([each.log_mass.shape[-1] for each in heard]),
        scale=last.scale,
    )
