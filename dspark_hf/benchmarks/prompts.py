"""What contenders decode: shipped prompts alone and in batches, and contexts of a given length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dspark_hf.benchmarks.contest import Item
from dspark_hf.data import GROUPS, load_prompts

if TYPE_CHECKING:
    from collections.abc import Sequence

PER_GROUP_IN_BATCH = 2
WARM_UP_TEXT = (
    "Repeat this list and add two entries: apples, pears, plums, cherries, apples, pears, plums."
)
"""Not one of the prompts; repetitive, so that drafting starts during the warm-up."""


def encode(tokenizer: Any, text: str) -> dict[str, torch.Tensor]:
    """Encode what a user says, in the chat template if the tokenizer has one.

    Args:
        tokenizer: The target's.
        text: The user's words.

    Returns:
        dict[str, torch.Tensor]: `input_ids` and `attention_mask`, int64 of shape (1, length).
    """
    if getattr(tokenizer, "chat_template", None):
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
    else:
        encoded = tokenizer(text, return_tensors="pt")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def prompt_items(tokenizer: Any, max_new_tokens: int, limit: int | None) -> list[Item]:
    """Return the shipped prompts, one an item.

    Args:
        tokenizer: The target's.
        max_new_tokens: Tokens generated at most.
        limit: Prompts per group at most; None for all.

    Returns:
        list[Item]: In file order, grouped as shipped.
    """
    return [
        Item(prompt.id, group, encode(tokenizer, prompt.text), max_new_tokens)
        for group in GROUPS
        for prompt in load_prompts(group)[:limit]
    ]


def alternating(items: Sequence[Item], count: int) -> list[Item]:
    """Take items from each group in turn: the first of every group, then the second, and so on.

    Args:
        items: Of one or several groups.
        count: Items to take at most.

    Returns:
        list[Item]: No more than `count` items, groups as even as they can be.
    """
    by_group: dict[str, list[Item]] = {}
    for item in items:
        by_group.setdefault(item.group, []).append(item)
    turns = range(max((len(group) for group in by_group.values()), default=0))
    mixed = [group[turn] for turn in turns for group in by_group.values() if turn < len(group)]
    return mixed[:count]


def batch_item(
    items: Sequence[Item], pad_id: int, max_new_tokens: int, per_group: int = PER_GROUP_IN_BATCH
) -> Item:
    """Join the first prompts of every group to one left-padded batch.

    Args:
        items: Prompts, one an item.
        pad_id: The padding id.
        max_new_tokens: Tokens generated per row at most.
        per_group: Prompts of each group.

    Returns:
        Item: Its rows are of unlike length, in file order, none chosen by length.
    """
    taken: dict[str, list[torch.Tensor]] = {}
    for item in items:
        group = taken.setdefault(item.group, [])
        if len(group) < per_group:
            group.append(item.inputs["input_ids"][0])
    rows = [row for group in taken.values() for row in group]
    name = f"batch of {len(rows)}"
    return Item(name, name, stacked(rows, pad_id), max_new_tokens)


def stacked(rows: Sequence[torch.Tensor], pad_id: int) -> dict[str, torch.Tensor]:
    """Join prompts to one left-padded batch.

    Args:
        rows: Ids of each, int64 of shape (length,).
        pad_id: The padding id.

    Returns:
        dict[str, torch.Tensor]: `input_ids` and `attention_mask` of shape (B, longest).
    """
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), pad_id)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, longest - len(row) :] = row
        mask[index, longest - len(row) :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def context_items(
    tokenizer: Any, contexts: Sequence[int], num_decoded: int, limit: int | None
) -> list[Item]:
    """Return prompts of given lengths: the shipped prompts' text, as often as it takes.

    Args:
        tokenizer: The target's.
        contexts: Lengths in tokens.
        num_decoded: Tokens decoded behind the first new one.
        limit: Positions of the model, None without a limit; longer contexts are cut to fit.

    Returns:
        list[Item]: One per length, equal lengths only once.
    """
    text = "\n\n".join(prompt.text for prompt in load_prompts())
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"][0]
    room = None if limit is None else limit - num_decoded - 1
    lengths = dict.fromkeys(min(n, room) if room is not None else n for n in contexts)
    items = []
    for length in lengths:
        tokens = ids.repeat(-(-length // len(ids)))[None, :length]
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        name = f"context {length}"
        items.append(Item(name, name, inputs, num_decoded + 1))
    return items
