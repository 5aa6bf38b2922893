"""Where a drafter starts from: the target's last blocks, so that little is left to learn."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from dspark_hf import compat
from dspark_hf.drafting.block.taps import decoder_blocks
from dspark_hf.drafting.checkpoints.base import check_against_target
from dspark_hf.drafting.checkpoints.load import load_checkpoint
from dspark_hf.errors import ConfigError
from dspark_hf.training.settings import DrafterShape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from transformers import PreTrainedModel

    from dspark_hf.drafting.block.model import BlockModel
    from dspark_hf.drafting.checkpoints.base import BlockCheckpoint
    from dspark_hf.training.data import Text

logger = logging.getLogger(__name__)

NEW_STD = 0.02
"""Spread of parameters that start at random."""
MOST_BIGRAM_ROWS, MOST_BIGRAM_ENTRIES = 8192, 2**26
"""Tokens whose followers are counted, and numbers of the table: 256 MiB."""
UNIGRAM_TOKENS = 20.0
"""Weight of the overall frequencies in each token's own, in tokens."""
QUIET = 0.1
"""What the backbone's scores begin with where the sequential head already knows something."""
_SHARED = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
)


def load_start(source: str, target: PreTrainedModel, shape: DrafterShape) -> BlockCheckpoint:
    """Read the drafter that training goes on from.

    Args:
        source: Path or hub id of a block drafter.
        target: The model to draft for.
        shape: What was asked for; fields at their defaults follow the drafter.

    Raises:
        ConfigError: If it has another shape, or tables of its own that training would not touch.
        CheckpointError: If it cannot be read or was made for another target.
    """
    rows, width = target.get_input_embeddings().weight.shape
    found = load_checkpoint(source, vocab_size=int(rows))
    check_against_target(
        found,
        hidden_size=int(width),
        num_layers=len(decoder_blocks(target)),
        vocab_size=int(rows),
    )
    if found.embed is not None or found.head is not None:
        raise ConfigError(
            f"from_drafter must borrow the target's embedding and output head; {source} brings its "
            "own. Convert it to a layout without them, or train from the target."
        )
    spec = found.spec
    own = {
        "markov_rank": spec.markov_rank,
        "head": spec.head,
        "confidence": spec.has_confidence,
        "block_size": spec.block_size,
        "num_layers": spec.num_layers,
        "target_layers": spec.target_layers,
        "intermediate_size": spec.intermediate_size,
        "draft_vocab_size": spec.draft_vocab_size,
        "mask_token_id": spec.mask_token_id,
        "reads_anchor": spec.reads_anchor,
    }
    for name, value in own.items():
        asked = getattr(shape, name)
        if asked not in (getattr(DrafterShape(), name), value):
            raise ConfigError(
                f"{name} must be {value}, as of {source}; got {asked}. Leave it out, or train "
                "without from_drafter."
            )
    return found


