"""BlockSpec: what a block drafter is, whatever format its checkpoint has."""

from __future__ import annotations

from dataclasses import dataclass

from dspark_hf.errors import CheckpointError

FLAVOURS = ("qwen3", "gemma4")
HEADS = ("vanilla", "gated", "rnn")
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class BlockSpec:
    """Shape and conventions of a block drafter.

    Attributes:
        flavour: Family of the backbone's layers, one of `FLAVOURS`.
        vocab_size: Ids of the target: rows of the embedding and of `markov_w1`.
        draft_vocab_size: Ids the drafter can propose; smaller than `vocab_size` when pruned.
        hidden_size: Width of the drafter, equal to the target's embedding width.
        intermediate_size: Width of the MLP.
        num_layers: Layers of the backbone.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of a head.
        target_layers: Tapped target blocks: i is the output of block i, -1 the embedding output.
        num_target_layers: Blocks of the target it was made for; None if the format does not say.
        block_size: Input rows of a block: the anchor and the mask tokens behind it.
        mask_token_id: Id of the mask token in the target's vocabulary.
        reads_anchor: Readout: True when row k-1 predicts draft k (DSpark: block_size drafts),
            False when row k predicts draft k (DFlash: block_size - 1 drafts).
        rope_theta: Base of the rotary angles.
        rms_norm_eps: Epsilon of the norms.
        layer_types: One of `LAYER_TYPES` per layer.
        sliding_window: Window of the sliding layers, in tokens; None without such layers.
        sliding_is_causal: Whether in sliding layers a block row sees only block rows up to itself;
            in full layers all rows of a block always see each other.
        markov_rank: Rank of the sequential head; 0 without one.
        head: Kind of the sequential head, one of `HEADS`; ignored at rank 0.
        has_confidence: Whether there is a confidence head.
        confidence_sees_token: Whether it reads the previous token's `markov_w1` row too.
        norms_heads: Whether queries and keys are normed per head.
        has_attention_bias: Whether the attention projections have biases.
        hidden_act: Activation of the MLP, by Transformers' name.
        attention_scale: Factor on the dot products; None for head_dim ** -0.5.
        scales_embedding: Whether embeddings are multiplied by sqrt(hidden_size).
        shares_key_value: Gemma4's k-eq-v: values are the projected keys, there is no v_proj.
        logit_softcap: c in c * tanh(x / c) on the base logits; None without.
        rope_partial: Share of a head's dimensions that is rotated in full layers.
        sliding_rope_theta: Base of the rotary angles in sliding layers; None for `rope_theta`.
        full_head_dim: Width of a head in full layers (Gemma4); None for `head_dim`.
        full_kv_heads: Key and value heads of full layers (Gemma4); None for `num_kv_heads`.
        max_positions: Most positions; None when not limited.
    """

    flavour: str
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    target_layers: tuple[int, ...]
    num_target_layers: int | None
    block_size: int
    mask_token_id: int
    reads_anchor: bool
    rope_theta: float
    rms_norm_eps: float
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    sliding_is_causal: bool = False
    markov_rank: int = 0
    head: str = "vanilla"
    has_confidence: bool = False
    confidence_sees_token: bool = False
    norms_heads: bool = True
    has_attention_bias: bool = False
    hidden_act: str = "silu"
    attention_scale: float | None = None
    scales_embedding: bool = False
    shares_key_value: bool = False
    logit_softcap: float | None = None
    rope_partial: float = 1.0
    sliding_rope_theta: float | None = None
    full_head_dim: int | None = None
    full_kv_heads: int | None = None
    max_positions: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be built, naming the field."""
        for name, value, allowed in (
            ("flavour", self.flavour, FLAVOURS),
            ("markov_head_type", self.head, HEADS),
        ):
            if value not in allowed:
                raise CheckpointError(
                    f"{name} must be one of {list(allowed)}; got {value!r}. "
                    "This kind of drafter is not supported."
                )
        for kind in self.layer_types:
            if kind not in LAYER_TYPES:
                raise CheckpointError(
                    f"layer_types must hold {list(LAYER_TYPES)}; got {kind!r}. "
                    "This kind of layer is not supported."
                )
        if len(self.layer_types) != self.num_layers:
            raise CheckpointError(
                f"layer_types must name all {self.num_layers} layers; got {len(self.layer_types)}. "
                "Repair the drafter's config.json."
            )
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise CheckpointError(
                "sliding_window must be set where layer_types has sliding layers; got "
                f"{self.sliding_window!r}. Repair the drafter's config.json."
            )
        if self.num_drafts < 1:
            raise CheckpointError(
                f"block_size must leave at least one draft; got {self.block_size}. "
                "Repair the drafter's config.json."
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise CheckpointError(
                f"mask_token_id must be below the embedding's {self.vocab_size} rows; got "
                f"{self.mask_token_id}. Repair the drafter's config.json."
            )
        if not self.target_layers:
            raise CheckpointError("target_layer_ids must name at least one block; got none.")
        if self.confidence_sees_token and not self.markov_rank:
            raise CheckpointError(
                "confidence_head_with_markov needs a Markov head; got markov_rank 0. "
                "Repair the drafter's config.json."
            )

    @property
    def num_drafts(self) -> int:
        """Draft tokens a block gives."""
        return self.block_size if self.reads_anchor else self.block_size - 1

    @property
    def is_pruned(self) -> bool:
        """Whether the drafter proposes from part of the vocabulary."""
        return self.draft_vocab_size != self.vocab_size

    def is_sliding(self, layer: int) -> bool:
        """Whether a layer attends over the window only."""
        return self.layer_types[layer] == "sliding_attention"

    def head_dim_of(self, layer: int) -> int:
        """Width of a layer's heads."""
        return self.head_dim if self.is_sliding(layer) else self.full_head_dim or self.head_dim

    def kv_heads_of(self, layer: int) -> int:
        """Key and value heads of a layer."""
        if self.is_sliding(layer):
            return self.num_kv_heads
        return self.full_kv_heads or self.num_kv_heads
