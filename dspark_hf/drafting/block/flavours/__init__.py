"""Backbone layers by family; another family is one file and one line here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dspark_hf.drafting.block.flavours.gemma4 import Gemma4Layer
from dspark_hf.drafting.block.flavours.qwen3 import Qwen3Layer

if TYPE_CHECKING:
    from dspark_hf.drafting.block.spec import BlockSpec

BlockLayer = Qwen3Layer | Gemma4Layer
LAYERS: dict[str, type[BlockLayer]] = {"qwen3": Qwen3Layer, "gemma4": Gemma4Layer}


def make_layer(spec: BlockSpec, layer: int) -> BlockLayer:
    """Create a layer of the drafter's family.

    Args:
        spec: Of the drafter.
        layer: Index of the layer.
    """
    return LAYERS[spec.flavour](spec, layer)