@torch.no_grad()
def initialise(model: BlockModel, seed: int) -> None:
    """Draw all parameters from a normal distribution by seed; W2 starts at zero: no bias."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith(("markov_w2.weight", "bias")):
            parameter.zero_()
        elif parameter.ndim > 1:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * NEW_STD)


@torch.no_grad()
def start_from_target(
    model: BlockModel, target: PreTrainedModel, sample: torch.Tensor
) -> list[str]:
    """Copy what fits from the target's last blocks.

    Layers, norms and `fc` make the drafter at first compute what those blocks compute of the
    latest tap. Queries and keys, which the target may not norm, get constant norm weights of their
    mean size on a sample.

    Args:
        model: Initialised drafter.
        target: The model it drafts for.
        sample: Token ids of shape (B, T) on which sizes are measured.

    Returns:
        list[str]: Names of the modules that were copied, for the log.
    """
    blocks = decoder_blocks(target)
    chosen = list(blocks)[-len(model.layers) :]
    sizes = _head_sizes(target, chosen, sample, model.spec.head_dim)
    copied = []
    for i, (layer, block) in enumerate(zip(model.layers, chosen, strict=True)):
        for name in _SHARED:
            if _copy(_child(layer, name), _child(block, name)):
                copied.append(f"layers.{i}.{name}")
        for name in ("q_norm", "k_norm"):
            ours, theirs = _child(layer, f"self_attn.{name}"), _child(block, f"self_attn.{name}")
            if not _copy(ours, theirs) and (i, name) in sizes:
                cast("Any", ours).weight.fill_(sizes[i, name])
                copied.append(f"layers.{i}.self_attn.{name} (size)")
    width = model.spec.hidden_size
    model.fc.weight[:, :-width].mul_(0.1)
    model.fc.weight[:, -width:].copy_(torch.eye(width))
    copied.append("fc (latest tap)")
    if _copy(model.hidden_norm, _child(chosen[0], "input_layernorm")):
        copied.append("hidden_norm")
    if _copy(model.norm, _child(compat.text_decoder(target), "norm")):
        copied.append("norm")
    logger.info("Started from the target: %s.", ", ".join(copied))
    return copied


@torch.no_grad()
def start_from_bigrams(
    model: BlockModel, texts: Iterable[Text], target_ids: torch.Tensor | None
) -> None:
    """Let the sequential head begin with which token follows which in the answers.

    W1 W2^T becomes the nearest product of the head's rank to the smoothed log frequencies, in the
    norm weighted by how often both tokens occur. The final norm is turned down, so that the
    backbone's first, wrong scores do not drown it. Does nothing for heads that are not linear.

    Args:
        model: Initialised drafter.
        texts: To count in.
        target_ids: The target's ids of the draft vocabulary, ascending; None for all.
    """
    head = model.markov_head
    if head is None or head.kind == "rnn":
        return
    size, rank = model.spec.draft_vocab_size, model.spec.markov_rank
    draft_ids = torch.arange(model.spec.vocab_size)
    if target_ids is not None:
        draft_ids = torch.full_like(draft_ids, -1)
        draft_ids[target_ids] = torch.arange(size)
    pairs = [torch.tensor(text.ids[max(text.start - 1, 0) :]).unfold(0, 2, 1) for text in texts]
    before, after = torch.cat(pairs).unbind(dim=1)
    after = draft_ids[after]
    before, after = before[after >= 0], after[after >= 0]
    common = torch.bincount(before, minlength=model.spec.vocab_size)
    num_rows = min(MOST_BIGRAM_ENTRIES // size, MOST_BIGRAM_ROWS, int((common > 0).sum()))
    rows = common.topk(num_rows).indices
    places = torch.full_like(common, -1)
    places[rows] = torch.arange(num_rows)
    known = places[before] >= 0
    counts = torch.zeros(num_rows, size)
    counts.index_put_((places[before[known]], after[known]), torch.ones(1), accumulate=True)
    share = torch.bincount(after, minlength=size).float() + 0.5
    share /= share.sum()
    total = counts.sum(dim=1, keepdim=True)
    logs = ((counts + UNIGRAM_TOKENS * share) / (total + UNIGRAM_TOKENS)).log()
    # The last row stands for all tokens not counted: what follows any token.
    logs = torch.cat([logs, share.log()[None]])
    logs -= (logs * share).sum(dim=1, keepdim=True)
    by_row = torch.cat([total, total.new_ones(1, 1)]).clamp_min(1.0).sqrt()
    by_column = share.sqrt()
    rank = min(rank, *logs.shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        left, sizes, right = torch.svd_lowrank(by_row * logs * by_column, q=rank, niter=4)
    first, second = left * sizes / by_row, right / by_column[:, None]
    balance = (first.square().mean() / second.square().mean()) ** 0.25
    first, second = first / balance, second * balance
    gain = 2.0 if head.kind == "gated" else 1.0
    head.markov_w1.weight[:, :rank] = gain * first[-1]
    head.markov_w1.weight[rows, :rank] = gain * first[:-1]
    head.markov_w2.weight[:, :rank] = second
    if model.norm.weight is not None:
        model.norm.weight.mul_(QUIET)


def _child(module: nn.Module | None, path: str) -> nn.Module | None:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _copy(ours: nn.Module | None, theirs: nn.Module | None) -> bool:
    mine, other = getattr(ours, "weight", None), getattr(theirs, "weight", None)
    if mine is None or other is None or mine.shape != other.shape:
        return False
    mine.copy_(other)
    return True


def _head_sizes(
    target: PreTrainedModel, blocks: Sequence[nn.Module], sample: torch.Tensor, head_dim: int
) -> dict[tuple[int, str], float]:
    """Return the root mean square of queries and keys per block on the sample."""
    sizes: dict[tuple[int, str], float] = {}
    handles = []
    for i, block in enumerate(blocks):
        for name, norm in (("q_proj", "q_norm"), ("k_proj", "k_norm")):
            projection = _child(block, f"self_attn.{name}")
            if projection is not None:

                def hook(
                    _m: nn.Module, _a: Any, out: torch.Tensor, key: tuple[int, str] = (i, norm)
                ) -> None:
                    heads = out.float().unflatten(-1, (-1, head_dim))
                    sizes[key] = float(heads.square().mean(dim=-1).sqrt().mean())

                handles.append(projection.register_forward_hook(hook))
    try:
        target(input_ids=sample.to(compat.input_device(target)), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return sizes
