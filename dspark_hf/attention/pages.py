"""PageSummaries: what the keys of each page of 16 tokens look like, kept up to date lazily.

A page's summary is the middle and half the spread of its keys, channel by channel. Bringing one up
to date means computing it from the keys themselves, so that rollback, which max and min cannot
undo, needs no bookkeeping but a length: the page that a rollback cuts is computed again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PAGE = 16
"""Tokens per page: larger ones select worse at equal budget, smaller ones cost more to score."""


class PageSummaries:
    """Summaries of one layer's cached keys, of shape (slots, Hkv, pages, 2 D): [middle ; half]."""

    def __init__(self) -> None:
        """Start with nothing summarised."""
        self.values: torch.Tensor | None = None
        self._tokens: dict[int, int] = {}

    def refresh(self, keys: torch.Tensor, slot: int, length: int) -> torch.Tensor:
        """Bring a slot up to date.

        Args:
            keys: The layer's cached keys, of shape (slots, Hkv, positions, D).
            slot: The row's slot.
            length: Cached tokens of the row, at least 1.

        Returns:
            torch.Tensor: The slot's summaries of all pages, the last one maybe partial, of shape
            (Hkv, ceil(length / 16), 2 D); a view.
        """
        values = self._fitting(keys)
        num_pages = -(-length // PAGE)
        first = min(self._tokens.get(slot, 0), length) // PAGE
        full = length // PAGE
        dim = keys.shape[3]
        if full > first:
            pages = keys[slot, :, first * PAGE : full * PAGE].unflatten(1, (-1, PAGE))
            _write(values[slot, :, first:full], pages.amax(dim=2), pages.amin(dim=2), dim)
        if num_pages > full:
            tail = keys[slot, :, full * PAGE : length]
            _write(values[slot, :, full], tail.amax(dim=1), tail.amin(dim=1), dim)
        self._tokens[slot] = length
        return values[slot, :, :num_pages]

    def rollback(self, slot: int, length: int) -> None:
        """Note that a slot's tokens from `length` on are void."""
        if slot in self._tokens:
            self._tokens[slot] = min(self._tokens[slot], length)

    def move(self, source: int, target: int) -> None:
        """Copy a slot's summaries to another one."""
        tokens = self._tokens.pop(source, 0)
        self.forget(target)
        # A row never read by pages has none, and its slot may be newer than the storage.
        if tokens and self.values is not None:
            self._tokens[target] = tokens
            self.values[target] = self.values[source]

    def forget(self, slot: int) -> None:
        """Note that a slot was given to another row."""
        self._tokens.pop(slot, None)

    def _fitting(self, keys: torch.Tensor) -> torch.Tensor:
        """Return storage for the keys' slots and positions, keeping what is held."""
        slots, heads, positions, dim = keys.shape
        old = self.values
        if old is not None and old.shape[0] >= slots and old.shape[2] * PAGE >= positions:
            return old
        pages = positions // PAGE
        if old is not None:
            # Keys may have got fewer slots or positions, but not what is held here.
            slots, pages = max(slots, old.shape[0]), max(pages, old.shape[2])
        self.values = keys.new_zeros(slots, heads, pages, 2 * dim)
        if old is not None:
            self.values[: old.shape[0], :, : old.shape[2]] = old
        return self.values


def _write(out: torch.Tensor, top: torch.Tensor, bottom: torch.Tensor, dim: int) -> None:
    # In float32: the half width of 16-bit keys must not round to less than it is by much.
    high, low = top.float(), bottom.float()
    out[..., :dim] = ((high + low) / 2).to(out.dtype)
    out[..., dim:] = ((high - low) / 2).to(out.dtype)
