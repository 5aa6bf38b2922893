"""BlockCheckpoint: a block drafter as loaded, with its tensors under one set of names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dspark_hf.drafting.block.spec import BlockSpec
from dspark_hf.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

EMBED = "embed_tokens.weight"
HEAD = "lm_head.weight"
RAW_LAST_BLOCK_KINDS = frozenset({"speculators-dspark", "speculators-dflash"})
"""Kinds whose features come from the blocks themselves, so that the last one can be tapped too."""


class UnsupportedCheckpointError(CheckpointError, NotImplementedError):
    """The checkpoint is well formed, but this package has no drafter for it."""


@dataclass(frozen=True)
class BlockCheckpoint:
    """A block drafter as read from, or about to be written to, a folder.

    Attributes:
        spec: What it is.
        tensors: Its own parameters under DeepSpec's names, and nothing else.
        embed: Token embeddings of shape (V, d); None to borrow the target's.
        head: Output head of shape (V_draft, d); None to borrow the target's rows.
        d2t: Offsets, int64 of shape (V_draft,): target id = draft id + d2t[draft id]. None unless
            the drafter's vocabulary is pruned.
        kind: One of `detect.KINDS`.
        config: The config.json it came from; empty for a new drafter.
        calibration: Content of calibration.json beside it; None without.
    """

    spec: BlockSpec
    tensors: dict[str, torch.Tensor]
    embed: torch.Tensor | None = None
    head: torch.Tensor | None = None
    d2t: torch.Tensor | None = None
    kind: str = "deepspec-dspark"
    config: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] | None = None

    @property
    def num_parameters(self) -> int:
        """Numbers in the drafter's own parameters."""
        return sum(tensor.numel() for tensor in self.tensors.values())


