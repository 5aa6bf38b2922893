"""What `dspark-hf train` does: texts, the run, and the finished drafter's folder."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf.errors import CheckpointError
from dspark_hf.training import data
from dspark_hf.training.finish import Finished, finish
from dspark_hf.training.run import RunInputs, make_accelerator, train
from dspark_hf.training.settings import TrainSettings
from dspark_hf.training.texts import TEXTS_FILE, is_ready_made, write_texts

if TYPE_CHECKING:
    from accelerate import Accelerator

    from dspark_hf.training.options import TrainOptions


def train_drafter(options: TrainOptions) -> Finished | None:
    """Make the texts, train, and finish; what is there already is not made again.

    Args:
        options: Of the command.

    Returns:
        Finished | None: The drafter's folder; None in all processes but the first.

    Raises:
        ConfigError: If options do not fit each other, the texts or the folder.
        CheckpointError: If the target cannot be loaded.
    """
    # Refused before hours of work: all but the number of steps is known now.
    options.settings(options.steps or 1)
    shape = options.shape()
    accelerator = make_accelerator()
    inputs = RunInputs(
        target=options.target,
        texts=_texts(options, accelerator),
        out=Path(options.out),
        target_dtype=getattr(torch, options.dtype),
        lessons=None if options.lessons is None else Path(options.lessons),
        lesson_bytes=int(options.lessons_gb * 1e9),
    )
    settings = options.settings(_steps(options, inputs.texts, accelerator.num_processes))
    result = train(inputs, shape, settings)
    gc.collect()
    finished = None
    if accelerator.is_main_process:
        finished = finish(result, inputs, settings, options, accelerator.num_processes)
    accelerator.wait_for_everyone()
    return finished


def _texts(options: TrainOptions, accelerator: Accelerator) -> Path:
    """Return the file of texts, written by the first process if it must be."""
    if options.data is not None and is_ready_made(options.data, regenerate=options.regenerate):
        return Path(options.data)
    path = Path(options.out) / TEXTS_FILE
    request = options.texts()
    if accelerator.is_main_process:
        try:
            tokenizer = AutoTokenizer.from_pretrained(options.target)
            model = AutoModelForCausalLM.from_pretrained(
                options.target, dtype=getattr(torch, options.dtype)
            )
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"target must be the path or hub id of a causal LM with its tokenizer; loading "
                f"{options.target!r} failed: {str(error).strip().splitlines()[0]}"
            ) from error
        write_texts(request, model.to(accelerator.device).eval(), tokenizer, Path(options.out))
    accelerator.wait_for_everyone()
    return path


def _steps(options: TrainOptions, texts: Path, num_processes: int) -> int:
    """Return how many steps to train, from the number of tokens if that is what was asked for."""
    if options.train_tokens is None:
        return options.steps or TrainSettings().steps
    read = data.read_texts(
        texts,
        AutoTokenizer.from_pretrained(options.target),
        max_tokens=options.max_tokens,
        only_answers=options.only_answers,
    )
    mean = sum(len(text.ids) for text in read) / len(read)
    return max(1, math.ceil(options.train_tokens / (mean * options.batch_size * num_processes)))
