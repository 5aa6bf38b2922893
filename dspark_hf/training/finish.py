"""From a finished run to a drafter's folder: weights, target, calibration, log, facts and card."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging as transformers_logging

from dspark_hf.benchmarks.environment import command_line, conditions, machine
from dspark_hf.drafting.checkpoints.save import save_checkpoint
from dspark_hf.drafting.checkpoints.source import CALIBRATION
from dspark_hf.drafting.checkpoints.target import read_target, with_target
from dspark_hf.drafting.shipped import TARGET_FILE, target_signature
from dspark_hf.errors import ConfigError
from dspark_hf.model import DSparkForCausalLM
from dspark_hf.training.card import render_card
from dspark_hf.training.settings import TrainSettings
from dspark_hf.training.texts import FACTS_FILE
from dspark_hf.training.trainer import LOG_FILE

if TYPE_CHECKING:
    from dspark_hf.training.options import TrainOptions
    from dspark_hf.training.run import RunInputs, RunResult

logger = logging.getLogger(__name__)

DRAFTER_FOLDER = "drafter"
TRAINING_FILE = "training.json"
CARD_FILE = "README.md"
UNKNOWN_LICENSE = "unknown"


@dataclass(frozen=True)
class Finished:
    """A drafter ready for use.

    Attributes:
        folder: What to pass as `drafter=`.
        expected_length: On held-out texts at the last step, sampled, in tokens.
        num_bytes: Of its weights.
    """

    folder: Path
    expected_length: float
    num_bytes: int


def finish(
    result: RunResult,
    inputs: RunInputs,
    settings: TrainSettings,
    options: TrainOptions,
    num_processes: int,
) -> Finished:
    """Write OUT/drafter: all a user of the drafter needs, and how it was made.

    Args:
        result: Of the run.
        inputs: Of the run.
        settings: Of the run.
        options: Of the command.
        num_processes: That trained.

    Returns:
        Finished: Where it is.
    """
    folder = inputs.out / DRAFTER_FOLDER
    _save(result, inputs, options.layout, folder)
    transformers_logging.disable_progress_bar()
    model: Any = DSparkForCausalLM.from_pretrained(
        inputs.target, drafter=str(folder), dtype=inputs.target_dtype
    )
    tokenizer = AutoTokenizer.from_pretrained(inputs.target)
    _write(folder / TARGET_FILE, target_signature(model))
    shutil.copyfile(inputs.out / LOG_FILE, folder / LOG_FILE)
    if options.calibrate and result.checkpoint.spec.has_confidence:
        _calibrate(model, tokenizer, options, folder)
    log = log_lines(inputs.out)
    facts = {
        **conditions(command_line(options.arguments())),
        "machine": machine(),
        "processes": num_processes,
        "device": str(model.device.type),
        "base_model": options.base_model or _public_name(options.target),
        "license": options.license or _license_of(options.target),
        "target_dtype": options.dtype,
        "run": _describe(result),
        "settings": {
            name: _public_name(value) if value and name in ("teacher", "from_drafter") else value
            for name, value in settings.as_dict().items()
        },
        "defaults": TrainSettings().as_dict(),
        "texts": _text_facts(inputs, result),
        "earlier": earlier_runs(settings.from_drafter),
    }
    _write(folder / TRAINING_FILE, facts)
    write_card(folder)
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return Finished(folder, float(log[-1]["expected_length_sampled"]), num_bytes)


def write_card(folder: Path) -> bool:
    """Write a drafter's model card anew from the files beside it.

    Args:
        folder: Of a drafter.

    Returns:
        bool: False, and nothing is written, where a run has left no facts or log.
    """
    facts, log, calibration = folder / TRAINING_FILE, folder / LOG_FILE, folder / CALIBRATION
    if not facts.is_file() or not log.is_file():
        return False
    card = render_card(
        json.loads(facts.read_text(encoding="utf-8")),
        log_lines(folder),
        json.loads(calibration.read_text(encoding="utf-8")) if calibration.is_file() else None,
    )
    (folder / CARD_FILE).write_text(card, encoding="utf-8")
    return True


def _save(result: RunResult, inputs: RunInputs, layout: str, folder: Path) -> None:
    """Save the weights; only the layout that demands it gets copies of the target's tables."""
    checkpoint = result.checkpoint
    is_copying = layout == "deepspec"
    if is_copying:
        checkpoint = with_target(checkpoint, read_target(inputs.target))
    save_checkpoint(
        checkpoint,
        folder,
        layout=layout,
        include_embed=is_copying,
        include_head=is_copying,
        verifier={
            "architectures": AutoConfig.from_pretrained(inputs.target).architectures or [],
            "name_or_path": _public_name(inputs.target),
        },
    )


