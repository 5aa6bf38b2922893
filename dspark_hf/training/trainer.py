"""Trainer: from texts and a frozen target to a drafter, resumable at any step.

Every random choice follows from the seed and the step, so a run that was killed and resumed ends in
the same weights as an unbroken one.
"""

from __future__ import annotations

import json
import logging
import math
import resource
import sys
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import torch
from tqdm.auto import tqdm

from dspark_hf.files import written_whole
from dspark_hf.training.data import batches
from dspark_hf.training.distill import distribution_distance
from dspark_hf.training.forcing import Batch, TeacherForcing, gather, predict
from dspark_hf.training.losses import BlockLoss, LossWeights, block_loss, expected_length

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from accelerate import Accelerator

    from dspark_hf.drafting.block.model import BlockModel
    from dspark_hf.drafting.block.vocabulary import Vocabulary
    from dspark_hf.training.data import Text
    from dspark_hf.training.distill import Teacher
    from dspark_hf.training.features import LessonSource
    from dspark_hf.training.settings import TrainSettings

logger = logging.getLogger(__name__)

STATE_FILE = "state.pt"
LOG_FILE = "train_log.jsonl"
FINAL_RATE = 0.1
"""The learning rate ends at this share of its peak."""


class Trainer:
    """Runs the loop on Accelerate; one instance per run."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: BlockModel,
        vocabulary: Vocabulary,
        texts: Sequence[Text],
        lessons: LessonSource,
        indices: tuple[list[int], list[int]],
        settings: TrainSettings,
        folder: Path,
        teacher: Teacher | None = None,
    ) -> None:
        """Prepare a run.

        Args:
            accelerator: Devices, precision and processes.
            model: Initialised drafter, float32.
            vocabulary: Embedding and head, the target's or the drafter's own, frozen.
            texts: All texts.
            lessons: Of the same texts.
            indices: Training and validation texts.
            settings: Of the run.
            folder: Where state and log go.
            teacher: A drafter to learn from as well.
        """
        self.accelerator, self.vocabulary, self.texts = accelerator, vocabulary, texts
        self.lessons, self.settings, self.folder = lessons, settings, folder
        self.training, self.validation = indices
        self.teacher = teacher
        matrices = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": settings.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            fused=accelerator.device.type in ("cpu", "cuda"),
        )
        self.spec = model.spec
        self.model, self.optimizer = accelerator.prepare(TeacherForcing(model), optimizer)
        self.step, self.seconds, self.tokens = 0, 0.0, 0
        self.best = 0.0
        size = self.spec.vocab_size
        ids = vocabulary.to_target(torch.arange(self.spec.draft_vocab_size))
        self._draft_ids = torch.full((max(size, int(ids.max()) + 1),), -1, dtype=torch.long)
        self._draft_ids[ids] = torch.arange(len(ids))
        self._draft_ids = self._draft_ids.to(accelerator.device)
        self._order: tuple[int, list[list[int]]] = (-1, [])

    @property
    def bare_model(self) -> BlockModel:
        """The drafter without Accelerate's wrapping."""
        return cast("TeacherForcing", self.accelerator.unwrap_model(self.model)).drafter

    def run(self) -> float:
        """Train to the last step; return the best expected length on held-out texts."""
        settings, is_main = self.settings, self.accelerator.is_main_process
        bar = tqdm(
            total=settings.steps,
            initial=self.step,
            desc="train",
            unit="step",
            disable=not is_main or not sys.stderr.isatty(),
        )
        last: BlockLoss | None = None
        while self.step < settings.steps:
            begin = perf_counter()
            batch = self._batch(self._indices(), self.step)
            last = self._learn(batch)
            self.step += 1
            self.tokens += batch.num_tokens * self.accelerator.num_processes
            self.seconds += perf_counter() - begin
            bar.update()
            bar.set_postfix(
                loss=f"{float(last.total.detach()):.3f}",
                p1=f"{float(last.overlap[0]):.2f}",
                tau=f"{expected_length(last.overlap):.2f}",
            )
            if self.step % settings.validate_every == 0 or self.step == settings.steps:
                self._validate(last)
            if self.step % settings.save_every == 0 or self.step == settings.steps:
                self.save()
        bar.close()
        return self.best

    def save(self) -> None:
        """Write the whole state of the run, so that half a file is never seen."""
        self.accelerator.wait_for_everyone()
        if not self.accelerator.is_main_process:
            return
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "best": self.best,
            "model": self.bare_model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "settings": self.settings.as_dict(),
        }
        with written_whole(self.folder / STATE_FILE) as partial:
            torch.save(state, partial)

    def resume(self) -> bool:
        """Continue from the saved state, if there is one."""
        path = self.folder / STATE_FILE
        if not path.is_file():
            return False
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.bare_model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.tokens, self.best = state["tokens"], state["best"]
        return True

    def _indices(self) -> list[int]:
        """Return this step's texts of this process."""
        processes = self.accelerator.num_processes
        width = self.settings.batch_size * processes
        per_epoch = math.ceil(len(self.training) / width)
        epoch, place = divmod(self.step, per_epoch)
        if self._order[0] != epoch:
            seed = self.settings.seed * 1_000_003 + epoch
            self._order = (epoch, batches(self.texts, self.training, width, seed))
        chosen = self._order[1][place]
        mine = chosen[self.accelerator.process_index :: processes]
        return mine or chosen[:1]

    def _batch(self, indices: list[int], step: int) -> Batch:
        lessons = self.lessons.get(indices)
        generator = torch.Generator().manual_seed(self.settings.seed * 7_919 + step)
        width = max(len(self.texts[i].ids) for i in indices)
        device, rows = self.accelerator.device, len(indices)
        ids = torch.zeros(rows, width, dtype=torch.long)
        anchors = torch.zeros(rows, self.settings.anchors, dtype=torch.long)
        for row, index in enumerate(indices):
            text = self.texts[index]
            ids[row, : len(text.ids)] = torch.tensor(text.ids)
            anchors[row] = draw_anchors(text, self.settings.anchors, generator)
        pad = torch.nn.utils.rnn.pad_sequence
        top_ids = pad([lesson.top_ids for lesson in lessons], batch_first=True).long().to(device)
        return Batch(
            ids=ids.to(device),
            features=pad([lesson.features for lesson in lessons], batch_first=True).to(device),
            top_ids=self._draft_ids[top_ids.clamp_max(len(self._draft_ids) - 1)],
            top_probs=pad([lesson.top_probs for lesson in lessons], batch_first=True)
            .float()
            .to(device),
            anchors=anchors.to(device),
            lengths=torch.tensor([len(self.texts[i].ids) for i in indices], device=device),
        )

    def _learn(self, batch: Batch) -> BlockLoss:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.settings)
        loss = self._loss(batch)
        self.optimizer.zero_grad()
        self.accelerator.backward(loss.total)
        self.accelerator.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        self.optimizer.step()
        return loss

    def _autocast(self) -> torch.autocast:
        is_half = self.settings.precision == "bf16"
        return torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=is_half)

    def _loss(self, batch: Batch) -> BlockLoss:
        settings = self.settings
        with self._autocast():
            logits, confidence = predict(self.model, self.spec, self.vocabulary, batch)
        places = batch.anchors[..., None] + torch.arange(logits.shape[1], device=logits.device)
        labels = self._draft_ids[gather(batch.ids, places + 1)].flatten(0, 1)
        valid = (places < batch.lengths[:, None, None] - 1).flatten(0, 1)
        weights = LossWeights(
            settings.cross_entropy, settings.distance, settings.confidence, settings.decay
        )
        loss = block_loss(
            logits,
            confidence,
            labels,
            gather(batch.top_ids, places).flatten(0, 1),
            gather(batch.top_probs, places).flatten(0, 1),
            valid,
            weights,
        )
        if self.teacher is None or not self.model.training:
            return loss
        with self._autocast():
            probs = self.teacher.probs(batch, logits.shape[1])
        apart = distribution_distance(logits, probs, valid, weights)
        return replace(
            loss,
            total=loss.total + settings.distillation * apart,
            parts={**loss.parts, "teacher": float(apart.detach())},
        )

    @torch.no_grad()
    def _validate(self, last: BlockLoss) -> None:
        self.model.eval()
        sums: list[tuple[BlockLoss, torch.Tensor]] = []
        size = self.settings.batch_size
        for begin in range(0, len(self.validation), size):
            batch = self._batch(self.validation[begin : begin + size], -1 - begin)
            loss = self._loss(batch)
            sums.append((loss, loss.count))
        self.model.train()
        count = torch.stack([c for _, c in sums]).sum(dim=0).clamp_min(1)
        overlap = torch.stack([item.overlap * c for item, c in sums]).sum(dim=0) / count
        agreement = torch.stack([item.agreement * c for item, c in sums]).sum(dim=0) / count
        self.best = max(self.best, expected_length(overlap))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        record: dict[str, Any] = {
            "step": self.step,
            "loss": round(float(last.total.detach()), 4),
            **{name: round(value, 4) for name, value in last.parts.items()},
            "learning_rate": learning_rate(self.step, self.settings),
            "acceptance_sampled": [round(x, 4) for x in overlap.tolist()],
            "acceptance_greedy": [round(x, 4) for x in agreement.tolist()],
            "expected_length_sampled": round(expected_length(overlap), 4),
            "expected_length_greedy": round(expected_length(agreement), 4),
            "tokens": self.tokens,
            "tokens_per_s": round(self.tokens / max(self.seconds, 1e-9), 1),
            "peak_memory_bytes": peak if sys.platform != "darwin" else peak // 1024,
        }
        if self.accelerator.is_main_process:
            with (self.folder / LOG_FILE).open("a", encoding="utf-8") as log:
                log.write(json.dumps(record) + "\n")
            tqdm.write(
                f"step {self.step}: loss {record['loss']:.3f}, held out: expected length "
                f"{record['expected_length_sampled']:.2f} sampled, "
                f"{record['expected_length_greedy']:.2f} greedy; "
                f"{record['tokens_per_s']:.0f} tokens/s",
                file=sys.stderr,
            )


def learning_rate(step: int, settings: TrainSettings) -> float:
    """Return the learning rate of a step: linear warm-up, then a cosine down to a tenth."""
    peak = settings.learning_rate
    if step < settings.warmup_steps:
        return peak * (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return peak * (FINAL_RATE + (1 - FINAL_RATE) * (1 + math.cos(math.pi * min(done, 1.0))) / 2)


def draw_anchors(text: Text, count: int, generator: torch.Generator) -> torch.Tensor:
    """Draw anchor positions of a text: all of them in turn before any comes twice.

    Args:
        text: Anchors lie from its start to its last token but one.
        count: How many.
        generator: Source of randomness.

    Returns:
        torch.Tensor: int64 of shape (count,), ascending.
    """
    first, end = max(text.start, 1), len(text.ids) - 1
    span = end - first
    rounds = math.ceil(count / span)
    drawn = torch.cat([torch.randperm(span, generator=generator) for _ in range(rounds)])
    return (drawn[:count] + first).sort().values
