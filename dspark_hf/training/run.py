"""A training run from its inputs to a drafter on disk."""

from __future__ import annotations

import dataclasses
import json
import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import compat
from dspark_hf.drafting.block.model import BlockModel
from dspark_hf.drafting.block.spec import BlockSpec
from dspark_hf.drafting.block.taps import decoder_blocks
from dspark_hf.drafting.block.vocabulary import Vocabulary
from dspark_hf.drafting.checkpoints.base import BlockCheckpoint
from dspark_hf.drafting.checkpoints.load import load_checkpoint
from dspark_hf.errors import ConfigError
from dspark_hf.training import data
from dspark_hf.training.distill import Teacher
from dspark_hf.training.features import LessonSource
from dspark_hf.training.settings import TrainSettings
from dspark_hf.training.start import (
    initialise,
    load_start,
    start_from_bigrams,
    start_from_target,
)
from dspark_hf.training.trainer import Trainer

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from dspark_hf.training.settings import DrafterShape

logger = logging.getLogger(__name__)

RUN_FILE = "run.json"
SAMPLE_TEXTS = 4
"""Texts on which head sizes are measured when starting from the target."""


@dataclass(frozen=True)
class RunInputs:
    """Where a run reads and writes.

    Attributes:
        target: Path or hub id of the model to draft for.
        texts: JSONL file of texts the target wrote.
        out: Folder of the run.
        target_dtype: Type the target computes features in.
        lessons: Folder for lessons kept on disk; None computes them anew every time.
        lesson_bytes: Most disk they may take.
    """

    target: str
    texts: Path
    out: Path
    target_dtype: torch.dtype = torch.bfloat16
    lessons: Path | None = None
    lesson_bytes: int = 0


@dataclass(frozen=True)
class RunResult:
    """What a run ended with.

    Attributes:
        checkpoint: The drafter.
        expected_length: Best expected length on held-out texts, sampled.
        num_texts: Texts used, held-out ones included.
        num_tokens: Their tokens.
    """

    checkpoint: BlockCheckpoint
    expected_length: float
    num_texts: int
    num_tokens: int


def train(inputs: RunInputs, shape: DrafterShape, settings: TrainSettings) -> RunResult:
    """Train a drafter; a folder with a saved state is continued.

    Args:
        inputs: Where to read and write.
        shape: What to train.
        settings: How.

    Returns:
        RunResult: The trained drafter, in memory.

    Raises:
        ConfigError: If the folder holds a run with other settings, or texts or shape do not fit.
    """
    accelerator = make_accelerator()
    target = AutoModelForCausalLM.from_pretrained(inputs.target, dtype=inputs.target_dtype)
    target.to(accelerator.device).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(inputs.target)
    texts = data.read_texts(
        inputs.texts,
        tokenizer,
        max_tokens=settings.max_tokens,
        only_answers=settings.only_answers,
    )
    earlier = None
    if settings.from_drafter is not None:
        earlier = load_start(settings.from_drafter, target, shape)
    spec = make_spec(target, shape, texts) if earlier is None else earlier.spec
    name = data.fingerprint(texts)
    with accelerator.main_process_first():
        # The first process may write; the others find the run they belong to.
        _claim(inputs.out, {"settings": settings.as_dict(), "spec": vars(spec), "texts": name})
    kept = d2t = None
    if earlier is not None:
        d2t = earlier.d2t
    elif spec.is_pruned:
        kept = data.draft_vocabulary(texts, spec.draft_vocab_size, spec.vocab_size)
        d2t = kept - torch.arange(len(kept))
    model = BlockModel(spec)
    training, validation = data.split(texts, settings.validation_share, settings.seed)
    if earlier is not None:
        model.load_state_dict({n: t.to(torch.float32) for n, t in earlier.tensors.items()})
    else:
        _start(model, target, [texts[i] for i in training], kept, settings)
    folder = inputs.lessons
    if folder is not None:
        taps = "-".join(str(i) for i in spec.target_layers)
        folder = folder / f"{name}-taps{taps}-top{settings.top_k}"
    lessons = LessonSource(
        target,
        texts,
        spec.target_layers,
        top_k=settings.top_k,
        folder=folder,
        most_bytes=inputs.lesson_bytes,
    )
    vocabulary = Vocabulary(spec, target, d2t=d2t)
    teacher = None
    if settings.teacher is not None:
        loaded = load_checkpoint(settings.teacher, vocab_size=spec.vocab_size)
        teacher = Teacher(loaded, target, spec, vocabulary, accelerator.device)
    trainer = Trainer(
        accelerator,
        model,
        vocabulary,
        texts,
        lessons,
        (training, validation),
        settings,
        inputs.out,
        teacher,
    )
    if trainer.resume():
        logger.info("Continuing %s at step %d.", inputs.out, trainer.step)
    best = trainer.run()
    tensors = {n: t.detach().cpu().bfloat16() for n, t in trainer.bare_model.state_dict().items()}
    kind = "speculators-dspark" if spec.is_pruned or not spec.reads_anchor else "deepspec-dspark"
    checkpoint = BlockCheckpoint(spec=spec, tensors=tensors, d2t=d2t, kind=kind)
    return RunResult(checkpoint, best, len(texts), sum(len(t.ids) for t in texts))


