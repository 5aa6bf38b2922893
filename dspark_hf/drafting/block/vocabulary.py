"""Vocabulary: a drafter's embedding and output head, its own or borrowed from the target.

What is borrowed is looked up where the target keeps it at each use, so that tying, resizing and
reloading the target need no second thought.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's own abbreviation
from accelerate.utils import align_module_device

from dspark_hf.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dspark_hf.drafting.block.spec import BlockSpec


class Vocabulary:
    """Embeds ids, scores hidden states over the draft vocabulary, and names its ids."""

    def __init__(
        self,
        spec: BlockSpec,
        target: PreTrainedModel,
        *,
        embed: torch.Tensor | None = None,
        head: torch.Tensor | None = None,
        d2t: torch.Tensor | None = None,
    ) -> None:
        """Decide by what the checkpoint holds.

        Args:
            spec: Of the drafter.
            target: Lends what is missing.
            embed: Own embedding of shape (V, d), or None to borrow.
            head: Own head of shape (V_draft, d), or None to borrow.
            d2t: Offsets of a pruned vocabulary, int64 of shape (V_draft,).

        Raises:
            CheckpointError: If the vocabulary is pruned without offsets, or the target's tables
                do not fit.
        """
        if spec.is_pruned and d2t is None:
            raise CheckpointError(
                f"d2t must map the {spec.draft_vocab_size} draft ids to the target's "
                f"{spec.vocab_size}; got none. Use a complete checkpoint."
            )
        self.spec, self.target = spec, target
        self.own_embed, self.own_head = embed, head
        self.target_ids: torch.Tensor | None = None
        if spec.is_pruned and d2t is not None:
            self.target_ids = torch.arange(len(d2t)) + d2t.cpu()
        self._loaded: dict[str, torch.Tensor] = {}
        self._rows: torch.Tensor | None = None
        self._rows_of: tuple[Any, ...] | None = None
        self.embedding(), self.head()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the rows taken from the target: a copy takes its own target's."""
        return {**vars(self), "_rows": None, "_rows_of": None}

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move what is the drafter's own."""
        self.own_embed = _moved(self.own_embed, device, dtype)
        self.own_head = _moved(self.own_head, device, dtype)

    def embedding(self) -> torch.Tensor:
        """Return the embedding in use, of shape (at least V, d)."""
        if self.own_embed is not None:
            return self.own_embed
        return self._fitting("embedding", self.target.get_input_embeddings())

    def embed(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the embeddings (..., d) of ids (...)."""
        states = F.embedding(ids, self.embedding()).to(dtype)
        if self.spec.scales_embedding:
            states = states * torch.tensor(self.spec.hidden_size**0.5, dtype=dtype)
        return states

    def head(self) -> torch.Tensor:
        """Return the output head in use, of shape (V_draft, d)."""
        if self.own_head is not None:
            return self.own_head
        weight = self._fitting("output head", self.target.get_output_embeddings())
        if self.target_ids is None:
            return weight[: self.spec.draft_vocab_size]
        version = weight._version if not weight.is_inference() else 0  # noqa: SLF001
        # The parameter is held: neither its id nor its memory can come back as another's.
        key = (weight, weight.data_ptr(), version)
        held = self._rows_of
        if self._rows is None or held is None or held[0] is not weight or held[1:] != key[1:]:
            self._rows = weight.detach()[self.target_ids.to(weight.device)]
            self._rows_of = key
        return self._rows

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return base logits (..., V_draft) of hidden states (..., d)."""
        head = self.head()
        logits = F.linear(hidden.to(head.device), head).to(hidden.device)
        cap = self.spec.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def to_target(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the target's ids of draft ids."""
        return ids if self.target_ids is None else self.target_ids.to(ids.device)[ids]

    def scatter(self, probs: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Spread draft probabilities (T, V_draft) over the target's ids (T, vocab_size)."""
        if self.target_ids is None:
            missing = vocab_size - probs.shape[-1]
            return F.pad(probs, (0, missing)) if missing > 0 else probs
        full = probs.new_zeros(probs.shape[0], vocab_size)
        full[:, self.target_ids.to(probs.device)] = probs
        return full

    def _fitting(self, name: str, module: Any) -> torch.Tensor:
        weight = cast("torch.Tensor | None", getattr(module, "weight", None))
        if weight is None:
            raise CheckpointError(
                f"the drafter borrows the target's {name}; {type(self.target).__name__} shows "
                "none. Use a checkpoint that brings its own."
            )
        rows, width = weight.shape
        if rows < self.spec.vocab_size or width != self.spec.hidden_size:
            raise CheckpointError(
                f"the target's {name} must have at least {self.spec.vocab_size} rows of "
                f"{self.spec.hidden_size} for this drafter; got {rows} of {width}. Use a drafter "
                "made for this target."
            )
        return self._load(name, module) if weight.is_meta else weight

    def _load(self, name: str, module: Any) -> torch.Tensor:
        """Return a copy of an offloaded weight, which has no values where it stands; kept."""
        if name not in self._loaded:
            self._loaded[name] = loaded_weight(module)
        return self._loaded[name]


def loaded_weight(module: Any) -> torch.Tensor:
    """Return a module's weight, or a copy of its values on the CPU where it is offloaded."""
    weight = cast("torch.Tensor", module.weight)
    if not weight.is_meta:
        return weight
    with align_module_device(module, execution_device=torch.device("cpu")):
        return cast("torch.Tensor", module.weight).detach().clone()


def _moved(
    tensor: torch.Tensor | None, device: torch.device, dtype: torch.dtype
) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device, dtype)
