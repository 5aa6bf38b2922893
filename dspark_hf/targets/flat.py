"""FlatTarget: the new tokens of all rows as one sequence, so that linear layers cost their number.

Source: DSpark, arXiv:2607.05147, section 5.3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from dspark_hf import compat
from dspark_hf.attention import interface
from dspark_hf.attention.policy import StepSignals
from dspark_hf.errors import UnsupportedByFlatError
from dspark_hf.targets.cache import DSparkCache
from dspark_hf.values import Feed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

    from dspark_hf.attention.sparse import SparseReading, SparseRow
    from dspark_hf.targets.base import CachedRow, TakeFeatures, Taps

PROMPT_TOKENS = 2048
"""Tokens of a prompt that `read_prompt` feeds at once."""


class FlatTarget:
    """Runs every row's new tokens in one ragged forward over a DSparkCache."""

    path = "flat"

    def __init__(
        self,
        model: PreTrainedModel,
        num_positions: int = 256,
        *,
        gathers: bool = False,
        like_plain: bool = False,
    ) -> None:
        """Prepare an empty target.

        Args:
            model: A decoder whose attention goes through Transformers' registry and whose layers
                are full or sliding attention.
            num_positions: Tokens expected per row, a hint for the first allocation.
            gathers: Whether the model expands what it caches, see `DSparkCache`.
            like_plain: Whether a row's single token is attended as Transformers does it, to round
                alike in 16 bits; slower.

        Raises:
            UnsupportedByFlatError: If the model is not of that kind.
        """
        windows = compat.sliding_windows(model)
        if windows is None:
            raise UnsupportedByFlatError(
                f"{type(model).__name__} has layers other than full and sliding attention."
            )
        if not compat.can_switch_attention(model) or not compat.accepts(model, "position_ids"):
            raise UnsupportedByFlatError(
                f"{type(model).__name__} computes attention or positions in its own way."
            )
        interface.register()
        self.model = model
        self.cache = DSparkCache(windows, num_positions, gathers=gathers)
        self.cache.like_plain = like_plain
        self._adopted: dict[int, int] = {}
        self._listener: tuple[Taps, TakeFeatures] | None = None
        self._cache_key = compat.cache_key(model)
        self._configs = compat.attention_configs(model)
        self._keeps_logits = compat.supports_logits_to_keep(model)
        devices = set(getattr(model, "hf_device_map", {}).values()) - {"cpu", "disk"}
        # Indices would be sent to the first device, while the states they pick lie on the last.
        self._is_spread = len(devices) > 1

    def listen(self, taps: Taps, take: TakeFeatures) -> None:
        """Hand features to a drafter, as the Target protocol says."""
        self._listener = (taps, take)

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        """Append tokens to rows and return their logits, as the Target protocol says."""
        counts = [(feed.row_id, len(feed.ids)) for feed in feeds]
        prompts = frozenset(feed.row_id for feed in feeds if feed.is_prompt)
        order = self.cache.open_step(counts, prompts)
        for feed in feeds:
            if feed.row_id in self.cache.sparse:
                sparse = self.cache.sparse[feed.row_id]
                sparse.signals = replace(sparse.signals, token=feed.ids[0])
        ids: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        for i in order:
            feed, past = feeds[i], self.cache.lengths[feeds[i].row_id]
            ids.extend(feed.ids)
            positions.extend(range(past, past + len(feed.ids)))
            wanted.extend(range(len(ids) - feed.keep, len(ids)))
        if self._listener is None:
            logits = self._run(ids, positions, wanted)
        else:
            taps, take = self._listener
            with taps.catching():
                logits = self._run(ids, positions, wanted)
                parts = taps.features()[0].split([len(feeds[i].ids) for i in order])
            for i, features in zip(order, parts, strict=True):
                take(feeds[i].row_id, self.cache.lengths[feeds[i].row_id], features)
        self.cache.close_step(counts)
        keeps = [feeds[i].keep for i in order]
        parts = logits.split(keeps)
        result: list[torch.Tensor] = [parts[0]] * len(feeds)
        for i, part in zip(order, parts, strict=True):
            result[i] = part
            if self.cache.sparse:
                self._note_signals(feeds[i], part)
        return result

    def _run(self, ids: list[int], positions: list[int], wanted: list[int]) -> torch.Tensor:
        device = compat.input_device(self.model)
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([ids], device=device),
            "position_ids": torch.tensor([positions], device=device),
            self._cache_key: self.cache,
            "use_cache": True,
            "return_dict": True,
        }
        keep_all = len(wanted) == len(ids)
        if self._keeps_logits and not keep_all:
            if wanted[0] == len(ids) - len(wanted):
                inputs["logits_to_keep"] = len(wanted)
            elif not self._is_spread:
                inputs["logits_to_keep"] = torch.tensor(wanted, device=device)
        with (
            compat.attention_set_to(self._configs, interface.NAME),
            interface.ragged_forward(self.cache),
        ):
            logits = cast("torch.Tensor", self.model(**inputs).logits)[0]
        if not keep_all and "logits_to_keep" not in inputs:
            logits = logits[torch.tensor(wanted, device=logits.device)]
        return logits.float()

    def read_all_sparsely(self, reading: SparseReading) -> None:
        """Read every row's context by a policy, unless `read_sparsely` says otherwise."""
        reading.policy.require_fit(self.model)
        self.cache.reading = reading

    def read_sparsely(self, row_id: int, sparse: SparseRow | None) -> None:
        """Read one row's context by a policy from now on; None reads all of it."""
        if sparse is None:
            self.cache.sparse.pop(row_id, None)
        else:
            sparse.policy.require_fit(self.model)
            self.cache.sparse[row_id] = sparse

    def _note_signals(self, feed: Feed, logits: torch.Tensor) -> None:
        """Remember for the row's next step what its budget may follow."""
        sparse = self.cache.sparse.get(feed.row_id)
        if sparse is None:
            return
        sparse.entropies = []
        if sparse.policy.budget.needs_entropy:
            logs = torch.log_softmax(logits, dim=-1)
            sparse.entropies = (-(logs.exp() * logs).sum(dim=-1)).tolist()
        sparse.signals = StepSignals(
            sparse.entropies[-1] if sparse.entropies else None,
            token=feed.ids[-1],
            steps=sparse.signals.steps + (not feed.is_prompt),
        )

    def length(self, row_id: int) -> int:
        """Return the tokens the row has cached."""
        return self.cache.lengths.get(row_id, 0)

    def rollback(self, row_id: int, length: int) -> None:
        """Lower a row's length."""
        sparse = self.cache.sparse.get(row_id)
        removed = self.cache.lengths[row_id] - length
        if sparse is not None and removed > 0:
            # What comes next was foretold by the last token that stays.
            known = sparse.entropies = sparse.entropies[:-removed]
            sparse.signals = replace(
                sparse.signals, was_rejected=True, entropy=known[-1] if known else None
            )
        self.cache.rollback(row_id, length)

    def hold(self, row_id: int) -> None:
        """Do nothing: any rollback is possible at any time."""

    def free(self, row_id: int) -> None:
        """Release a row's slot."""
        self.cache.free(row_id)
        self._adopted.pop(row_id, None)

    def adopt(self, row_id: int, cache: Cache, ids: Sequence[int]) -> None:
        """Copy a batch-1 cache into a slot; it gets the row's new tokens back on export."""
        if not ids:
            return
        self.cache.open_row(row_id, len(ids))
        self._adopted[row_id] = len(ids)
        for layer_idx, layer in enumerate(cache.layers):
            self.cache.put(row_id, layer_idx, layer.keys, layer.values)

    def keys_values(self, row_id: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each layer's keys and values, (Hkv, length, D), of a row's first tokens; views."""
        slot = self.cache.slots[row_id]
        return [
            (layer.keys[slot, :, :length], layer.values[slot, :, :length])
            for layer in self.cache.layers
        ]

    def restore(self, row_id: int, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Give a new row each layer's keys and values of its first tokens, (Hkv, T, D)."""
        self.cache.open_row(row_id, layers[0][0].shape[1])
        for layer_idx, (keys, values) in enumerate(layers):
            self.cache.put(row_id, layer_idx, keys[None], values[None])

    def export(self, rows: Sequence[CachedRow], width: int, cache: Cache) -> Cache:
        """Write rows' tokens into a Transformers cache, as the Target protocol says."""
        first = self._adopted.get(rows[0].row_id, 0) if len(rows) == 1 else 0
        for layer_idx, layer in enumerate(self.cache.layers):
            num_heads = layer.keys.shape[1]
            keys = layer.keys.new_zeros(len(rows), num_heads, width, layer.keys.shape[3])
            values = layer.values.new_zeros(len(rows), num_heads, width, layer.values.shape[3])
            for i, row in enumerate(rows):
                slot, span = (
                    self.cache.slots[row.row_id],
                    slice(row.offset, row.offset + row.length),
                )
                keys[i, :, span] = layer.keys[slot, :, : row.length]
                values[i, :, span] = layer.values[slot, :, : row.length]
            if width > first:
                cache.update(keys[:, :, first:], values[:, :, first:], layer_idx)
        return cache


def read_prompt(target: FlatTarget, ids: Sequence[int]) -> None:
    """Append a prompt to row 0, some thousand tokens at a time; its logits are not wanted."""
    for begin in range(0, len(ids), PROMPT_TOKENS):
        target.forward([Feed(0, list(ids[begin : begin + PROMPT_TOKENS]), 1, is_prompt=True)])