def _start(
    model: BlockModel,
    target: PreTrainedModel,
    texts: list[data.Text],
    kept: torch.Tensor | None,
    settings: TrainSettings,
) -> None:
    """Give a new drafter its first parameters, as the settings say."""
    initialise(model, settings.seed)
    if settings.from_target:
        sample = [text.ids for text in texts[:SAMPLE_TEXTS]]
        width = min(len(ids) for ids in sample)
        start_from_target(model, target, torch.tensor([ids[:width] for ids in sample]))
    if settings.from_bigrams:
        start_from_bigrams(model, texts, kept)


def make_spec(target: PreTrainedModel, shape: DrafterShape, texts: list[data.Text]) -> BlockSpec:
    """Fill a shape's open sizes from the target.

    Args:
        target: The model to draft for.
        shape: What is wanted.
        texts: Their ids are not used as the mask token.

    Returns:
        BlockSpec: The drafter's.

    Raises:
        ConfigError: If the target does not say its rotary base, or a tap is out of range.
    """
    config = compat.text_config(target)
    num_blocks = len(decoder_blocks(target))
    layers = shape.target_layers or spread_layers(num_blocks)
    for layer in layers:
        if not -1 <= layer < num_blocks - 1:
            raise ConfigError(
                f"target_layers must lie between -1 and {num_blocks - 2}: the last block's output "
                f"is normed where others serve the drafter; got {layer}."
            )
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
    heads = int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    vocab_size = int(target.get_input_embeddings().weight.shape[0])
    mask = shape.mask_token_id
    return BlockSpec(
        flavour="qwen3",
        vocab_size=vocab_size,
        draft_vocab_size=shape.draft_vocab_size or vocab_size,
        hidden_size=int(config.hidden_size),
        intermediate_size=shape.intermediate_size or int(config.intermediate_size),
        num_layers=shape.num_layers,
        num_heads=heads,
        num_kv_heads=int(getattr(config, "num_key_value_heads", heads)),
        head_dim=int(head_dim),
        target_layers=tuple(layers),
        num_target_layers=num_blocks,
        block_size=shape.block_size,
        mask_token_id=unused_token(texts, vocab_size) if mask is None else mask,
        reads_anchor=shape.reads_anchor,
        rope_theta=float(theta or 10_000.0),
        rms_norm_eps=float(getattr(config, "rms_norm_eps", 1e-6)),
        layer_types=("full_attention",) * shape.num_layers,
        markov_rank=shape.markov_rank,
        head=shape.head,
        has_confidence=shape.confidence,
        confidence_sees_token=shape.confidence and shape.markov_rank > 0,
        max_positions=getattr(config, "max_position_embeddings", None),
    )


def spread_layers(num_blocks: int) -> tuple[int, ...]:
    """Return three taps: a third and two thirds of the depth, and the last block but two."""
    return tuple(sorted({num_blocks // 3 - 1, 2 * num_blocks // 3 - 1, max(num_blocks - 3, 0)}))


def unused_token(texts: list[data.Text], vocab_size: int) -> int:
    """Return the highest id the texts do not use, so that a mask is never a word."""
    used = {token for text in texts for token in text.ids}
    return next((i for i in range(vocab_size - 1, -1, -1) if i not in used), vocab_size - 1)


def make_accelerator() -> Accelerator:
    """Return Accelerate's view of devices and processes; the CPU where there is nothing better.

    Precision is the trainer's own affair: Accelerate's belongs to the process and could not differ
    between two runs of it.
    """
    is_cpu = not torch.accelerator.is_available()
    # Other processes wait while the first writes texts, for hours if need be.
    patience = InitProcessGroupKwargs(timeout=timedelta(days=7))
    return Accelerator(mixed_precision="no", cpu=is_cpu, kwargs_handlers=[patience])


def _claim(folder: Path, run: dict[str, Any]) -> None:
    """Write what the folder's run is, or refuse to continue another one."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RUN_FILE
    text = json.dumps(run, indent=1, default=list)
    if not path.is_file():
        path.write_text(text + "\n", encoding="utf-8")
        return
    held, new = json.loads(path.read_text(encoding="utf-8")), json.loads(text)
    # Fields younger than the folder were at their defaults.
    for part, kind in (("settings", TrainSettings), ("spec", BlockSpec)):
        held[part] = {**_defaults(kind), **held.get(part, {})}
    for part in new:
        if held.get(part) != new[part]:
            old, now = held.get(part), new[part]
            if isinstance(old, dict) and isinstance(now, dict):
                changed = [key for key in now if old.get(key) != now[key]]
                old, now = {k: old.get(k) for k in changed}, {k: now[k] for k in changed}
            raise ConfigError(
                f"{folder} holds a run with other {part}: {old}; got {now}. Continue it with what "
                "it was started with, or choose a new folder."
            )


def _defaults(kind: Any) -> dict[str, Any]:
    fields = dataclasses.fields(kind)
    return {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
