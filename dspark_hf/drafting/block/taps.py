"""FeatureTaps: the outputs of a target's blocks, caught by hooks while it runs.

Raw block outputs, before any final norm: Transformers' own last hidden state is normed, and ids
counted from the embedding are one off. Here id i is the output of block i; -1 enters block 0.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dspark_hf import compat
from dspark_hf.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedModel


def decoder_blocks(model: PreTrainedModel) -> nn.ModuleList:
    """Return the target's blocks in order.

    Args:
        model: Any decoder.

    Raises:
        CheckpointError: If there is no list of modules as long as the configuration says.
    """
    num_layers = int(compat.text_config(model).num_hidden_layers)
    for module in compat.text_decoder(model).modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise CheckpointError(
        f"a block drafter needs the target's {num_layers} blocks as a list of modules; "
        f"{type(model).__name__} shows none. Use drafter='lookup' or a drafting model."
    )


class FeatureTaps:
    """Catches the features of a target's forwards."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        """Find the blocks.

        Args:
            model: The target.
            layers: Block ids, -1 for the embedding output.

        Raises:
            CheckpointError: If an id is out of range.
        """
        self.blocks = decoder_blocks(model)
        self.layers = tuple(layers)
        for layer in self.layers:
            if not -1 <= layer < len(self.blocks):
                raise CheckpointError(
                    f"target_layer_ids must lie between -1 and {len(self.blocks) - 1} for this "
                    f"target; got {layer}. Use a drafter made for this target."
                )
        self._caught: dict[int, torch.Tensor] = {}

    @contextmanager
    def catching(self) -> Iterator[FeatureTaps]:
        """Hook the blocks for the forwards inside the context."""
        self._caught.clear()
        handles = []
        try:
            for layer in set(self.layers):
                block = self.blocks[max(layer, 0)]
                if layer < 0:
                    handles.append(
                        block.register_forward_pre_hook(self._input_hook, with_kwargs=True)
                    )
                else:
                    handles.append(block.register_forward_hook(self._output_hook(layer)))
            yield self
        finally:
            for handle in handles:
                handle.remove()
            self._caught.clear()

    def features(self) -> torch.Tensor:
        """Return the latest forward's features, concatenated in order: (B, T, m * d)."""
        first = self._caught[self.layers[0]]
        return torch.cat([self._caught[i].to(first.device) for i in self.layers], dim=-1)

    def _input_hook(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self._caught[-1] = (args[0] if args else kwargs["hidden_states"]).detach()

    def _output_hook(self, layer: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            state = output[0] if isinstance(output, tuple) else output
            self._caught[layer] = state.detach()

        return hook
