"""A tiny target and a block drafter taught its texts, on disk, for the commands that evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import tiny
from block_drafters import block_drafter
from dspark_hf.benchmarks.prompts import encode
from dspark_hf.data import load_prompts
from dspark_hf.drafting.checkpoints.base import BlockCheckpoint
from dspark_hf.drafting.checkpoints.save import save_checkpoint


def save_target(folder: Path) -> Any:
    """Write a tiny Llama and a tokenizer of whole words; return both."""
    words = Tokenizer(models.WordLevel(unk_token="?"))  # noqa: S106 - a token of text
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(vocab_size=tiny.VOCAB, special_tokens=["_", "?"])
    words.train_from_iterator([prompt.text for prompt in load_prompts()], trainer)
    special = {"pad_token": "_", "unk_token": "?"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    tokenizer.save_pretrained(folder)
    model = tiny.llama(max_position_embeddings=512)
    model.save_pretrained(folder)
    return model, tokenizer


def save_drafter(model: Any, tokenizer: Any, folder: Path, head: str = "vanilla") -> Path:
    """Write a block drafter that knows how the target answers some of the shipped prompts."""
    texts = []
    if head != "none":
        for prompt in load_prompts()[::3]:
            ids = encode(tokenizer, prompt.text)["input_ids"][0].tolist()
            texts.append(tiny.plain_generate(model, [ids], max_new_tokens=20)[0].tolist())
    drafter = block_drafter(model, head, texts=texts)
    checkpoint = BlockCheckpoint(
        spec=drafter.model.spec, tensors=drafter.model.state_dict(), kind="speculators-dspark"
    )
    return save_checkpoint(
        checkpoint, folder, layout="speculators", include_embed=False, include_head=False
    )
