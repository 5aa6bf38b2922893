"""What a drafter learns from: the target's features and its likeliest next tokens, per text.

Computed when a batch is needed, in memory of one batch; optionally kept on disk, up to a size, for
later epochs and runs. The published pipeline stores every text's features first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - the field's own abbreviation
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dspark_hf import compat
from dspark_hf.drafting.block.taps import FeatureTaps
from dspark_hf.files import written_whole

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

    from dspark_hf.training.data import Text

ROWS_AT_ONCE = 512
"""Positions whose logits are sorted at once: their float32 copy is the largest tensor."""


@dataclass(frozen=True)
class Lesson:
    """One text as the target sees it.

    Attributes:
        features: Concatenated block outputs, of shape (L, m * d).
        top_ids: The K likeliest next ids at each position, int32 of shape (L, K); zeros before the
            first anchor.
        top_probs: Their probabilities at temperature 1, of shape (L, K).
    """

    features: torch.Tensor
    top_ids: torch.Tensor
    top_probs: torch.Tensor


class LessonSource:
    """Lessons of a list of texts, from disk where they are, from the target otherwise."""

    def __init__(
        self,
        target: PreTrainedModel,
        texts: Sequence[Text],
        layers: Sequence[int],
        *,
        top_k: int,
        folder: Path | None = None,
        most_bytes: int = 0,
    ) -> None:
        """Prepare.

        Args:
            target: Frozen.
            texts: All texts.
            layers: Tapped blocks.
            top_k: Probabilities kept per position.
            folder: Where lessons are kept; None keeps none. Name it after target and texts.
            most_bytes: Most disk it may take.
        """
        self.target, self.texts, self.top_k = target, texts, top_k
        self.taps = FeatureTaps(target, layers)
        self.folder, self.most_bytes = folder, most_bytes
        self.used_bytes = 0
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.used_bytes = sum(f.stat().st_size for f in folder.glob("*.safetensors"))

    def get(self, indices: Sequence[int]) -> list[Lesson]:
        """Return the lessons of some texts, in order."""
        found = {i: lesson for i in indices if (lesson := self._read(i)) is not None}
        missing = [i for i in indices if i not in found]
        if missing:
            for i, computed in zip(missing, self._compute(missing), strict=True):
                found[i] = computed
                self._keep(i, computed)
        return [found[i] for i in indices]

    @torch.no_grad()
    def _compute(self, indices: Sequence[int]) -> list[Lesson]:
        texts = [self.texts[i].ids for i in indices]
        width = max(len(ids) for ids in texts)
        # Padded on the right and causal: no token sees the padding, so no mask is needed.
        padded = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in texts])
        device = compat.input_device(self.target)
        with self.taps.catching() as taps:
            logits = self.target(input_ids=padded.to(device), use_cache=False).logits
            features = taps.features()
        result = []
        for row, (index, ids) in enumerate(zip(indices, texts, strict=True)):
            # Nothing is learned from the positions before the first anchor.
            first = min(self.texts[index].start, len(ids) - 1)
            top_ids, top_probs = self._top(logits[row, first : len(ids)])
            top_ids, top_probs = (F.pad(t, (0, 0, first, 0)) for t in (top_ids, top_probs))
            result.append(
                Lesson(features[row, : len(ids)].cpu().bfloat16().clone(), top_ids, top_probs)
            )
        return result

    def _top(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, probs = [], []
        for chunk in logits.split(ROWS_AT_ONCE):
            scores = chunk.float()
            best, places = scores.topk(self.top_k, dim=-1)
            probs.append((best - scores.logsumexp(dim=-1, keepdim=True)).exp().half().cpu())
            ids.append(places.int().cpu())
        return torch.cat(ids), torch.cat(probs)

    def _path(self, index: int) -> Path | None:
        return None if self.folder is None else self.folder / f"{index}.safetensors"

    def _read(self, index: int) -> Lesson | None:
        path = self._path(index)
        if path is None or not path.is_file():
            return None
        try:
            return Lesson(**load_file(path))
        except (SafetensorError, TypeError):
            # Half a file of a run that was killed: it is computed again.
            path.unlink()
            return None

    def _keep(self, index: int, lesson: Lesson) -> None:
        path = self._path(index)
        if path is None or self.used_bytes >= self.most_bytes:
            return
        # Processes of one run may share the folder: none reads what another is writing.
        with written_whole(path, is_shared=True) as partial:
            save_file(vars(lesson), partial)
        self.used_bytes += path.stat().st_size
