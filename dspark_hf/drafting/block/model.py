"""BlockModel: the parameters of a block drafter and the pass over its blocks.

The state dict has the names of the public DeepSpec layout. Embedding and output head are not in it:
they are the target's, or come beside it (`vocabulary.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's own abbreviation
from torch import nn

from dspark_hf.drafting.block.attention import (
    Memory,
    RMSNorm,
    Rotary,
    first_of_blocks,
    rotary_tables,
)
from dspark_hf.drafting.block.flavours import BlockLayer, make_layer
from dspark_hf.drafting.block.heads import ConfidenceHead, MarkovHead

if TYPE_CHECKING:
    from dspark_hf.drafting.block.spec import BlockSpec


class BlockModel(nn.Module):
    """Backbone, sequential head and confidence head."""

    def __init__(self, spec: BlockSpec) -> None:
        """Create with random parameters.

        Args:
            spec: What to build.
        """
        super().__init__()
        self.spec = spec
        width = spec.hidden_size
        self.fc = nn.Linear(len(spec.target_layers) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, spec.rms_norm_eps)
        self.layers = nn.ModuleList(make_layer(spec, i) for i in range(spec.num_layers))
        self.norm = RMSNorm(width, spec.rms_norm_eps)
        self.markov_head = MarkovHead(spec) if spec.markov_rank else None
        self.confidence_head = ConfidenceHead(spec) if spec.has_confidence else None

    @property
    def dtype(self) -> torch.dtype:
        """Type of the parameters."""
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.fc.weight.device

    def rotary(self, positions: torch.Tensor) -> Rotary:
        """Return the rotary tables of positions (B, T)."""
        return rotary_tables(positions, self.spec, self.dtype)

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """Turn concatenated target features (B, T, m * d) into context states (B, T, d)."""
        return cast("torch.Tensor", self.hidden_norm(self.fc(features)))

    def context(
        self, states: torch.Tensor, rotary: Rotary
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each layer's keys and values, (B, Hkv, T, D), of context states (B, T, d)."""
        return [
            cast("BlockLayer", layer).self_attn.keys_values(states, rotary) for layer in self.layers
        ]

    def forward(
        self, embeds: torch.Tensor, rotary: Rotary, memory: Memory, count: int | None = None
    ) -> torch.Tensor:
        """Run blocks through the backbone.

        Args:
            embeds: Embeddings of anchor and mask tokens, (B, T, d), T a multiple of the block.
            rotary: Of their positions.
            memory: What they attend to.
            count: Positions of each block that will be read, from its first on; None for all. What
                only others need is left out: in the last layer, all but their keys and values.

        Returns:
            torch.Tensor: Normed hidden states (B, Q, d) of the positions that are read.
        """
        states = embeds
        for layer in self.layers[:-1]:
            states = layer(states, rotary, memory)
        states = self.layers[-1](states, rotary, memory, count)
        return cast("torch.Tensor", self.norm(states))


class TextMemory:
    """Blocks anchored in known texts: each sees the features strictly before its anchor.

    The slow, obvious form that training and the tests of the quick one use.
    """

    def __init__(
        self,
        spec: BlockSpec,
        context: list[tuple[torch.Tensor, torch.Tensor]],
        anchors: torch.Tensor,
    ) -> None:
        """Hold a context.

        Args:
            spec: Of the drafter.
            context: From `BlockModel.context`, of S features per text.
            anchors: Positions of the anchors, int64 of shape (B, A), all below S + 1.
        """
        self.spec, self.keys_values = spec, context
        num_features, size = context[0][0].shape[2], spec.block_size
        position = torch.arange(num_features, device=anchors.device)
        sees = position < anchors[..., None]  # [B, A, S]
        near = sees & (position >= anchors[..., None] - (spec.sliding_window or 0))
        num_rows = anchors.shape[1] * size
        block = torch.arange(num_rows, device=anchors.device)
        same = (block[:, None] // size == block // size).expand(len(anchors), -1, -1)
        past = same & (block[:, None] >= block)
        self.masks = {
            "full_attention": torch.cat([sees.repeat_interleave(size, dim=1), same], dim=-1),
            "sliding_attention": torch.cat(
                [near.repeat_interleave(size, dim=1), past if spec.sliding_is_causal else same],
                dim=-1,
            ),
        }

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Attend as the Memory protocol says."""
        keys, values = self.keys_values[layer]
        groups, num_keys = query.shape[1] // key.shape[1], key.shape[2]
        key = torch.cat([keys, key], dim=2).repeat_interleave(groups, dim=1)
        value = torch.cat([values, value], dim=2).repeat_interleave(groups, dim=1)
        size, asked = self.spec.block_size, query.shape[2] * self.spec.block_size // num_keys
        mask = first_of_blocks(self.masks[self.spec.layer_types[layer]], size, asked)[:, None]
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
        return out.transpose(1, 2)


def block_ids(anchors: torch.Tensor, spec: BlockSpec) -> torch.Tensor:
    """Return the input ids (..., block_size) of blocks with the given anchor ids (...)."""
    ids = torch.full((*anchors.shape, spec.block_size), spec.mask_token_id, device=anchors.device)
    ids[..., 0] = anchors
    return ids


def teacher_forced(
    model: BlockModel,
    embed: torch.Tensor,  # [V, d]
    features: torch.Tensor,  # [B, S, m * d]
    ids: torch.Tensor,  # [B, L], L >= S
    anchors: torch.Tensor,  # [B, A]
) -> torch.Tensor:  # [B, A, N, d]
    """Return hidden states of blocks anchored in known texts.

    Args:
        model: The drafter.
        embed: The target's embedding, scaled as the drafter expects.
        features: The target's concatenated features of the texts.
        ids: The texts.
        anchors: Positions of the anchors; a block sees the features strictly before its own.
    """
    spec = model.spec
    steps = torch.arange(features.shape[1], device=ids.device)[None]
    context = model.context(model.project(features), model.rotary(steps))
    memory = TextMemory(spec, context, anchors)
    inputs = block_ids(ids.gather(1, anchors), spec).flatten(1)
    places = anchors[..., None] + torch.arange(spec.block_size, device=ids.device)
    # The rows that are used, not the whole table, are turned into the drafter's type.
    embeds = F.embedding(inputs, embed).to(model.dtype)
    hidden = model(embeds, model.rotary(places.flatten(1)), memory)
    return cast("torch.Tensor", hidden.unflatten(1, (anchors.shape[1], spec.block_size)))
