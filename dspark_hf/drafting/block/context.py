"""DraftContext: each row's committed context as the drafter's keys and values.

Features arrive from the target's forwards with whatever was verified; only committed ones count.
They wait as they came and are projected before the next draft, all rows in one pass; long prompts
are projected at once, chunk by chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch

from dspark_hf.targets.cache import DSparkCache, DSparkLayer
from dspark_kernels.ragged_attention.op import pack_mask, packed_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dspark_hf.drafting.block.model import BlockModel
    from dspark_hf.targets.step import Group

PROJECT_AT = 256
"""Features that wait per row before they are projected without being asked for."""


@dataclass
class _Waiting:
    """A row's features not yet projected, and where its context begins."""

    first: int = 0
    parts: list[torch.Tensor] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(len(part) for part in self.parts)


class DraftContext:
    """Rows' projected context, with room behind it for a block that is never kept."""

    def __init__(self, model: BlockModel) -> None:
        """Create without rows.

        Args:
            model: Projects features; its spec gives the masks.
        """
        self.model, self.spec = model, model.spec
        self.windows = [
            self.spec.sliding_window + 1 if self.spec.sliding_window and is_sliding else None
            for is_sliding in map(self.spec.is_sliding, range(self.spec.num_layers))
        ]
        self.cache = DSparkCache(self.windows, 256)
        self._rows: dict[int, _Waiting] = {}
        self._masks: dict[tuple[int, str], torch.Tensor | None] = {}

    def take(self, row_id: int, start: int, features: torch.Tensor) -> None:
        """Add a row's features.

        Args:
            row_id: The row.
            start: Position of the first; what the row held from there on is dropped.
            features: Of shape (T, m * d).
        """
        row = self._rows.get(row_id)
        end = None if row is None else row.first + self._projected(row_id) + row.count
        if row is None or end is None or start > end or start < row.first:
            # A row that joins with a cache: features of what it holds were never seen.
            self._drop(row_id)
            row = self._rows[row_id] = _Waiting(first=start)
        else:
            self.truncate(row_id, start)
        row.parts.append(features.to(self.model.device, self.model.dtype))
        if row.count > PROJECT_AT:
            self.project([row_id])

    def truncate(self, row_id: int, length: int) -> None:
        """Drop a row's context from position `length` on."""
        row = self._rows[row_id]
        projected = self._projected(row_id)
        surplus = row.first + projected + row.count - length
        while surplus > 0 and row.parts:
            last = row.parts[-1]
            if len(last) > surplus:
                row.parts[-1] = last[:-surplus]
                return
            row.parts.pop()
            surplus -= len(last)
        if surplus > 0:
            self.cache.rollback(row_id, projected - surplus)

    def length(self, row_id: int) -> int:
        """Return the position behind the row's last feature; 0 for an unknown row."""
        row = self._rows.get(row_id)
        return 0 if row is None else row.first + self._projected(row_id) + row.count

    def project(self, row_ids: Sequence[int]) -> None:
        """Turn the rows' waiting features into keys and values."""
        counts = [(i, self._rows[i].count) for i in row_ids if self._rows[i].count]
        if not counts:
            return
        order = self.cache.open_step(counts)
        parts: list[torch.Tensor] = []
        positions: list[int] = []
        for place in order:
            row_id, count = counts[place]
            row = self._rows[row_id]
            begin = row.first + self._projected(row_id)
            parts.extend(row.parts)
            positions.extend(range(begin, begin + count))
            row.parts = []
        states = self.model.project(torch.cat(parts)[None])
        rotary = self.model.rotary(torch.tensor([positions], device=states.device))
        for layer, (keys, values) in enumerate(self.model.context(states, rotary)):
            self.cache.update(keys, values, layer)
        self.cache.close_step(counts)

    def open_blocks(self, row_ids: Sequence[int]) -> tuple[list[int], torch.Tensor]:
        """Make room for one block per row behind its context.

        Returns:
            tuple: Places in `row_ids` in the order the blocks must be fed, and the positions of
            their tokens, int64 of shape (1, R * block_size).
        """
        size = self.spec.block_size
        order = self.cache.open_step([(row_id, size) for row_id in row_ids])
        self._masks.clear()
        positions: list[int] = []
        for place in order:
            begin = self.length(row_ids[place])
            positions.extend(range(begin, begin + size))
        return order, torch.tensor([positions], device=self.model.device)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [1, Hq, Q, D]
        key: torch.Tensor,  # [1, Hkv, N, D]
        value: torch.Tensor,  # [1, Hkv, N, D]
        scale: float,
    ) -> torch.Tensor:  # [1, Q, Hq, D]
        """Attend as the Memory protocol says; the block is written behind the context."""
        self.cache.update(key, value, layer)
        held = cast("DSparkLayer", self.cache.layers[layer])
        size = self.spec.block_size
        count = query.shape[2] * size // key.shape[2]  # of each block's positions
        blocks = query[0].unflatten(1, (-1, count))
        outs = []
        for place, group in enumerate(self.cache.step.groups):
            first = group.segments[0].start // size
            part = blocks[:, first : first + len(group.segments)]
            keys, values = held.view(group)
            heads = query.shape[1] // key.shape[1]
            mask = self._mask(place, layer, group, heads)
            if mask is not None and count < size:
                mask = mask.unflatten(2, (heads, size))[:, :, :, :count].flatten(2, 3)
            out = packed_attention(part.transpose(0, 1), keys, values, mask, scale=scale)
            outs.append(out.flatten(0, 1))
        return torch.cat(outs)[None]

    def free(self, row_id: int) -> None:
        """Forget a row."""
        self._drop(row_id)

    @property
    def is_empty(self) -> bool:
        """Whether no row is held."""
        return not self._rows

    def _drop(self, row_id: int) -> None:
        if self._rows.pop(row_id, None) is not None and row_id in self.cache.slots:
            self.cache.free(row_id)

    def _projected(self, row_id: int) -> int:
        return self.cache.lengths.get(row_id, 0)

    def _mask(self, place: int, layer: int, group: Group, heads: int) -> torch.Tensor | None:
        """Return what a group's blocks see, built once per draft and kind of layer."""
        spec = self.spec
        key = (place, spec.layer_types[layer])
        if key not in self._masks:
            is_even = len({segment.past for segment in group.segments}) == 1
            if is_even and not (spec.is_sliding(layer) and spec.sliding_is_causal):
                # The keys in view are exactly the window and the block.
                self._masks[key] = None
            else:
                self._masks[key] = pack_mask(self._visible(layer, group), heads, self.model.dtype)
        return self._masks[key]

    def _visible(self, layer: int, group: Group) -> torch.Tensor:
        """Return visibility (B, T, S): the context within the window, and the block."""
        spec, device = self.spec, self.model.device
        window = self.windows[layer]
        first, end = group.key_range(window)
        past = torch.tensor([segment.past for segment in group.segments], device=device)
        key = torch.arange(first, end, device=device)
        block = torch.arange(spec.block_size, device=device)
        context = (key < past[:, None])[:, None].expand(-1, spec.block_size, -1)
        place = key[None, None] - past[:, None, None]  # of a block key within its block
        inside = (place >= 0) & (place < spec.block_size)
        inside = inside.expand(-1, spec.block_size, -1)
        if window is not None:
            context = context & (place > -window)
            if spec.sliding_is_causal:
                inside = inside & (place <= block[None, :, None])
        return context | inside
