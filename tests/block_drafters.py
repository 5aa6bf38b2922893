"""Makers of tiny block drafters: random ones of any kind, and ones that were taught some texts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from dspark_hf import compat
from dspark_hf.drafting.block.drafter import BlockDrafter
from dspark_hf.drafting.block.model import BlockModel
from dspark_hf.drafting.block.spec import BlockSpec
from dspark_hf.drafting.block.vocabulary import Vocabulary
from dspark_hf.values import DraftRequest, Proposal
from dspark_hf.verification.scaling import Scalings

FULL, SLIDING = "full_attention", "sliding_attention"
CERTAIN = 60.0
"""Bias on what a taught drafter believes comes next; random base logits spread by about 5."""


def block_spec(target: PreTrainedModel, head: str = "vanilla", **changes: Any) -> BlockSpec:
    """Return a small spec for a target.

    Args:
        target: Gives vocabulary, width and layers.
        head: "none", "vanilla", "gated" or "rnn".
        **changes: Fields of BlockSpec.
    """
    config = compat.text_config(target)
    vocab_size, width = int(config.vocab_size), int(config.hidden_size)
    layer_types = changes.pop("layer_types", (FULL, FULL))
    rank = 0 if head == "none" else vocab_size
    values: dict[str, Any] = {
        "flavour": "qwen3", "vocab_size": vocab_size, "draft_vocab_size": vocab_size,
        "hidden_size": width, "intermediate_size": 40, "num_layers": len(layer_types),
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "target_layers": (0, 1),
        "num_target_layers": None, "block_size": 5, "mask_token_id": vocab_size - 1,
        "reads_anchor": True, "rope_theta": 1e4, "rms_norm_eps": 1e-6,
        "layer_types": layer_types, "markov_rank": rank,
        "head": "vanilla" if head == "none" else head, "has_confidence": True,
        "confidence_sees_token": rank > 0,
    }  # fmt: skip
    return BlockSpec(**{**values, **changes})


def random_model(spec: BlockSpec, seed: int = 0) -> BlockModel:
    """Build a drafter's parameters, seeded, of a spread that makes its drafts vary."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = BlockModel(spec).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            elif not name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        if model.confidence_head is not None:
            model.confidence_head.proj.weight.normal_(std=0.4)
    return model


def block_drafter(
    target: PreTrainedModel,
    head: str = "vanilla",
    *,
    draft_ids: Sequence[int] | None = None,
    owns_embed: bool = False,
    owns_head: bool = False,
    texts: Sequence[Sequence[int]] = (),
    seed: int = 0,
    scalings: Scalings | None = None,
    **changes: Any,
) -> BlockDrafter:
    """Make a random drafter, or one that knows what followed what in some texts.

    Args:
        target: The model it drafts for.
        head: "none", "vanilla", "gated" or "rnn".
        draft_ids: Ids of a pruned vocabulary, increasing; None for all.
        owns_embed: Whether it brings a random embedding instead of borrowing the target's.
        owns_head: Whether it brings a random output head.
        texts: What a sequential head is taught; its drafts are then partly right.
        seed: Of the weights.
        scalings: Of the confidences.
        **changes: Fields of BlockSpec.
    """
    d2t = None
    if draft_ids is not None:
        d2t = torch.tensor(draft_ids) - torch.arange(len(draft_ids))
        changes["draft_vocab_size"] = len(draft_ids)
    spec = block_spec(target, head, **changes)
    model = random_model(spec, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    shape = (spec.vocab_size, spec.hidden_size)
    embed = torch.randn(shape, generator=generator) if owns_embed else None
    shape = (spec.draft_vocab_size, spec.hidden_size)
    own_head = torch.randn(shape, generator=generator) if owns_head else None
    vocabulary = Vocabulary(spec, target, embed=embed, head=own_head, d2t=d2t)
    if texts:
        teach(model, vocabulary, texts)
    model.to(target.dtype)
    vocabulary.to(target.device, target.dtype)
    return BlockDrafter(model, vocabulary, target, scalings=scalings)


@torch.no_grad()
def teach(model: BlockModel, vocabulary: Vocabulary, texts: Sequence[Sequence[int]]) -> None:
    """Write into a sequential head of full rank which token followed which; the last time counts.

    Texts that disagree, and tokens outside a pruned vocabulary, leave the drafts partly wrong.
    """
    spec, head = model.spec, model.markov_head
    assert head is not None
    assert spec.markov_rank == spec.vocab_size
    head.markov_w1.weight.copy_(torch.eye(spec.vocab_size))
    if head.kind == "rnn":
        # The third part of [s ; w1 ; h] becomes the code: almost the token's own unit vector.
        rank = spec.markov_rank
        head.joint_proj.weight[2 * rank :].mul_(0.02)
        head.joint_proj.weight[2 * rank :, rank : 2 * rank] += 3 * torch.eye(rank)
    ids = torch.arange(spec.vocab_size)
    if vocabulary.target_ids is not None:
        ids = vocabulary.target_ids
    place = {int(token): i for i, token in enumerate(ids)}
    head.markov_w2.weight.mul_(0.02)
    for text in texts:
        for token, following in itertools.pairwise(text):
            head.markov_w2.weight[:, token] = 0
            if following in place:
                head.markov_w2.weight[place[following], token] = CERTAIN


class Recording:
    """Keeps every request a block drafter gets, and what it answered, as plain data."""

    def __init__(self, drafter: BlockDrafter) -> None:
        self.drafter = drafter
        self.name, self.block_size = drafter.name, drafter.block_size
        self.target_layers = drafter.target_layers
        self.rounds: list[tuple[int, tuple[int, ...], int, Proposal]] = []
        """Row, its committed ids, tokens asked for, proposal."""
        self.taken: list[tuple[int, int, torch.Tensor]] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Pass on and note."""
        answers = self.drafter.propose(requests)
        for request, answer in zip(requests, answers, strict=True):
            self.rounds.append((request.row_id, tuple(request.ids), request.max_tokens, answer))
        return answers

    def take(self, row_id: int, start: int, features: torch.Tensor) -> None:
        """Pass on and note."""
        self.taken.append((row_id, start, features.clone()))
        self.drafter.take(row_id, start, features)

    def free(self, row_id: int) -> None:
        """Pass on."""
        self.drafter.free(row_id)


def greedy_request(row_id: int, ids: Sequence[int], max_tokens: int = 64) -> DraftRequest:
    """Ask for a greedy draft."""
    return DraftRequest(row_id, list(ids), max_tokens, None, torch.Generator())


@torch.no_grad()
def features_of(target: PreTrainedModel, ids: Sequence[int], spec: BlockSpec) -> torch.Tensor:
    """Return a plain forward's features (T, m * d); the last block's is not among them."""
    states = target(torch.tensor([list(ids)]), output_hidden_states=True).hidden_states
    assert max(spec.target_layers) < len(states) - 2
    return torch.cat([states[i + 1] for i in spec.target_layers], dim=-1)[0]
