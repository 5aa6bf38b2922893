"""LearnedPredictor: the softened bound plus, per layer, a small correction learned from a model.

    score(j, p) = scale * ([q_j ; alpha |q_j|] + q_j A_j B_g) . [middle_p ; half_p] + offset_j

A_j (D x rank) belongs to query head j, B_g (rank x 2 D) to its key head. As the correction is
linear in the summary, it is added to the query's side before the one product that scores all pages:
what it costs per step does not grow with the context. The offset changes no choice of pages; it
makes scores estimates of a page's attention, which `SparsePolicy.mass` asks for.

Source: as in predictors.py; a trained gate per key head as in SeerAttention (Gao et al.,
arXiv:2410.13276), here on top of a bound that needs no training.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from dspark_hf import compat
from dspark_hf.attention.pages import PAGE
from dspark_hf.attention.predictor_file import (
    SHAPE,
    PredictorFile,
    read_predictor,
    tensor_name,
    write_predictor,
)
from dspark_hf.attention.predictors import (
    BoundPredictor,
    RecentPredictor,
    page_products,
    softened,
)
from dspark_hf.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

    from dspark_hf.attention.predictors import Predictor

NAMED: Mapping[str, Predictor] = {
    "bound": BoundPredictor(),
    "quest": BoundPredictor(alpha=1.0),
    "recent": RecentPredictor(),
}
"""Predictors that need no training, by the name that commands take."""


@dataclass(frozen=True)
class AttentionShape:
    """What a model's attention looks like to a predictor.

    Attributes:
        num_layers: Layers of any kind.
        num_heads: Query heads of a layer.
        num_kv: Key heads of a layer.
        dim: Width of a head.
    """

    num_layers: int
    num_heads: int
    num_kv: int
    dim: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> AttentionShape:
        """Return a model's, from its configuration."""
        return cls(
            int(compat.text_config(model).num_hidden_layers), **compat.attention_shape(model)
        )

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv

    def __str__(self) -> str:
        """Name the numbers."""
        return (
            f"{self.num_layers} layers of {self.num_heads} query heads, {self.num_kv} key heads "
            f"and width {self.dim}"
        )


