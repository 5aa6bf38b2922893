"""Tiny targets, texts and runs for the tests of training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import tiny
from dspark_hf.training.data import Text
from dspark_hf.training.run import RunInputs, RunResult, train
from dspark_hf.training.settings import DrafterShape, TrainSettings

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
VOCAB = 258
SHAPE = DrafterShape(num_layers=1, block_size=4, markov_rank=8)
QUICK: dict[str, Any] = {
    "steps": 4, "batch_size": 2, "anchors": 8, "warmup_steps": 2, "validate_every": 2,
    "save_every": 1, "top_k": 8, "validation_share": 0.2, "learning_rate": 3e-3,
}  # fmt: skip


def byte_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per byte, a padding token before them and an end token behind."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<pad>", *alphabet, "<eos>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",  # noqa: S106 - a token of text
        eos_token="<eos>",  # noqa: S106 - as above
        chat_template=template,
    )


def byte_llama(**overrides: Any) -> PreTrainedModel:
    """A Llama over the byte tokenizer's ids."""
    return tiny.llama(vocab_size=VOCAB, max_position_embeddings=4096, **overrides)


def save_target(folder: Path, template: str | None = TEMPLATE, **overrides: Any) -> str:
    """Save a tiny target with its tokenizer."""
    byte_llama(**overrides).save_pretrained(folder)
    byte_tokenizer(template).save_pretrained(folder)
    return str(folder)


def write_jsonl(path: Path, records: Sequence[Any]) -> Path:
    """Write one record a line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def greedy_texts(
    model: PreTrainedModel, count: int, length: int = 24, prompt: int = 4
) -> list[Text]:
    """Texts the model itself writes after random prompts of a few tokens."""
    prompts = [tiny.prompt(prompt, seed=i) for i in range(count)]
    out = tiny.plain_generate(model, prompts, max_new_tokens=length)
    return [Text(tuple(row), prompt) for row in out.tolist()]


def ragged_texts(count: int, seed: int = 0, longest: int = 20) -> list[Text]:
    """Random texts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, longest, (count,), generator=generator).tolist()
    return [Text(tuple(tiny.prompt(n, seed=seed + 7 * i)), 3) for i, n in enumerate(lengths)]


def text_file(path: Path, texts: Sequence[Text]) -> Path:
    """Write texts as their ids."""
    return write_jsonl(path, [{"ids": t.ids, "answer_start": t.start} for t in texts])


def quick_run(
    target: str, texts: Path, out: Path, shape: DrafterShape = SHAPE, **settings: Any
) -> RunResult:
    """Train a few steps in float32."""
    inputs = RunInputs(target, texts, out, target_dtype=torch.float32)
    return train(inputs, shape, TrainSettings(**{**QUICK, **settings}))
