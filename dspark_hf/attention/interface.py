"""The "dspark" attention and mask functions, registered with Transformers.

While a ragged forward runs, its configuration says "dspark" to every thread. Outside of it both
functions do what the configuration said before, so that a plain forward elsewhere computes what it
always did. Registering the attention without the mask would make
Transformers pass no mask at all, and the model would see the future.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's own abbreviation
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from dspark_hf import compat
from dspark_hf.attention.prefill import attend_blocks, first_in_blocks
from dspark_hf.attention.sparse import attend_pages
from dspark_hf.errors import ExpandsCacheError, UnsupportedByFlatError
from dspark_hf.targets.step import MAX_PACKED_QUERIES, Group
from dspark_kernels.ragged_attention.op import packed_attention

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dspark_hf.attention.policy import SparsePrefill
    from dspark_hf.attention.sparse import SparseRow
    from dspark_hf.targets.cache import DSparkCache, DSparkLayer
    from dspark_hf.targets.step import Segment

NAME = "dspark"
MAX_CHUNK = 1024
"""Most queries of a row attended at once where a mask is needed."""
_HARMLESS = frozenset(
    {
        "position_ids", "position_embeddings", "use_cache", "return_dict", "logits_to_keep",
        "output_attentions", "output_hidden_states", "output_router_logits", "is_causal",
        "sliding_window", "softcap", "s_aux",
    }
)  # fmt: skip
_cache: ContextVar[DSparkCache | None] = ContextVar("dspark_cache", default=None)


@contextmanager
def ragged_forward(cache: DSparkCache) -> Iterator[None]:
    """Make attention calls in this context read and mask by the cache's current step."""
    token = _cache.set(cache)
    try:
        yield
    finally:
        _cache.reset(token)


def register() -> None:
    """Register both functions with Transformers; repeating it changes nothing."""
    AttentionInterface.register(NAME, dspark_attention)
    AttentionMaskInterface.register(NAME, dspark_mask)


def dspark_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Return no mask inside a ragged forward, the model's own kind of mask anywhere else."""
    if _cache.get() is not None:
        return None
    build = compat.mask_function(_outside(kwargs.get("config")))
    return cast("torch.Tensor | None", build(*args, **kwargs))


def _outside(config: Any) -> str:
    """Return the attention a configuration means outside ragged forwards."""
    name = NAME if config is None else compat.original_attention(config)
    return "sdpa" if name == NAME else name


