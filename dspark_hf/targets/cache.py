"""DSparkCache: preallocated keys and values, one slot per row, a length per row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from dspark_hf.attention.leaders import LeaderQueries
from dspark_hf.attention.pages import PAGE, PageSummaries
from dspark_hf.targets.step import Group, Segment, Step, plan_step

if TYPE_CHECKING:
    from dspark_hf.attention.sparse import SparseReading, SparseRow

GROWTH = 1.5
"""Factor by which positions grow when a row outgrows them; copies stay linear in the length."""
POSITION_MULTIPLE = 64
"""Positions are allocated in multiples of this."""
FEW_SEGMENTS = 4
"""Up to this many rows, one slice copy per row is quicker than an indexed write."""


class DSparkLayer(CacheLayerMixin):
    """Keys and values of one layer, of shape (slots, Hkv, positions, D)."""

    is_compileable = False
    is_sliding = False

    def __init__(self, cache: DSparkCache, window: int | None) -> None:
        """Create an empty layer.

        Args:
            cache: The cache it belongs to, which knows the current step.
            window: Sliding window in tokens, or None for full attention. All positions are kept
                either way, so that rollback is a length; the window is applied when attending.
        """
        super().__init__()
        self.cache = cache
        self.window = window
        self.summaries = PageSummaries()
        self.leaders = LeaderQueries()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for the cache's slots and positions, like the first tokens' shapes."""
        slots, positions = self.cache.num_slots, self.cache.num_positions
        # Zeros, not whatever memory holds: a masked NaN is still a NaN, and rows attended together
        # read one another's unused positions under the mask.
        self.keys, self.values = (
            states.new_zeros(slots, states.shape[1], positions, states.shape[-1])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def resize(self, slots: int, positions: int) -> None:
        """Reallocate, keeping what is held; nothing has changed if there is no memory for it."""
        if not self.is_initialized or self.keys.shape[0::2] == (slots, positions):
            return
        resized = []
        for old in (self.keys, self.values):
            new = old.new_zeros(slots, old.shape[1], positions, old.shape[3])
            held = old[:slots, :, :positions]
            new[: held.shape[0], :, : held.shape[2]] = held
            resized.append(new)
        self.keys, self.values = resized

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the step's keys and values, of shape (1, Hkv, N, D), to their slots."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        step = self.cache.step
        if len(step.segments) <= FEW_SEGMENTS:
            for seg in step.segments:
                span = slice(seg.start, seg.start + seg.count)
                self.keys[seg.slot, :, seg.past : seg.end] = key_states[0, :, span]
                self.values[seg.slot, :, seg.past : seg.end] = value_states[0, :, span]
        else:
            slots, positions = step.scatter_indices(key_states.device)
            self.keys[slots, :, positions] = key_states[0].transpose(0, 1)
            self.values[slots, :, positions] = value_states[0].transpose(0, 1)
        if not self.cache.gathers:
            return key_states, value_states
        keys = torch.cat([self.keys[seg.slot, :, : seg.end] for seg in step.segments], dim=1)
        values = torch.cat([self.values[seg.slot, :, : seg.end] for seg in step.segments], dim=1)
        return keys[None], values[None]

    def holds(self, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Tell whether states of these shapes are what the layer stores."""
        same_heads = key.shape[1] == self.keys.shape[1]
        same_dims = key.shape[3] == self.keys.shape[3] and value.shape[3] == self.values.shape[3]
        return same_heads and same_dims

    def view(self, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values a group of rows attends to, without copying."""
        first_slot, last_slot = group.segments[0].slot, group.segments[-1].slot
        first, end = group.key_range(self.window)
        keys = self.keys[first_slot : last_slot + 1, :, first:end]
        return keys, self.values[first_slot : last_slot + 1, :, first:end]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row's tokens to another slot."""
        # A row that was never fed may have a slot for which there was no memory.
        if self.is_initialized and length:
            self.keys[target, :, :length] = self.keys[source, :, :length]
            self.values[target, :, :length] = self.values[source, :, :length]
        self.summaries.move(source, target)
        self.leaders.move(source, target)

    def get_seq_length(self) -> int:
        """Return the longest row's cached tokens."""
        return self.cache.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return sizes for a mask nobody builds: the step decides what is seen."""
        return query_length, 0

    def get_max_length(self) -> int:
        """Return -1: the layer grows."""
        return -1


class DSparkCache(Cache):
    """Rows' keys and values in slots 0..rows-1.

    A row is a slot and a length. Writing appends at the length; rolling back lowers it and moves
    nothing; a leaving row's slot is refilled from the last one, so that slots stay neighbours and
    rows can be attended together as a view.
    """

    def __init__(
        self, windows: list[int | None], num_positions: int, *, gathers: bool = False
    ) -> None:
        """Create an empty cache.

        Args:
            windows: Each layer's sliding window in tokens, or None.
            num_positions: Tokens expected per row; more is allocated when needed.
            gathers: Whether `update` returns all cached tokens of the step's rows, one row behind
                the other, for models that expand what they cache (latent attention).
        """
        self.gathers = gathers
        self.like_plain = False
        self.num_slots = 0
        self.num_positions = _round_up(num_positions)
        self.lengths: dict[int, int] = {}
        self.slots: dict[int, int] = {}
        self.reading: SparseReading | None = None
        self.sparse: dict[int, SparseRow] = {}
        self.step: Step = plan_step([])
        self.current_layer = 0
        super().__init__(layers=[DSparkLayer(self, window) for window in windows])

    def open_step(
        self, counts: list[tuple[int, int]], prompts: frozenset[int] = frozenset()
    ) -> list[int]:
        """Plan a forward that appends tokens to rows, making room for them.

        Args:
            counts: Row id and number of new tokens, one entry per row.
            prompts: Rows whose tokens are part of a prompt, which is read densely or in blocks.

        Returns:
            list[int]: Positions in `counts` in the order the tokens must be fed.
        """
        for row_id, _ in counts:
            if row_id not in self.slots:
                self.slots[row_id] = len(self.slots)
                self.lengths[row_id] = 0
            if self.reading is not None and row_id not in self.sparse:
                self.sparse[row_id] = self.reading.row()
        self._reserve(max(self.lengths[row_id] + count for row_id, count in counts))
        order = sorted(range(len(counts)), key=lambda i: self.slots[counts[i][0]])
        segments, start = [], 0
        for i in order:
            row_id, count = counts[i]
            slot, past = self.slots[row_id], self.lengths[row_id]
            is_prompt = row_id in prompts
            sparse = self._prompt_row(row_id) if is_prompt else self._sparse_row(row_id, count)
            segments.append(Segment(slot, past, start, count, sparse, in_blocks=is_prompt))
            start += count
        self.step = plan_step(segments, together=not self.gathers)
        return order

    def close_step(self, counts: list[tuple[int, int]]) -> None:
        """Count the appended tokens as cached, once the forward has succeeded."""
        for row_id, count in counts:
            self.lengths[row_id] += count

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one layer's new keys and values and remember which layer it was."""
        self.current_layer = layer_idx
        layer = cast("DSparkLayer", self.layers[layer_idx])
        return layer.update(key_states, value_states, *args, **kwargs)

    def rollback(self, row_id: int, length: int) -> None:
        """Set a row's length; what lies beyond is overwritten by the next tokens."""
        self.lengths[row_id] = min(self.lengths[row_id], length)
        for layer in self._own_layers():
            layer.summaries.rollback(self.slots[row_id], self.lengths[row_id])
            layer.leaders.rollback(self.slots[row_id], self.lengths[row_id])

    def free(self, row_id: int) -> None:
        """Release a row's slot, moving the last slot's row into it."""
        slot = self.slots.pop(row_id, None)
        if slot is None:
            return
        del self.lengths[row_id]
        self.sparse.pop(row_id, None)
        for layer in self._own_layers():
            layer.summaries.forget(slot)
            layer.leaders.forget(slot)
        last = len(self.slots)
        if slot != last:
            moved = next(row for row, place in self.slots.items() if place == last)
            for layer in self.layers:
                layer.move(last, slot, self.lengths[moved])
            self.slots[moved] = slot

    def put(self, row_id: int, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write a row's oldest tokens of one layer, of shape (1, Hkv, length, D)."""
        layer = self.layers[layer_idx]
        if not layer.is_initialized:
            layer.lazy_initialization(keys, values)
        slot, length = self.slots[row_id], self.lengths[row_id]
        first = length - keys.shape[2]
        layer.keys[slot, :, :first] = 0
        layer.values[slot, :, :first] = 0
        layer.keys[slot, :, first:length] = keys[0]
        layer.values[slot, :, first:length] = values[0]

    def open_row(self, row_id: int, length: int) -> None:
        """Make room for a row whose tokens will be written by `put`."""
        self.slots[row_id] = len(self.slots)
        self.lengths[row_id] = length
        self._reserve(length)

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - Transformers' signature
        """Return the longest row's cached tokens."""
        return max(self.lengths.values(), default=0)

    def get_query_offset(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - as above
        """Return 0: positions come from position_ids."""
        return 0

    def _sparse_row(self, row_id: int, count: int) -> SparseRow | None:
        """Return how a row's next tokens read its context; None for densely."""
        row = self.sparse.get(row_id)
        if row is None or self.lengths[row_id] + count < row.min_context:
            return None
        # The newest tokens must lie in pages that are always read.
        return row if count <= (row.policy.recent_pages - 1) * PAGE else None

    def _prompt_row(self, row_id: int) -> SparseRow | None:
        """Return how a row's prompt is read, be it too short as yet; None for densely."""
        row = self.sparse.get(row_id)
        return None if row is None or row.policy.prefill is None else row

    def _own_layers(self) -> list[DSparkLayer]:
        return cast("list[DSparkLayer]", self.layers)

    def _reserve(self, positions: int) -> None:
        slots, room = len(self.slots), self.num_positions
        if positions <= room and slots <= self.num_slots:
            return
        if positions > room:
            room = _round_up(max(positions, int(room * GROWTH)))
        try:
            self._resize(max(slots, self.num_slots), room)
        except RuntimeError:
            # There may be memory for what is needed now, without slots that nobody uses.
            longest = max(positions, *self.lengths.values())
            self._resize(slots, _round_up(longest))

    def _resize(self, slots: int, positions: int) -> None:
        for layer in self._own_layers():
            layer.resize(slots, positions)
        self.num_slots, self.num_positions = slots, positions


def _round_up(positions: int) -> int:
    return -(-max(positions, 1) // POSITION_MULTIPLE) * POSITION_MULTIPLE