def _calibrate(model: Any, tokenizer: Any, options: TrainOptions, folder: Path) -> None:
    from dspark_hf.evaluation.calibrate import TEMPERATURES, calibrate_drafter
    from dspark_hf.evaluation.prompts import calibration_prompts, read_prompts

    path = options.calibration_prompts
    prompts = calibration_prompts() if path is None else read_prompts(Path(path))
    bar = tqdm(
        total=len(prompts) * len(TEMPERATURES),
        desc="calibrate",
        unit="prompt",
        disable=not sys.stderr.isatty(),
    )
    try:
        with bar:
            calibration = calibrate_drafter(
                model,
                tokenizer,
                prompts,
                max_new_tokens=options.calibration_tokens,
                temperatures=TEMPERATURES,
                observer=lambda num_prompts: _advance(bar, num_prompts),
            )
    except ConfigError as error:
        logger.warning("The drafter is not calibrated: %s", error)
        return
    _write(folder / CALIBRATION, calibration.to_dict())


def _advance(bar: Any, num_prompts: int) -> None:
    bar.update(num_prompts)


def log_lines(folder: Path) -> list[dict[str, Any]]:
    """Return a run's log, one record per validation; of a step validated twice the latest."""
    lines = (folder / LOG_FILE).read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines if line.strip()]
    return sorted({r["step"]: r for r in records}.values(), key=lambda r: int(r["step"]))


def earlier_runs(source: str | None) -> list[dict[str, Any]]:
    """Return what is known of the runs that made the drafter training went on from, first to last.

    Args:
        source: Its folder or hub id; None where training began anew.
    """
    path = None if source is None else Path(source) / TRAINING_FILE
    if path is None or not path.is_file():
        return []
    facts = json.loads(path.read_text(encoding="utf-8"))
    run = {
        "command": facts["command"],
        "steps": facts["settings"]["steps"],
        "texts": facts["texts"]["texts"],
        "tokens": facts["texts"]["tokens"],
    }
    return [*facts.get("earlier", []), run]


def _describe(result: RunResult) -> dict[str, Any]:
    return {
        "spec": dataclasses.asdict(result.checkpoint.spec),
        "best_expected_length": result.expected_length,
        "parameters": result.checkpoint.num_parameters,
    }


def _text_facts(inputs: RunInputs, result: RunResult) -> dict[str, Any]:
    """Return what the texts' file tells, and how they were written if that was done here."""
    facts: dict[str, Any] = {"source": inputs.texts.name}
    with inputs.texts.open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines if line.strip()]
    for name in ("domain", "temperature"):
        counts = Counter(str(record[name]) for record in records if record.get(name) is not None)
        facts[f"by_{name}"] = dict(sorted(counts.items()))
    facts["answer_tokens"] = sum(len(r["ids"]) - r["answer_start"] for r in records if "ids" in r)
    path = inputs.out / FACTS_FILE
    if path.is_file() and inputs.texts.parent == inputs.out:
        written = json.loads(path.read_text(encoding="utf-8"))
        data = written["request"]["data"]
        written["request"]["data"] = data and _public_name(data)
        facts["written"] = written
    return {**facts, "texts": result.num_texts, "tokens": result.num_tokens}


def _public_name(source: str) -> str:
    """Return a hub id as it is, and of a path its last part."""
    return Path(source).name if Path(source).exists() or Path(source).is_absolute() else source


def _license_of(target: str) -> str:
    """Return the license the target's own card states, if it is at hand."""
    from huggingface_hub import ModelCard

    path = Path(target) / CARD_FILE
    if not path.is_file():
        return UNKNOWN_LICENSE
    stated = ModelCard.load(path).data.get("license")
    return str(stated) if stated else UNKNOWN_LICENSE


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
