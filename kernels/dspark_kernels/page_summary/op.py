"""Public ops: summarise the pages that new tokens touch, and the tail page after a rollback."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dspark_kernels.checks import (
    FLOATS,
    INTEGERS,
    require_contiguous,
    require_dtype,
    require_last_axis_contiguous,
    require_range,
    require_same_device,
    require_shape,
    runs_triton,
)
from dspark_kernels.page_summary.reference import update_page_summaries_reference
from dspark_kernels.tiles import PAGE_SIZE, power_of_two

if TYPE_CHECKING:
    import torch


def update_page_summaries(
    key: torch.Tensor,  # [slots, Hkv, S, D]
    centre: torch.Tensor,  # [slots, Hkv, P, D]
    half: torch.Tensor,  # [slots, Hkv, P, D]
    slots: torch.Tensor,  # [R]
    past: torch.Tensor,  # [R]
    lengths: torch.Tensor,  # [R]
    *,
    max_new_tokens: int,
    page_size: int = PAGE_SIZE,
) -> None:
    """Bring the summaries of the pages that hold tokens past..length of each row up to date.

    A page's summary is, per channel, the middle c = (max + min) / 2 and half the spread
    h = (max - min) / 2 of its keys. Touched pages are summarised anew from the cached keys, at most
    `page_size` of them, rather than updated: nothing accumulates, and the same call repairs a page
    after a rollback, which a running maximum cannot.

    Args:
        key: Cached keys, the new ones already written, of shape (slots, Hkv, S, D).
        centre: Middles, of shape (slots, Hkv, P, D); changed in place.
        half: Half spreads, of the same shape; changed in place.
        slots: Cache slot of each row, of shape (R,), each at most once.
        past: First position whose key is new, of shape (R,).
        lengths: Cached tokens with the new ones, of shape (R,); positions from there on are not
            read. Rows with `lengths` at most `past` may have their tail page repaired, no more.
        max_new_tokens: At least the largest `lengths - past`, known to the host.
        page_size: Tokens per page, a power of two.

    Raises:
        ValueError: If shapes, types or devices do not fit.

    Limits: D at most 512 (one page is held in registers).
    Numerics: maximum and minimum exact, c and h rounded to the type of the summaries once; so
    alpha = 1 bounds scores up to that rounding.
    Layout: `key` with a contiguous last axis; `centre` and `half` contiguous.
    Batch: a row's result does not depend on other rows.
    Cost: reads the touched pages of the keys once and writes 2 * D elements a page and key head.
    Source: Tang et al., Quest, arXiv:2406.10774, section 3.2; middle and spread instead of maximum
    and minimum make the softened bound two plain products.
    """
    require_shape("key", key, ("slots", "Hkv", "S", "D"))
    num_slots, num_kv, _, dim = key.shape
    require_shape("centre", centre, (num_slots, num_kv, "P", dim))
    require_shape("half", half, centre.shape)
    for name, tensor in (("key", key), ("centre", centre), ("half", half)):
        require_dtype(name, tensor, FLOATS)
    require_last_axis_contiguous("key", key)
    require_contiguous("centre", centre)
    require_contiguous("half", half)
    require_shape("slots", slots, ("R",))
    for name, tensor in (("slots", slots), ("past", past), ("lengths", lengths)):
        require_shape(name, tensor, slots.shape)
        require_dtype(name, tensor, INTEGERS)
        require_contiguous(name, tensor)
    require_range("max_new_tokens", max_new_tokens, 0)
    require_range("D", dim, 1, 512)
    if page_size != power_of_two(page_size):
        raise ValueError(f"page_size must be a power of two; got {page_size}. Use {PAGE_SIZE}.")
    device = require_same_device(
        key=key, centre=centre, half=half, slots=slots, past=past, lengths=lengths
    )
    if not runs_triton(device):
        update_page_summaries_reference(
            key, centre, half, slots, past, lengths, page_size=page_size
        )
        return
    from dspark_kernels.page_summary.kernel import update_page_summaries_fwd

    update_page_summaries_fwd(
        key, centre, half, slots, past, lengths,
        max_new_tokens=max_new_tokens, page_size=page_size,
    )  # fmt: skip


def rebuild_tail_pages(
    key: torch.Tensor,  # [slots, Hkv, S, D]
    centre: torch.Tensor,  # [slots, Hkv, P, D]
    half: torch.Tensor,  # [slots, Hkv, P, D]
    slots: torch.Tensor,  # [R]
    lengths: torch.Tensor,  # [R]
    *,
    page_size: int = PAGE_SIZE,
) -> None:
    """Summarise the last page of each row anew after a rollback to `lengths`.

    Pages before it hold committed tokens only and are right as they are; pages behind it are not
    in use. A row of length 0 has no page. Arguments, limits and errors as in
    `update_page_summaries`.
    """
    last = (lengths - 1).clamp(min=0)
    update_page_summaries(
        key, centre, half, slots, last, lengths, max_new_tokens=1, page_size=page_size
    )