def dspark_attention(
    module: nn.Module,
    query: torch.Tensor,  # [1, Hq, N, D]
    key: torch.Tensor,  # [1, Hkv, N, D]
    value: torch.Tensor,  # [1, Hkv, N, Dv]
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend each row of the step to its own slot of the cache.

    Args:
        module: The model's attention module.
        query: Queries of all rows' new tokens, of shape (1, Hq, N, D).
        key: Their keys, already written to the cache.
        value: Their values.
        attention_mask: Must be None: the step decides what is seen.
        dropout: Must be 0.
        scaling: Factor on the dot products; None means D ** -0.5.
        **kwargs: What the model passes on; anything with an unknown meaning is refused.

    Returns:
        tuple[torch.Tensor, torch.Tensor | None]: Output of shape (1, N, Hq, Dv), contiguous, and
        no attention weights.

    Raises:
        UnsupportedByFlatError: If the model asks for something this function does not do.
        ExpandsCacheError: If the cache must hand all cached tokens to the model (`gathers`).
    """
    cache = _cache.get()
    if cache is None:
        attend = compat.attention_function(_outside(module.config), module)
        return cast(
            "tuple[torch.Tensor, torch.Tensor | None]",
            attend(
                module, query, key, value, attention_mask,
                dropout=dropout, scaling=scaling, **kwargs,
            ),
        )  # fmt: skip
    layer = cast("DSparkLayer", cache.layers[cache.current_layer])
    _refuse_unknown(module, attention_mask, dropout, layer, kwargs)
    if not cache.gathers and not layer.holds(key, value):
        raise ExpandsCacheError(
            f"{type(module).__name__} caches a compressed form of what it attends to."
        )
    form = _Form(
        layer.window,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        kwargs.get("softcap"),
        kwargs.get("s_aux"),
        cache.like_plain,
    )
    outs, first_key = [], 0
    for group in cache.step.groups:
        start, last = group.segments[0].start, group.segments[-1]
        part = query[:, :, start : last.start + last.count]
        if cache.gathers:
            first, end = group.key_range(form.window)
            span = slice(first_key + first, first_key + end)
            first_key += last.end
            outs.append(_attend_rows(part, key[:, :, span], value[:, :, span], group, form))
        elif form.can_skip_pages and _is_sparse(group.segments[0], cache.current_layer):
            attend = _attend_in_blocks if group.segments[0].in_blocks else _attend_selected
            outs.append(attend(part, layer, group, cache, form))
        elif group.is_prompt:
            span = slice(start, start + last.count)
            outs.append(_attend_prompt(part, key[:, :, span], value[:, :, span], group, form))
        else:
            outs.append(_attend_rows(part, *layer.view(group), group, form))
    # Models may view the result, as that of Transformers' own functions.
    return outs[0].contiguous() if len(outs) == 1 else torch.cat(outs, dim=1), None


@dataclass(frozen=True)
class _Form:
    """What distinguishes one model's attention from another's."""

    window: int | None
    scale: float
    softcap: float | None
    sinks: torch.Tensor | None
    like_plain: bool

    @property
    def can_skip_pages(self) -> bool:
        """Whether pages may be left unread: only where attention reaches everything as it is."""
        return self.window is None and self.softcap is None and self.sinks is None

    def is_unpacked(self, num_rows: int, query: torch.Tensor) -> bool:
        """Tell whether a group is attended without packing heads, as Transformers does it.

        Packing gains nothing for one float32 query: the kernel is as quick with the heads apart.
        """
        if self.softcap is not None or self.sinks is not None:
            return False
        is_single = num_rows == 1 and query.shape[2] == 1
        apart = self.like_plain or query.dtype == torch.float32
        return query.shape[2] > MAX_PACKED_QUERIES or (apart and is_single)


def _is_sparse(segment: Segment, layer: int) -> bool:
    return segment.sparse is not None and layer not in segment.sparse.policy.dense_layers


def _attend_selected(
    query: torch.Tensor,  # [1, Hq, T, D]
    layer: DSparkLayer,
    group: Group,
    cache: DSparkCache,
    form: _Form,
) -> torch.Tensor:  # [1, T, Hq, Dv]
    """Attend from one row's newest tokens to the pages its policy selects."""
    segment = group.segments[0]
    out = attend_pages(
        query[0],
        layer.keys,
        layer.values,
        layer.summaries,
        cast("SparseRow", segment.sparse),
        slot=segment.slot,
        past=segment.past,
        layer=cache.current_layer,
        scale=form.scale,
    )
    return out[None]


def _attend_in_blocks(
    query: torch.Tensor,  # [1, Hq, T, D]
    layer: DSparkLayer,
    group: Group,
    cache: DSparkCache,
    form: _Form,
) -> torch.Tensor:  # [1, T, Hq, Dv]
    """Attend from a run of a prompt: its front densely, the rest in blocks that select pages."""
    segment = group.segments[0]
    row = cast("SparseRow", segment.sparse)
    prefill = cast("SparsePrefill", row.policy.prefill)
    leaders = layer.leaders.note(segment.slot, segment.past, query[0], prefill.block)
    first = first_in_blocks(prefill, leaders, segment.past, segment.end)
    count, outs = first - segment.past, []
    if count:
        front = group if first == segment.end else group.front(count)
        attend = _attend_prompt if front.is_prompt else _attend_rows
        outs.append(attend(query[:, :, :count], *layer.view(front), front, form))
    if first < segment.end:
        out = attend_blocks(
            query[0, :, count:],
            layer.keys,
            layer.values,
            layer.summaries,
            leaders,
            row,
            slot=segment.slot,
            past=segment.past,
            first=first,
            layer=cache.current_layer,
            scale=form.scale,
        )
        outs.append(out[None])
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


def _attend_rows(
    query: torch.Tensor,  # [1, Hq, N, D]
    keys: torch.Tensor,  # [B, Hkv, S, D]
    values: torch.Tensor,  # [B, Hkv, S, Dv]
    group: Group,
    form: _Form,
) -> torch.Tensor:  # [1, N, Hq, Dv]
    num_rows, num_heads = len(group.segments), query.shape[1]
    gather = group.gather(query.device)
    if gather is not None:
        query = query.index_select(2, gather[0])
    query = query.reshape(num_heads, num_rows, -1, query.shape[-1]).transpose(0, 1)
    chunks = [
        _attend_chunk(query[:, :, start : start + MAX_CHUNK], keys, values, group, form, start)
        for start in range(0, query.shape[2], MAX_CHUNK)
    ]
    out = chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=1)
    out = out.reshape(1, -1, num_heads, out.shape[-1])
    return out if gather is None else out.index_select(1, gather[1])


