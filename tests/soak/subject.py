"""What is soaked: a model under a queue, and the same weights beside it for runs alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny
from block_drafters import block_drafter
from dspark_hf import DSparkForCausalLM
from dspark_hf.data import load_prompts
from dspark_hf.demo_model import HUB_ID, prepare_smollm2
from queues import FIXED
from served import TOKENIZER
from soak.faults import MisledDrafter, misled
from soak.knowing import KnowingDrafter
from tiny import plain_generate, prompt

NUM_TAUGHT = 6
"""Texts that the tiny drafter has seen: its drafts are partly right."""


@dataclass
class Subject:
    """A model and all that is needed to ask it.

    Attributes:
        name: For tables.
        model: Wrapped; a queue decodes on it.
        drafter: The model's, which can be misled.
        plain: The same weights unwrapped: generate() is Transformers' own.
        twin: The same weights wrapped apart, without a drafter.
        tokenizer: Of the model.
        words: Token ids of a length, drawn by a seed.
    """

    name: str
    model: Any
    drafter: MisledDrafter
    plain: Any
    twin: Any
    tokenizer: Any
    words: Callable[[int, int], list[int]]

    def learn(self, texts: Sequence[list[int]]) -> None:
        """Let a drafter that can know texts know these."""
        if isinstance(self.drafter.inner, KnowingDrafter):
            self.drafter.inner.learn(texts)


def subject_of(source: str | None) -> Subject:
    """Load what is soaked, in float32.

    Args:
        source: Path or hub id of a checkpoint with its tokenizer; None for a tiny random Llama
            under a tiny block drafter.
    """
    if source is None:
        model, tokenizer, name, words = tiny.llama(), TOKENIZER, "tiny random Llama", prompt
        texts = [plain_generate(model, [words(9, n)], max_new_tokens=30) for n in range(NUM_TAUGHT)]
        block = block_drafter(model, texts=[text[0].tolist() for text in texts])
        drafter: Any = KnowingDrafter(block, tiny.VOCAB)
    else:
        model, tokenizer, name = _loaded(source)
        words, drafter = _words_of(tokenizer), "auto"
    plain, twin = _sharing_weights(model), _sharing_weights(model)
    DSparkForCausalLM.wrap(twin, drafter=None, config=FIXED)
    DSparkForCausalLM.wrap(model, drafter=drafter, config=FIXED)
    model.dspark.drafter = misled(model.dspark.drafter)
    return Subject(name, model, model.dspark.drafter, plain, twin, tokenizer, words)


def _loaded(source: str) -> tuple[Any, Any, str]:
    path = str(prepare_smollm2()) if source == HUB_ID else source
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    name = Path(path).resolve().name if Path(path).exists() and source != HUB_ID else source
    return model, AutoTokenizer.from_pretrained(path), name


def _words_of(tokenizer: Any) -> Callable[[int, int], list[int]]:
    """Return pieces of the shipped prompts, as they are written."""
    ids: list[int] = []
    for text in load_prompts():
        ids += tokenizer(text.text, add_special_tokens=False)["input_ids"]

    def words(length: int, seed: int = 0) -> list[int]:
        start = random_start(seed, len(ids) - length)
        return ids[start : start + length]

    return words


def random_start(seed: int, most: int) -> int:
    """Draw a number from 0 to most."""
    stream = torch.Generator().manual_seed(seed)
    return int(torch.randint(most + 1, (), generator=stream))


def _sharing_weights(model: Any) -> Any:
    """Copy a model; its parameters are those of the original."""
    return copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
