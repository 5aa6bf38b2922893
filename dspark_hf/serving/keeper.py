"""Keeper: what is kept of rows that do not run, and of prompts that were read.

Rows that run on the flat target are parked in the store, which may move them to disk, and their
prompts' beginnings are shared. Other targets' caches are parked as they are.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dspark_hf import compat
from dspark_hf.drafting.base import FeatureDrafter
from dspark_hf.files import cache_folder
from dspark_hf.serving.memory import in_bytes
from dspark_hf.serving.prefix import PrefixCache
from dspark_hf.serving.store import ROW, KvStore
from dspark_hf.targets.base import CachedRow
from dspark_hf.targets.flat import FlatTarget

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers.cache_utils import Cache

    from dspark_hf.queue_settings import QueueConfig
    from dspark_hf.rows import Row
    from dspark_hf.targets.base import Target


class Keeper:
    """Parks rows and shares beginnings."""

    def __init__(self, model: Any, settings: QueueConfig) -> None:
        """Prepare an empty store.

        Args:
            model: Wrapped.
            settings: Of the queue.
        """
        self.model = model
        folder = None
        if settings.disk_cache:
            named = settings.disk_folder
            folder = cache_folder() / "kv" if named is None else Path(named)
        host = in_bytes(settings.host_cache, torch.device("cpu"))
        self.store = KvStore(host, folder, settings.disk_cache)
        drafter = model.dspark.drafter
        taps = drafter.target_layers if isinstance(drafter, FeatureDrafter) else ()
        self.prefix = PrefixCache(model, self.store, taps) if settings.prefix_cache else None
        self._token = secrets.token_hex(4)
        self._parked: dict[int, tuple[Cache, int]] = {}
        self._features: dict[int, list[torch.Tensor]] = {}

    def park(self, target: Target, row: Row) -> None:
        """Take a row out of its target."""
        length = target.length(row.row_id)
        if length and isinstance(target, FlatTarget):
            tensors = {}
            for layer, (keys, values) in enumerate(target.keys_values(row.row_id, length)):
                tensors[f"keys{layer}"], tensors[f"values{layer}"] = keys.clone(), values.clone()
            self.store.put(self._name(row), tensors, pinned=True)
        elif length:
            place = [CachedRow(row.row_id, length, 0)]
            cache = compat.new_cache(self.model)
            self._parked[row.row_id] = (target.export(place, length, cache), length)
        target.free(row.row_id)

    def resume(self, target: Target, row: Row) -> None:
        """Put a row back where it was parked; one whose cache was lost is fed its tokens again."""
        parked = self._parked.pop(row.row_id, None)
        if parked is not None:
            # Recurrent layers do not say how many tokens they have seen.
            cache, length = parked
            target.adopt(row.row_id, cache, row.ids[:length])
        elif self._name(row) in self.store and isinstance(target, FlatTarget):
            tensors = self.store.take(self._name(row)) or {}
            device = compat.input_device(self.model)
            layers = [
                (tensors[f"keys{i}"].to(device), tensors[f"values{i}"].to(device))
                for i in range(len(tensors) // 2)
            ]
            if layers:
                target.restore(row.row_id, layers)
        if row.row_id in self._features and not target.length(row.row_id):
            # Its prompt is read from the start, and its features come from there again.
            self._features[row.row_id] = []

    def begin(
        self, target: Target, row: Row, take: Callable[[int, int, torch.Tensor], None]
    ) -> int:
        """Give a new row what is known of its prompt's beginning.

        Args:
            target: Where the row will run.
            row: Not begun.
            take: Takes the beginning's features.

        Returns:
            int: Tokens that need not be read.
        """
        if self.prefix is None or not isinstance(target, FlatTarget):
            return 0
        self._features[row.row_id] = []
        layers, features = self.prefix.find(row.ids)
        if not layers:
            return 0
        target.restore(row.row_id, layers)
        if features is not None:
            self._features[row.row_id].append(features)
            take(row.row_id, 0, features)
        return target.length(row.row_id)

    def take(self, row_id: int, features: torch.Tensor) -> None:
        """Note features of a prompt that is being read."""
        if row_id in self._features:
            self._features[row_id].append(features)

    def share(self, target: Target, row: Row) -> None:
        """Keep the beginning of a prompt that has just been read, for others."""
        parts = self._features.pop(row.row_id, None)
        if parts is None or self.prefix is None or not isinstance(target, FlatTarget):
            return
        prompt = row.ids[: row.num_prompt_tokens]
        layers = target.keys_values(row.row_id, len(prompt))
        self.prefix.keep(prompt, layers, torch.cat(parts) if parts else None)

    def forget(self, row: Row) -> None:
        """Drop what is kept of a row itself."""
        self._features.pop(row.row_id, None)
        self._parked.pop(row.row_id, None)
        self.store.discard(self._name(row))

    def _name(self, row: Row) -> str:
        # Other processes may use the same folder.
        return f"{ROW}{self._token}-{row.row_id}"
