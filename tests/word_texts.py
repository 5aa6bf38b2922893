"""Texts of numbered words, and tokenizers of them that differ in what they do about BOS."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = 40
BOS = 1


def word_tokenizer(kind: str = "automatic", num_words: int = WORDS) -> PreTrainedTokenizerFast:
    """Words w00, w01, ... as tokens; with an automatic BOS, one on request, or none."""
    vocab = {f"w{i:02d}": i for i in range(num_words)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="w00"))  # noqa: S106 - text
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if kind == "automatic":
        backend.post_processor = processors.TemplateProcessing(
            single="w01 $A", special_tokens=[("w01", BOS)]
        )
    bos = {} if kind == "without" else {"bos_token": "w01"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w00", **bos)  # noqa: S106


def words(length: int, seed: int = 0, most: int = WORDS) -> list[int]:
    """Return random ids that are neither padding nor BOS."""
    stream = torch.Generator().manual_seed(seed)
    return torch.randint(2, most, (length,), generator=stream).tolist()


def text_of(ids: Sequence[int]) -> str:
    """Return the text whose words have these ids."""
    return " ".join(f"w{i:02d}" for i in ids)
