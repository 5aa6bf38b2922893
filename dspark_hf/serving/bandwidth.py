"""Bytes that a target's forward must read, and how quickly this machine moves bytes."""

from __future__ import annotations

from collections import Counter
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from dspark_hf import compat
from dspark_hf.serving.memory import kv_token_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedModel

COPY_BYTES = 128 * 2**20
"""Size of the copied block: larger than what caches hold."""
COPY_REPEATS = 5
"""Copies, of which the quickest counts: whatever else runs only makes one slower."""


class ForwardBytes:
    """What one forward reads: the weights once, and every row's cached keys and values once.

    A lower bound of what moves: activations, new keys and masks are not counted. Of an embedding
    that is not the output matrix too, only the fed tokens' rows are read; they are not counted.
    Upper bounds where less is read: all experts of a mixture, and rows that read sparsely.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Look at a model's weights and layers.

        Args:
            model: The target.
        """
        self.weights = weight_bytes(model)
        num_layers = int(compat.text_config(model).num_hidden_layers)
        windows = compat.sliding_windows(model) or [None] * num_layers
        self._windows = Counter(windows)
        self._layer_bytes = kv_token_bytes(model) / num_layers

    def of(self, contexts: Iterable[int]) -> int:
        """Return the bytes of a forward over rows with so many cached tokens each."""
        tokens = sum(
            num_layers * (context if window is None else min(context, window))
            for context in contexts
            for window, num_layers in self._windows.items()
        )
        return self.weights + int(tokens * self._layer_bytes)


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of a model's weights, shared ones once, without an untied embedding."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    skipped = set() if is_tied else {id(embedding.weight)}
    return sum(
        weight.numel() * weight.element_size()
        for weight in model.parameters()
        if id(weight) not in skipped
    )


def copy_bandwidth(device: torch.device) -> float:
    """Measure the bytes per second, read and written, of copying memory on a device.

    Args:
        device: Where the target's weights are.

    Cost: about 0.2 s and twice COPY_BYTES of memory.
    """
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    copy = torch.zeros_like(source)
    best = float("inf")
    for _ in range(COPY_REPEATS):
        _wait_for(device)
        begin = perf_counter()
        copy.copy_(source)
        _wait_for(device)
        best = min(best, perf_counter() - begin)
    return 2 * COPY_BYTES / best


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
