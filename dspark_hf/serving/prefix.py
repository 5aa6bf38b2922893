"""PrefixCache: keys and values of prompt beginnings, shared by the requests that have them.

A beginning is cut into pages of 16 tokens. A page's key is a hash of its tokens and of the key of
the page before it, from a root that names the model: equal keys mean equal beginnings. A page also
holds the target's features of its tokens where a drafter reads them, so that a request that skips
them drafts as if it had not.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch

from dspark_hf import compat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from dspark_hf.serving.store import KvStore

PAGE = 16
"""Tokens per page."""
FEATURES = "features"
SAMPLED = 64
"""Numbers of each parameter that name a model."""


class PrefixCache:
    """Pages of prompt beginnings in a store."""

    def __init__(self, model: PreTrainedModel, store: KvStore, taps: Sequence[int] = ()) -> None:
        """Prepare.

        Args:
            model: Whose keys and values they are.
            store: Where they lie.
            taps: Blocks whose features pages hold too; empty for none.
        """
        self.model, self.store, self.with_features = model, store, bool(taps)
        self.root = _model_name(model, taps)
        self.tokens_found = self.tokens_asked = 0

    def keys(self, ids: Sequence[int]) -> list[str]:
        """Return the keys of the whole pages of a prompt, first to last."""
        keys, before = [], self.root
        for start in range(0, len(ids) - PAGE + 1, PAGE):
            page = ",".join(map(str, ids[start : start + PAGE]))
            before = hashlib.blake2b(f"{before}|{page}".encode(), digest_size=16).hexdigest()
            keys.append(before)
        return keys

    def find(
        self, ids: Sequence[int]
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor | None]:
        """Return the longest known beginning of a prompt, short of its last token.

        Args:
            ids: The prompt.

        Returns:
            tuple: Each layer's keys and values, (Hkv, n, D), on the model's device, none if no page
            is known; and the features (n, F), None if there are none.
        """
        pages = []
        for key in self.keys(ids[:-1]):
            page = self.store.get(key) if key in self.store else None
            if page is None:
                break
            pages.append(page)
        self.tokens_asked += len(ids)
        self.tokens_found += PAGE * len(pages)
        if not pages:
            return [], None
        device = compat.input_device(self.model)

        def joined(name: str, axis: int) -> torch.Tensor:
            return torch.cat([page[name] for page in pages], dim=axis).to(device)

        num_layers = sum(name.startswith("keys") for name in pages[0])
        layers = [(joined(f"keys{i}", 1), joined(f"values{i}", 1)) for i in range(num_layers)]
        return layers, joined(FEATURES, 0) if self.with_features else None

    def keep(
        self,
        ids: Sequence[int],
        layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
        features: torch.Tensor | None,
    ) -> None:
        """Keep the whole pages of a prompt that was read.

        Args:
            ids: The prompt.
            layers: Each layer's keys and values of at least its tokens, of shape (Hkv, T, D).
            features: Of its tokens, (T, F); None keeps nothing where they are wanted.
        """
        if self.with_features and (features is None or len(features) < len(ids)):
            return
        for place, key in enumerate(self.keys(ids)):
            if key in self.store:
                continue
            span = slice(place * PAGE, (place + 1) * PAGE)
            page: dict[str, torch.Tensor] = {}
            for layer, (keys, values) in enumerate(layers):
                page[f"keys{layer}"] = keys[:, span].clone()
                page[f"values{layer}"] = values[:, span].clone()
            if features is not None and self.with_features:
                page[FEATURES] = features[span].clone()
            if not self.store.put(key, page):
                return


def _model_name(model: PreTrainedModel, taps: Sequence[int]) -> str:
    """Return a short name that differs for models whose keys and values would.

    By configuration and a sample of every parameter, so that a model trained further, or with
    another adapter, is another one.
    """
    digest = hashlib.blake2b(digest_size=16)
    config: Any = compat.text_config(model)
    digest.update(f"{type(model).__name__}{config.to_json_string()}{model.dtype}".encode())
    digest.update(repr(tuple(taps)).encode())
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        if parameter.is_meta:
            continue
        flat = parameter.detach().reshape(-1)
        sample = flat[_places(flat.numel()).to(flat.device)].float().cpu()
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()


def _places(size: int) -> torch.Tensor:
    """Return SAMPLED places spread over so many numbers, or all of them."""
    # In float32 the last of many millions would be rounded to one beyond the end.
    return torch.linspace(0, size - 1, min(SAMPLED, size), dtype=torch.float64).long()
