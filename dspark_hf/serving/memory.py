"""How much memory keys and values take, and how much they may take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dspark_hf import compat
from dspark_hf.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "alloc_failed")
"""What devices say in a plain RuntimeError when there is none left."""
HEADROOM_TOKENS = 64
"""New tokens that a row is given room for when it is admitted; more is found when it needs it."""


def kv_token_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of keys and values of one token, over all layers.

    Args:
        model: The target; its configuration says the shapes.
    """
    config = compat.text_config(model)
    heads = int(getattr(config, "num_attention_heads", None) or 0)
    if not heads:
        # No attention, so no keys; some bytes, as counts are divided by them.
        return 1
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    size = torch.finfo(model.dtype).bits // 8
    return 2 * int(config.num_hidden_layers) * kv_heads * dim * size


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether an error says that there was no memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    told = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in told for sign in OUT_OF_MEMORY)


def refusal(error: Exception) -> CapacityError:
    """Return what a request fails with that runs out of memory alone."""
    refused = CapacityError(
        f"one request alone runs out of memory: {error}. Shorten it, or use a larger device."
    )
    refused.__cause__ = error
    return refused


def free_bytes(device: torch.device) -> int:
    """Return the memory that is free on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil  # type: ignore[import-untyped]

    return int(psutil.virtual_memory().available)


def in_bytes(size: float, device: torch.device) -> int:
    """Return a setting in bytes: it is bytes above 1, else a share of what is free there."""
    return int(size) if size > 1 else int(size * free_bytes(device))


class KvBudget:
    """Tokens of keys and values that fit.

    Slots are as long as the longest row, so what counts is rows times longest row.
    """

    def __init__(self, model: PreTrainedModel, budget: float) -> None:
        """Turn a setting into tokens.

        Args:
            model: The target.
            budget: Bytes above 1, else a share of the free memory.
        """
        self.token_bytes = kv_token_bytes(model)
        self.num_bytes = in_bytes(budget, compat.input_device(model))
        self.num_tokens = self.num_bytes // self.token_bytes

    def fits(self, lengths: Sequence[int]) -> bool:
        """Tell whether rows of these lengths fit together, in tokens."""
        return len(lengths) * max(lengths, default=0) <= self.num_tokens