@dataclass(frozen=True, eq=False)
class PageGate:
    """The correction of one layer.

    Attributes:
        query: A, of shape (Hkv, G, D, rank).
        page: B, of shape (Hkv, rank, 2 D).
        offset: Added to each head's scores, of shape (Hkv, G).
    """

    query: torch.Tensor
    page: torch.Tensor
    offset: torch.Tensor

    @staticmethod
    def sizes(shape: AttentionShape, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor by name."""
        return {
            "query": (shape.num_kv, shape.group, shape.dim, rank),
            "page": (shape.num_kv, rank, 2 * shape.dim),
            "offset": (shape.num_kv, shape.group),
        }

    @classmethod
    def start(cls, shape: AttentionShape, rank: int, generator: torch.Generator) -> PageGate:
        """Return one that corrects nothing yet: A is random, all else 0."""
        sizes = cls.sizes(shape, rank)
        query = torch.randn(sizes["query"], generator=generator) * shape.dim**-0.5
        return cls(query, torch.zeros(sizes["page"]), torch.zeros(sizes["offset"]))

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name."""
        return {"query": self.query, "page": self.page, "offset": self.offset}

    def scores(
        self,
        query: torch.Tensor,  # [Hkv, R, D]
        summary: torch.Tensor,  # [Hkv, P, 2 D]
        alpha: float,
        scale: float,
    ) -> torch.Tensor:  # [Hkv, R, P]
        """Score as the Predictor protocol says, of one token or of several packed ones.

        Args:
            query: R = heads of a group x tokens.
            summary: As the Predictor protocol says.
            alpha: Of the bound.
            scale: Factor on dot products.

        Cost: over the bound's, two products of R rows per key head, D x rank and rank x 2 D, in
        float32: on a CPU these small ones are slower in 16 bits.
        """
        num_kv, group, dim, rank = self.query.shape
        rows = query.float().reshape(num_kv, -1, dim)
        low = torch.bmm(rows.view(num_kv * group, -1, dim), self.query.flatten(0, 1))
        weights = torch.baddbmm(softened(rows, alpha), low.view(num_kv, -1, rank), self.page)
        scores = page_products(weights.to(query.dtype), summary).float() * scale
        return (scores.view(num_kv, group, -1) + self.offset[..., None]).view_as(scores)

    def to(self, device: torch.device) -> PageGate:
        """Return it on a device, float32."""
        return PageGate(
            *(t.to(device, torch.float32) for t in (self.query, self.page, self.offset))
        )


@dataclass(frozen=True, eq=False)
class LearnedPredictor:
    """The softened bound, corrected in the layers that have a gate; in others the bound itself.

    Attributes:
        shape: Of the model it was trained for.
        rank: Of the corrections.
        gates: By layer.
        alpha: Of the bound.
    """

    packs_tokens: ClassVar[bool] = True
    shape: AttentionShape
    rank: int
    gates: Mapping[int, PageGate]
    alpha: float = 0.5
    _placed: dict[object, PageGate] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse gates that do not fit the shape, naming the tensor."""
        sizes = PageGate.sizes(self.shape, self.rank)
        for layer, gate in self.gates.items():
            if not 0 <= layer < self.shape.num_layers:
                raise CheckpointError(
                    f"gates must be of layers 0 to {self.shape.num_layers - 1}; got layer {layer}."
                )
            for name, tensor in gate.parameters().items():
                _check_tensor(tensor_name(layer, name), tensor, sizes[name])

    def scores(
        self, query: torch.Tensor, summary: torch.Tensor, layer: int, scale: float
    ) -> torch.Tensor:
        """Score as the Predictor protocol says."""
        gate = self.gates.get(layer)
        if gate is None:
            return BoundPredictor(self.alpha).scores(query, summary, layer, scale)
        place = (layer, query.device)
        if place not in self._placed:
            self._placed[place] = gate.to(query.device)
        return self._placed[place].scores(query, summary, self.alpha, scale)

    def require_fit(self, model: PreTrainedModel) -> None:
        """Refuse a model of another shape, as the TrainedPredictor protocol says.

        Args:
            model: The model whose pages are to be scored.

        Raises:
            CheckpointError: If its layers, heads or widths are others.
        """
        found = AttentionShape.of(model)
        if found != self.shape:
            raise CheckpointError(
                f"a learned predictor must be used with a model of the shape it was trained for, "
                f"{self.shape}; {type(model).__name__} has {found}. Train one for it: dspark-hf "
                "train predictor."
            )

    def save(self, path: str | Path) -> Path:
        """Write a safetensors file, whole or not at all.

        Args:
            path: The file to create or replace; its folder is made.

        Returns:
            Path: The file.
        """
        numbers = {**vars(self.shape), "rank": self.rank, "page_tokens": PAGE}
        parts = {layer: gate.parameters() for layer, gate in self.gates.items()}
        write_predictor(Path(path), PredictorFile(numbers, self.alpha, parts))
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> LearnedPredictor:
        """Read what `save` wrote.

        Args:
            path: The file.

        Raises:
            CheckpointError: If it is no such file, of another version, or a tensor is missing,
                unexpected, of another shape or not finite.
        """
        held = read_predictor(Path(path))
        shape = AttentionShape(*(held.numbers[name] for name in SHAPE))
        gates = {layer: PageGate(**parts) for layer, parts in held.parts.items()}
        return cls(shape, held.numbers["rank"], gates, held.alpha)


def load_predictor(name: str) -> Predictor:
    """Return the predictor that a name stands for, or a trained one from its file.

    Args:
        name: One of `NAMED`, or the path of a file that `LearnedPredictor.save` wrote.

    Raises:
        ConfigError: If it is neither.
        CheckpointError: If the file cannot be used.
    """
    if name in NAMED:
        return NAMED[name]
    if not Path(name).is_file():
        raise ConfigError(
            f"predictor must be one of {sorted(NAMED)} or the path of a trained one; got {name!r}."
        )
    return LearnedPredictor.load(name)


def _check_tensor(name: str, tensor: torch.Tensor, size: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != size or not tensor.is_floating_point():
        raise CheckpointError(
            f"a page predictor's tensor {name!r} must be floats of shape {size}; got "
            f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}. Train the "
            "predictor again."
        )
    if not torch.isfinite(tensor).all():
        raise CheckpointError(
            f"a page predictor's tensor {name!r} must be finite; got infinite or undefined values. "
            "Train the predictor again."
        )
