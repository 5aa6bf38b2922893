"""What the integration tests share: wrap for a while, run, count forwards, a toy tokenizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from drafters import NoisyDrafter, RaggedDrafter, RandomDrafter, RightDrafter, WrongDrafter
from dspark_hf import DSparkConfig, DSparkForCausalLM
from tiny import VOCAB, plain_generate

CONFIG = DSparkConfig(schedule="fixed", max_draft_tokens=5, never_slower=False)
"""Drafts every round, so that a test cannot pass by never drafting."""

Prompts = Sequence[Sequence[int]]


@contextmanager
def wrapped(
    model: PreTrainedModel, drafter: Any = "lookup", config: DSparkConfig = CONFIG
) -> Iterator[PreTrainedModel]:
    """Wrap a model for a while."""
    DSparkForCausalLM.wrap(model, drafter=drafter, config=config)
    try:
        yield model
    finally:
        DSparkForCausalLM.unwrap(model)


def noisy_copy(model: PreTrainedModel, scale: float = 0.1, seed: int = 0) -> PreTrainedModel:
    """Copy a plain model and disturb its matrices, so that blocks are accepted in part.

    Args:
        model: A model that is not wrapped.
        scale: Noise relative to each matrix's own spread.
        seed: Seed of the noise.

    Returns:
        PreTrainedModel: The disturbed copy.
    """
    noisy = copy.deepcopy(model)
    stream = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in noisy.parameters():
            if weight.ndim > 1:
                weight += torch.randn(weight.shape, generator=stream) * weight.std() * scale
    return noisy


MakeDrafter = Callable[[PreTrainedModel, RightDrafter], Any]
DRAFTERS: dict[str, MakeDrafter] = {
    "lookup": lambda model, right: "lookup",
    "itself": lambda model, right: model,
    "noisy_copy": lambda model, right: noisy_copy(model),
    "right": lambda model, right: right,
    "wrong": lambda model, right: WrongDrafter(right, VOCAB),
    "noisy": lambda model, right: NoisyDrafter(right, VOCAB),
    "random": lambda model, right: RandomDrafter(VOCAB),
    "ragged": lambda model, right: RaggedDrafter(NoisyDrafter(right, VOCAB, every=4)),
}
"""Every kind of drafter: from the rows' own text, models, and those that know the answer."""


def oracle_of(sequences: torch.Tensor, prompts: Prompts) -> RightDrafter:
    """Return a drafter that knows the given continuations of left-padded prompts."""
    longest = max(map(len, prompts), default=0)
    rows = sequences.tolist()
    return RightDrafter(
        {tuple(ids): row[longest - len(ids) :] for ids, row in zip(prompts, rows, strict=True)}
    )


KNOWS_NOTHING = RightDrafter({})
"""For drafters that need no oracle."""


def generate(model: PreTrainedModel, prompts: Prompts, **kwargs: Any) -> Any:
    """Call `generate()` with left padding, greedily unless told otherwise, for a dict."""
    return plain_generate(model, prompts, **{"return_dict_in_generate": True, **kwargs})


def paths(out: Any) -> set[str]:
    """Return the loops that decoded the rows of an output."""
    return {record.path for record in out.speculation}


def drafts_were_verified(out: Any) -> bool:
    """Tell whether rows decoded here had drafts verified, in every row with a round to do so."""
    return all(record.verified > 0 for record in out.speculation if record.rounds > 1)


@contextmanager
def counted_forwards(model: PreTrainedModel) -> Iterator[list[int]]:
    """Record the number of tokens of every forward of a model."""
    seen: list[int] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        seen.append(0 if ids is None else int(ids.shape[-1]))

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


LETTERS = "abcdefghijklm"
"""Two of them make a token; thirteen give 169 pairs, enough for VOCAB."""


def toy_tokenizer(eos: int | None = None) -> PreTrainedTokenizerFast:
    """Build a tokenizer whose token 0 is padding and whose others are pairs of letters.

    Text of neighbouring tokens runs together, so a stop string may span two of them.

    Args:
        eos: Id of the end token, or None for none.

    Returns:
        PreTrainedTokenizerFast: Left padding, no token for the beginning of text.
    """
    pairs = [LETTERS[i // 13] + LETTERS[i % 13] for i in range(VOCAB)]
    pairs[0] = "<pad>"
    backend = Tokenizer(models.WordLevel({pair: i for i, pair in enumerate(pairs)}, unk_token="ab"))  # noqa: S106 - text
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(".."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",  # noqa: S106 - text, no secret
        eos_token=None if eos is None else pairs[eos],
        padding_side="left",
    )


@dataclass
class Recorder:
    """A streamer that keeps every piece, the prompt first, and whether it was ended."""

    pieces: list[list[int]] = field(default_factory=list)
    ended: int = 0

    def put(self, value: torch.Tensor) -> None:
        """Keep a piece."""
        self.pieces.append(value.flatten().tolist())

    def end(self) -> None:
        """Note the end."""
        self.ended += 1
