"""Attention of a draft block: queries from the block, keys and values from context and block."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's own abbreviation
from torch import nn

if TYPE_CHECKING:
    from dspark_hf.drafting.block.spec import BlockSpec

Tables = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of positions, each of shape (B, T, D)."""
Rotary = dict[str, Tables]
"""Tables by layer type."""


class Memory(Protocol):
    """Where a layer's block attends: it holds the context's keys and values and knows the masks."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [B, Hq, Q, D]
        key: torch.Tensor,  # [B, Hkv, T, D]
        value: torch.Tensor,  # [B, Hkv, T, D]
        scale: float,
    ) -> torch.Tensor:  # [B, Q, Hq, D]
        """Attend from block rows to the context and to the block's own keys and values.

        Queries are of the first positions of every block, as many of each; of all when Q is T.
        """


def first_of_blocks(states: torch.Tensor, size: int, count: int | None) -> torch.Tensor:
    """Return of blocks of `size` along axis 1 the first `count` each; all when None."""
    if count is None or count >= size:
        return states
    kept: torch.Tensor = states.unflatten(1, (-1, size))[:, :, :count]
    return kept.flatten(1, 2)


def rotary_tables(positions: torch.Tensor, spec: BlockSpec, dtype: torch.dtype) -> Rotary:
    """Return the rotary angles' cosines and sines.

    Args:
        positions: Of shape (B, T).
        spec: Gives bases, widths and the rotated share.
        dtype: Of the result; angles are float32.

    Returns:
        Rotary: For each type of layer, two tensors of shape (B, T, D), the second half repeating
        the first; dimensions that are not rotated have cosine 1 and sine 0.
    """
    tables = {}
    for kind, inverse in _frequencies(spec, positions.device).items():
        angles = positions[..., None].float() * inverse
        angles = torch.cat([angles, angles], dim=-1)
        tables[kind] = angles.cos().to(dtype), angles.sin().to(dtype)
    return tables


@functools.lru_cache(maxsize=16)
@torch.inference_mode(mode=False)
def _frequencies(spec: BlockSpec, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the rotary angles per position by type of layer, float32 of shape (D / 2,)."""
    frequencies = {}
    for kind in dict.fromkeys(spec.layer_types):
        layer = spec.layer_types.index(kind)
        dim, share, theta = spec.head_dim_of(layer), spec.rope_partial, spec.rope_theta
        if spec.is_sliding(layer):
            share, theta = 1.0, spec.sliding_rope_theta or theta
        half = int(dim * share) // 2
        exponents = torch.arange(half, device=device, dtype=torch.float32) * 2
        frequencies[kind] = F.pad(theta ** -(exponents / dim), (0, dim // 2 - half))
    return frequencies


def rotate(states: torch.Tensor, tables: Tables) -> torch.Tensor:
    """Rotate states of shape (B, T, H, D) by their positions."""
    cos, sin = tables[0].unsqueeze(2), tables[1].unsqueeze(2)
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in float32 for 16-bit input."""

    def __init__(self, width: int, eps: float, *, has_weight: bool = True) -> None:
        """Create with weight one.

        Args:
            width: Size of the normed axis, the last.
            eps: Added to the mean square.
            has_weight: Whether there is a weight.
        """
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width)) if has_weight else None
        self.width = width

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Norm the last axis."""
        weight: torch.Tensor | None = self.weight
        if weight is not None and weight.dtype != states.dtype:
            # Under autocast; of unequal types the quick kernel is not used.
            weight = weight.to(states.dtype)
        return F.rms_norm(states, (self.width,), weight, self.eps)


class BlockAttention(nn.Module):
    """Projections of one layer; context and block share those of keys and values."""

    def __init__(self, spec: BlockSpec, layer: int, *, norms_values: bool = False) -> None:
        """Create the projections.

        Args:
            spec: Of the drafter.
            layer: Index of the layer.
            norms_values: Whether values are normed per head, without weight.
        """
        super().__init__()
        self.layer, self.kind = layer, spec.layer_types[layer]
        self.block_size = spec.block_size
        self.head_dim = spec.head_dim_of(layer)
        self.scale = spec.attention_scale or self.head_dim**-0.5
        width, bias = spec.hidden_size, spec.has_attention_bias
        kv_width = spec.kv_heads_of(layer) * self.head_dim
        self.q_proj = nn.Linear(width, spec.num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, kv_width, bias=bias)
        is_shared = spec.shares_key_value and not spec.is_sliding(layer)
        self.v_proj = None if is_shared else nn.Linear(width, kv_width, bias=bias)
        self.o_proj = nn.Linear(spec.num_heads * self.head_dim, width, bias=bias)
        eps = spec.rms_norm_eps
        self.q_norm = RMSNorm(self.head_dim, eps) if spec.norms_heads else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, eps) if spec.norms_heads else nn.Identity()
        self.v_norm: nn.Module = nn.Identity()
        if norms_values:
            self.v_norm = RMSNorm(self.head_dim, eps, has_weight=False)

    def keys_values(
        self, states: torch.Tensor, rotary: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Project states (B, T, d) to keys and values of shape (B, Hkv, T, D)."""
        projected = self.k_proj(states).unflatten(-1, (-1, self.head_dim))
        values = projected
        if self.v_proj is not None:
            values = self.v_proj(states).unflatten(-1, (-1, self.head_dim))
        keys = rotate(self.k_norm(projected), rotary[self.kind])
        return keys.transpose(1, 2), self.v_norm(values).transpose(1, 2)

    def forward(
        self, states: torch.Tensor, rotary: Rotary, memory: Memory, count: int | None = None
    ) -> torch.Tensor:
        """Attend from the first `count` positions of each block of (B, T, d); None means all."""
        cos, sin = rotary[self.kind]
        size = self.block_size
        query = self.q_proj(first_of_blocks(states, size, count))
        query = self.q_norm(query.unflatten(-1, (-1, self.head_dim)))
        tables = first_of_blocks(cos, size, count), first_of_blocks(sin, size, count)
        query = rotate(query, tables).transpose(1, 2)
        keys, values = self.keys_values(states, rotary)
        out = memory.attend(self.layer, query, keys, values, self.scale)
        return cast("torch.Tensor", self.o_proj(out.flatten(2)))
