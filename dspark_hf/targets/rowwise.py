"""RowwiseTarget: each row owns an ordinary Transformers cache, for every architecture."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch

from dspark_hf import compat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

    from dspark_hf.attention.sparse import SparseReading, SparseRow
    from dspark_hf.targets.base import CachedRow, TakeFeatures, Taps
    from dspark_hf.values import Feed


@dataclass
class _RowCache:
    """A row's cache, the tokens it holds, and how to take the latest of them back.

    `pending` tokens are committed but not in the cache: they ride in the next forward. Only
    recurrent caches, which are restored from a snapshot, ever have some.
    """

    cache: Cache
    ids: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    snapshot: list[dict[str, Any]] | None = None
    snapshot_length: int = 0
    held: bool = False
    is_running: bool = False


class RowwiseTarget:
    """Runs rows one after another, each over its own cache.

    Rollback is a crop where every layer can be cut (sliding layers record what they would drop);
    otherwise recurrent and convolution states are copied before a forward of several tokens, put
    back after a rejection, and the kept tokens are fed again with the next ones.
    """

    path = "rowwise"

    def __init__(self, model: PreTrainedModel) -> None:
        """Prepare an empty target.

        Args:
            model: Any decoder with a Transformers cache.
        """
        self.model = model
        self._rows: dict[int, _RowCache] = {}
        self._listener: tuple[Taps, TakeFeatures] | None = None
        self._cache_key = compat.cache_key(model)
        self._takes_positions = compat.accepts(model, "position_ids")
        self._keeps_logits = compat.supports_logits_to_keep(model)

    def listen(self, taps: Taps, take: TakeFeatures) -> None:
        """Hand features to a drafter, as the Target protocol says."""
        self._listener = (taps, take)

    def read_all_sparsely(self, reading: SparseReading) -> None:
        """Refuse: a model's own attention reads everything."""
        raise NotImplementedError("the rowwise target runs a model's own attention, densely.")

    def read_sparsely(self, row_id: int, sparse: SparseRow | None) -> None:  # noqa: ARG002 - the protocol's
        """Refuse, as `read_all_sparsely` does, anything but dense reading."""
        if sparse is not None:
            raise NotImplementedError("the rowwise target runs a model's own attention, densely.")

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        """Append tokens to rows and return their logits, as the Target protocol says."""
        before = [(feed.row_id, self.length(feed.row_id)) for feed in feeds]
        try:
            return [self._forward_row(feed) for feed in feeds]
        except Exception:
            for row_id, length in before:
                self._take_back(row_id, length)
            raise

    def _forward_row(self, feed: Feed) -> torch.Tensor:
        row = self._rows.get(feed.row_id)
        if row is None:
            row = self._rows[feed.row_id] = _RowCache(self._start(compat.new_cache(self.model)))
        new = [*row.pending, *feed.ids]
        if not row.held:
            self._prepare_rollback(row, several=len(new) > 1)
        if self._listener is None:
            logits = self._run(row, new, feed.keep)
        else:
            taps, take = self._listener
            with taps.catching():
                logits = self._run(row, new, feed.keep)
                take(feed.row_id, len(row.ids), taps.features()[0])
        row.ids.extend(new)
        row.pending = []
        return logits

    def _prepare_rollback(self, row: _RowCache, *, several: bool) -> None:
        """Make the coming tokens removable; one token alone is never taken back by a round."""
        row.snapshot = None
        if _can_crop(row.cache):
            self._trim(row.cache)
        elif several:
            row.snapshot, row.snapshot_length = _snapshot(row.cache), len(row.ids)

    def _run(self, row: _RowCache, new: list[int], keep: int) -> torch.Tensor:
        device = compat.input_device(self.model)
        past, total = len(row.ids), len(row.ids) + len(new)
        extra: dict[str, Any] = {self._cache_key: row.cache, "use_cache": True}
        if self._takes_positions:
            extra["position_ids"] = torch.arange(past, total, device=device)[None]
        inputs = self.model.prepare_inputs_for_generation(
            torch.tensor([new], device=device),
            next_sequence_length=len(new),
            is_first_iteration=past == 0,
            **extra,
        )
        if self._keeps_logits:
            # Some models put a configured number here, one for every forward.
            inputs["logits_to_keep"] = keep
        row.is_running = True
        outputs = self.model(**inputs, return_dict=True)
        row.is_running = False
        row.cache = compat.cache_of(outputs) or row.cache
        return cast("torch.Tensor", outputs.logits)[0, -keep:].float()

    def length(self, row_id: int) -> int:
        """Return the tokens the row has, pending ones included."""
        row = self._rows.get(row_id)
        return 0 if row is None else len(row.ids) + len(row.pending)

    def rollback(self, row_id: int, length: int) -> None:
        """Drop tokens of the latest feed beyond `length`."""
        row = self._rows[row_id]
        row.held = False
        surplus = len(row.ids) + len(row.pending) - length
        if surplus <= 0:
            return
        if row.snapshot is None and _can_crop(row.cache):
            row.cache.crop(-surplus)
            del row.ids[length:]
            return
        if row.snapshot is None or length < row.snapshot_length:
            raise RuntimeError(
                f"rollback to {length} tokens must lie within the row's latest feed; the snapshot "
                f"holds {row.snapshot_length} of {len(row.ids)}."
            )
        _restore(row.cache, row.snapshot)
        row.pending = row.ids[row.snapshot_length : length]
        del row.ids[row.snapshot_length :]
        row.snapshot = None

    def hold(self, row_id: int) -> None:
        """Keep what is needed to come back here after several feeds."""
        row = self._rows[row_id]
        self._prepare_rollback(row, several=True)
        row.held = True

    def free(self, row_id: int) -> None:
        """Forget a row."""
        self._rows.pop(row_id, None)

    def adopt(self, row_id: int, cache: Cache, ids: Sequence[int]) -> None:
        """Use the caller's cache itself, so that it holds the new tokens when decoding ends."""
        self._rows[row_id] = _RowCache(self._start(cache), ids=list(ids))

    def export(
        self,
        rows: Sequence[CachedRow],
        width: int,  # noqa: ARG002 - the protocol's signature
        cache: Cache,  # noqa: ARG002 - the row adopted it, or owns a cache already
    ) -> Cache:
        """Return the row's own cache; several rows cannot share one in every architecture."""
        if len(rows) != 1:
            raise NotImplementedError(
                f"caches of {len(rows)} rows decoded one by one cannot be joined; decode one row, "
                "or read the sequences instead of the cache."
            )
        row = self._rows[rows[0].row_id]
        if row.is_running:
            self._undo_broken_forward(row)
        self.rollback(rows[0].row_id, rows[0].length)
        if row.pending:
            pending, row.pending = row.pending, []
            self._run(row, pending, 1)
            row.ids.extend(pending)
        self._finish(row.cache)
        return row.cache

    def _take_back(self, row_id: int, length: int) -> None:
        """Put a row back to where it was before a forward that failed; forget it if it cannot."""
        row = self._rows.get(row_id)
        if row is None:
            return
        is_changed = row.is_running or self.length(row_id) > length
        can_return = length > 0 and (row.snapshot is not None or _can_crop(row.cache))
        if is_changed and not can_return:
            self.free(row_id)
        elif is_changed:
            if row.is_running:
                self._undo_broken_forward(row)
            self.rollback(row_id, length)

    def _undo_broken_forward(self, row: _RowCache) -> None:
        """Take out what a forward that raised wrote to some of the layers."""
        row.is_running = False
        if row.snapshot is not None:
            _restore(row.cache, row.snapshot)
            row.snapshot = None
        elif _can_crop(row.cache):
            for layer in row.cache.layers:
                surplus = layer.get_seq_length() - len(row.ids)
                if surplus > 0:
                    layer.crop(-surplus)

    def _start(self, cache: Cache) -> Cache:
        if _can_crop(cache):
            cache.activate_past_recording()
        return cache

    def _trim(self, cache: Cache) -> None:
        """Let sliding layers forget what the coming forward cannot need."""
        for layer in cache.layers:
            is_sliding = hasattr(layer, "record_past") and compat.is_attention_layer(layer)
            if is_sliding and layer.is_initialized:
                layer.crop(0)

    def _finish(self, cache: Cache) -> None:
        self._trim(cache)
        for layer in cache.layers:
            if compat.is_attention_layer(layer) and hasattr(layer, "record_past"):
                layer.record_past = False


def _can_crop(cache: Cache) -> bool:
    return all(compat.is_attention_layer(layer) for layer in cache.layers)


def _snapshot(cache: Cache) -> list[dict[str, Any]]:
    """Copy what a forward changes in place; attention states are replaced, so a reference does."""
    saved = []
    for layer in cache.layers:
        state = dict(vars(layer))
        if compat.recurrent_part(layer):
            for name, value in state.items():
                if isinstance(value, dict):
                    state[name] = {
                        key: item.clone() if isinstance(item, torch.Tensor) else copy.copy(item)
                        for key, item in value.items()
                    }
        saved.append(state)
    return saved


def _restore(cache: Cache, saved: list[dict[str, Any]]) -> None:
    for layer, state in zip(cache.layers, saved, strict=True):
        vars(layer).clear()
        vars(layer).update(state)