def _attend_chunk(
    query: torch.Tensor,  # [B, Hq, T, D]
    keys: torch.Tensor,  # [B, Hkv, S, D]
    values: torch.Tensor,  # [B, Hkv, S, Dv]
    group: Group,
    form: _Form,
    start: int,
) -> torch.Tensor:  # [B, T, Hq, Dv]
    """Attend the group's queries from `start` on; few at a time, so that masks stay small."""
    span = (start, start + query.shape[2])
    if form.is_unpacked(len(group.segments), query):
        visible = group.visible(form.window, query.device, span)
        mask = None if visible is None else visible[:, None]
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=form.scale, enable_gqa=True
        ).transpose(1, 2)
    heads_per_key = query.shape[1] // keys.shape[1]
    packed = group.packed_mask(form.window, heads_per_key, query.dtype, query.device, span)
    return packed_attention(
        query, keys, values, packed, scale=form.scale, softcap=form.softcap, sinks=form.sinks
    )


def _attend_prompt(
    query: torch.Tensor,  # [1, Hq, N, D]
    key: torch.Tensor,  # [1, Hkv, N, D]
    value: torch.Tensor,  # [1, Hkv, N, Dv]
    group: Group,
    form: _Form,
) -> torch.Tensor:  # [1, N, Hq, Dv]
    """Attend a prompt to itself, by the causal kernel where the model allows it."""
    is_short = form.window is None or query.shape[2] <= form.window
    if form.softcap is None and form.sinks is None and is_short:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=form.scale, enable_gqa=True
        ).transpose(1, 2)
    return _attend_rows(query, key, value, group, form)


def _refuse_unknown(
    module: nn.Module,
    attention_mask: torch.Tensor | None,
    dropout: float,
    layer: DSparkLayer,
    kwargs: dict[str, Any],
) -> None:
    unknown = [name for name, value in kwargs.items() if value is not None]
    unknown = [name for name in unknown if name not in _HARMLESS]
    if unknown:
        raise UnsupportedByFlatError(
            f"ragged attention does not know {unknown[0]!r}, which {type(module).__name__} passes."
        )
    if attention_mask is not None or dropout:
        raise UnsupportedByFlatError(
            f"{type(module).__name__} builds its own mask or drops attention weights."
        )
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise UnsupportedByFlatError(f"{type(module).__name__} is not causal.")
    window = kwargs.get("sliding_window")
    if window is not None and window != layer.window:
        raise UnsupportedByFlatError(
            f"{type(module).__name__} attends over a window of {window} tokens where its cache "
            f"layer has {layer.window}."
        )
