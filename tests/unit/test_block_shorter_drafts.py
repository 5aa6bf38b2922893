"""Drafts shorter than a block are its first tokens, and leave out what only others need."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from block_drafters import FULL, SLIDING, block_drafter, features_of, greedy_request
from dspark_hf.drafting.block.drafter import BlockDrafter
from dspark_hf.values import Proposal
from tiny import llama, prompt

LENGTHS = (4, 9, 21)
"""Committed tokens of the rows: unlike ones, so that their blocks need masks."""

KINDS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "mask-filling": {"head": "rnn", "reads_anchor": False, "block_size": 6},
    "no-sequential-head": {"head": "none"},
    "window-at-the-end": {
        "layer_types": (FULL, SLIDING), "sliding_window": 6, "sliding_is_causal": True,
    },
    "window-both-ways": {
        "layer_types": (SLIDING, SLIDING), "sliding_window": 6, "sliding_is_causal": False,
    },
    "one-layer": {"layer_types": (FULL,)},
    "gemma4": {"flavour": "gemma4"},
}  # fmt: skip


def drafts(drafter: BlockDrafter, asked: list[int]) -> list[Proposal]:
    """Draft once for fresh rows, and forget them."""
    texts = [prompt(length, seed=length) for length in LENGTHS]
    for r, ids in enumerate(texts):
        drafter.take(r, 0, features_of(drafter.target, ids[:-1], drafter.model.spec))
    requests = [
        greedy_request(r, ids, most) for r, (ids, most) in enumerate(zip(texts, asked, strict=True))
    ]
    found = drafter.propose(requests)
    for r in range(len(texts)):
        drafter.free(r)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_shorter_draft_is_the_first_part_of_the_block(kind: str) -> None:
    drafter = block_drafter(llama(), **KINDS[kind])
    size = drafter.block_size
    whole = drafts(drafter, [size] * len(LENGTHS))
    assert [len(draft.ids) for draft in whole] == [size] * len(LENGTHS)
    for asked in ([1, 1, 1], [2, 1, 2], [3, 3, 3], [1, size, 2]):
        for full, part, count in zip(whole, drafts(drafter, asked), asked, strict=True):
            assert list(part.ids) == list(full.ids)[:count]
            assert part.confidence == pytest.approx(full.confidence[:count], abs=1e-5)


@pytest.mark.parametrize(("kind", "read"), [("vanilla", 2), ("mask-filling", 3)])
def test_the_last_layer_maps_only_what_is_read(kind: str, read: int) -> None:
    drafter = block_drafter(llama(), **KINDS[kind])
    seen: list[int] = []

    def note(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        seen.append(inputs[0].shape[1])

    for layer in drafter.model.layers:
        layer.mlp.register_forward_pre_hook(note)
    drafts(drafter, [2, 1, 2])
    assert seen == [len(LENGTHS) * drafter.model.spec.block_size, len(LENGTHS) * read]
