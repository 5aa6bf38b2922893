"""Which tiles of rows a ragged step is made of, from the runs alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from dspark_kernels.tiles import MAX_TILE, MIN_DOT, ceil_div, power_of_two

if TYPE_CHECKING:
    from collections.abc import Sequence

SPLIT_TOKENS = 512
"""Keys per program of a short run; fixed, so that a row's sums do not depend on other rows."""
MAX_ROWS = 64
"""Query rows (tokens times heads of a group) of a tile, unless one token alone has more."""
NO_SPLIT = 1 << 30
"""Keys per program of a long run: all of them."""

Tile = tuple[int, int, int, int, int]
"""Slot, position of the first token, its place in the step, tokens, place in the tile's output."""


@dataclass
class Plan:
    """The tiles of a step; layers share it, so that its tables reach the device once.

    Attributes:
        short: By tile height, the runs that fit one tile; they are split along the keys.
        long: The tiles of longer runs, `long_rows` high.
        long_rows: Height of those.
        num_splits: Splits the longest short run needs.
        short_places: Place in the step of every short run's token, in order: the short runs' output
            is a buffer of its own, so that splits cost no memory for a prompt beside them.
    """

    short: dict[int, list[Tile]]
    long: list[Tile]
    long_rows: int
    num_splits: int
    short_places: list[int]
    _on_device: dict[tuple[str, int, torch.device], torch.Tensor] = field(default_factory=dict)

    def table(self, rows: int, device: torch.device) -> torch.Tensor:
        """Return the tiles of a height, int32 (tiles, 5); the long ones for `rows` 0."""
        tiles = self.long if rows == 0 else self.short[rows]
        return self._upload("tiles", rows, tiles, torch.int32, device)

    def places(self, device: torch.device) -> torch.Tensor:
        """Return `short_places`, int64."""
        return self._upload("places", 0, self.short_places, torch.int64, device)

    def _upload(
        self, name: str, rows: int, values: object, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        key = (name, rows, device)
        if key not in self._on_device:
            self._on_device[key] = torch.tensor(values, dtype=dtype, device=device)
        return self._on_device[key]


def rows_per_tile(dim_v: int, element_bytes: int) -> int:
    """Return how many query rows a tile of the GPU kernel has, for a value width and type."""
    return min(MAX_ROWS, MAX_TILE[element_bytes] // power_of_two(dim_v, MIN_DOT))


def plan_tiles(
    segments: Sequence[tuple[int, int, int]],
    group: int,
    window: int | None,
    max_rows: int = MAX_ROWS,
) -> Plan:
    """Cut runs into tiles.

    Args:
        segments: Slot, cached tokens before the run and its tokens, in the order of the step.
        group: Query heads per key head.
        window: Sliding window in tokens, or None.
        max_rows: Query rows of a tile, a power of two.

    Returns:
        Plan: A run's tiles depend on the run alone.
    """
    long_rows = max(max_rows, power_of_two(group))
    short: dict[int, list[Tile]] = {}
    long: list[Tile] = []
    places: list[int] = []
    start, most = 0, 0
    for slot, past, count in segments:
        if 0 < count * group <= long_rows:
            rows = power_of_two(count * group, MIN_DOT)
            short.setdefault(rows, []).append((slot, past, start, count, len(places)))
            places += range(start, start + count)
            seen = past + count if window is None else min(past + count, window + count)
            most = max(most, seen)
        else:
            step = long_rows // group
            long += [
                (slot, past + first, start + first, min(step, count - first), start + first)
                for first in range(0, count, step)
            ]
        start += count
    # A window starts anywhere in a step of keys; one more split covers the part before it.
    splits = ceil_div(most, SPLIT_TOKENS) + (window is not None and most > SPLIT_TOKENS // 2)
    return Plan(dict(sorted(short.items())), long, long_rows, max(1, splits), places)