def tensor_shapes(spec: BlockSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of a drafter, by DeepSpec's name.

    Args:
        spec: Of the drafter.

    Returns:
        dict[str, tuple[int, ...]]: The drafter's own parameters, in the order of the forward pass.
    """
    width = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, len(spec.target_layers) * width),
        "hidden_norm.weight": (width,),
    }
    for layer in range(spec.num_layers):
        for name, shape in _layer_shapes(spec, layer).items():
            shapes[f"layers.{layer}.{name}"] = shape
    shapes["norm.weight"] = (width,)
    rank = spec.markov_rank
    if rank:
        shapes["markov_head.markov_w1.weight"] = (spec.vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (spec.draft_vocab_size, rank)
        if spec.head == "gated":
            shapes["markov_head.gate_proj.weight"] = (rank, width + rank)
            shapes["markov_head.gate_proj.bias"] = (rank,)
        if spec.head == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + width)
            shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if spec.has_confidence:
        seen = width + (rank if spec.confidence_sees_token else 0)
        shapes["confidence_head.proj.weight"] = (1, seen)
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes


def check_tensors(spec: BlockSpec, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse parameters that are missing, unexpected or misshapen.

    Args:
        spec: Of the drafter.
        tensors: By DeepSpec's name.

    Raises:
        CheckpointError: Naming the first such tensor and both shapes.
    """
    expected = tensor_shapes(spec)
    for name, shape in expected.items():
        if name not in tensors:
            raise CheckpointError(
                f"the drafter's weights must hold {name!r} of shape {shape}; got no such tensor. "
                "Get the whole checkpoint, or repair its config.json."
            )
        check_shape(name, tensors[name], shape)
        if not tensors[name].is_floating_point():
            raise CheckpointError(
                f"{name!r} must be a floating-point tensor; got {tensors[name].dtype}. Get the "
                "checkpoint before it was quantized."
            )
    for name, tensor in tensors.items():
        if name not in expected:
            raise CheckpointError(
                f"the drafter's weights must be those its config.json describes; got {name!r} of "
                f"shape {tuple(tensor.shape)} as well. Repair config.json, or get another drafter."
            )


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Refuse one misshapen tensor.

    Args:
        name: Of the tensor.
        tensor: As found.
        shape: As config.json says.

    Raises:
        CheckpointError: Naming the tensor and both shapes.
    """
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"{name!r} must have the shape {shape} that config.json describes; got "
            f"{tuple(tensor.shape)}. Repair config.json, or get the weights that belong to it."
        )


def check_against_target(
    drafter: BlockCheckpoint | BlockSpec, *, hidden_size: int, num_layers: int, vocab_size: int
) -> None:
    """Refuse a drafter that was not made for a target like this one.

    The last block cannot be tapped where the layout's own reader takes Transformers' last hidden
    state, which is normed: its drafters learned from the block's raw output or from the normed one,
    and the checkpoint does not say which. A bare spec does not tell its layout, so that this is
    checked for a checkpoint only.

    Args:
        drafter: A checkpoint, or its spec alone.
        hidden_size: Width of the target.
        num_layers: Blocks of the target.
        vocab_size: Rows of the target's embedding, padding rows included.

    Raises:
        CheckpointError: Naming both numbers.
    """
    spec = drafter if isinstance(drafter, BlockSpec) else drafter.spec
    if spec.hidden_size != hidden_size:
        raise CheckpointError(
            f"the drafter's hidden_size must be the target's {hidden_size}; got "
            f"{spec.hidden_size}. Load the drafter that was made for this target."
        )
    for layer in spec.target_layers:
        if not -1 <= layer < num_layers:
            raise CheckpointError(
                f"target_layer_ids must lie between -1 (the embedding) and {num_layers - 1} in a "
                f"target of {num_layers} blocks; got {layer}. Load the drafter that was made for "
                "this target."
            )
    if spec.num_target_layers not in (None, num_layers):
        raise CheckpointError(
            f"the drafter must be made for a target of {num_layers} blocks; got one for "
            f"{spec.num_target_layers}. Load the drafter that was made for this target."
        )
    if isinstance(drafter, BlockCheckpoint) and drafter.kind not in RAW_LAST_BLOCK_KINDS:
        _refuse_last_block(spec, num_layers, drafter.kind)
    if vocab_size < spec.vocab_size:
        raise CheckpointError(
            f"the target's embedding must have at least the drafter's {spec.vocab_size} rows; got "
            f"{vocab_size}. Load the drafter that was made for this target."
        )


def _refuse_last_block(spec: BlockSpec, num_layers: int, kind: str) -> None:
    if num_layers - 1 in spec.target_layers:
        raise CheckpointError(
            f"target_layer_ids of a {kind} drafter must be below {num_layers - 1}, the target's "
            f"last block, whose hidden state Transformers norms; got {num_layers - 1}. Train the "
            "drafter on earlier blocks."
        )


def _layer_shapes(spec: BlockSpec, layer: int) -> dict[str, tuple[int, ...]]:
    width, inner, head_dim = spec.hidden_size, spec.intermediate_size, spec.head_dim_of(layer)
    queries, keys = spec.num_heads * head_dim, spec.kv_heads_of(layer) * head_dim
    projections = {"q": (queries, width), "k": (keys, width), "v": (keys, width)}
    if spec.shares_key_value and not spec.is_sliding(layer):
        del projections["v"]
    projections["o"] = (width, queries)
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (width,)}
    for name, shape in projections.items():
        shapes[f"self_attn.{name}_proj.weight"] = shape
        if spec.has_attention_bias:
            shapes[f"self_attn.{name}_proj.bias"] = shape[:1]
    if spec.norms_heads:
        shapes["self_attn.q_norm.weight"] = (head_dim,)
        shapes["self_attn.k_norm.weight"] = (head_dim,)
    shapes["post_attention_layernorm.weight"] = (width,)
    if spec.flavour == "gemma4":
        shapes["pre_feedforward_layernorm.weight"] = (width,)
        shapes["post_feedforward_layernorm.weight"] = (width,)
        shapes["layer_scalar"] = (1,)
    shapes["mlp.gate_proj.weight"] = (inner, width)
    shapes["mlp.up_proj.weight"] = (inner, width)
    shapes["mlp.down_proj.weight"] = (width, inner)
    return shapes
