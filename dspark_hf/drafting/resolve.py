"""From what a caller writes as `drafter=` to a Drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from dspark_hf import compat
from dspark_hf.drafting.base import Drafter
from dspark_hf.drafting.lookup import LookupDrafter
from dspark_hf.drafting.small_model import ModelDrafter, check_tokenizers
from dspark_hf.errors import CheckpointError, ConfigError

NAMES = ("lookup",)


def resolve_drafter(
    drafter: Any, target: PreTrainedModel, tokenizer: Any = None, drafter_tokenizer: Any = None
) -> Drafter | None:
    """Make a drafter for a target.

    Args:
        drafter: None, "lookup", a path or hub id of a causal LM, a PreTrainedModel, or any object
            with `name`, `propose` and `free`.
        target: The model to draft for.
        tokenizer: The target's tokenizer; looked up where the target was loaded from if None.
        drafter_tokenizer: The drafter's, likewise.

    Returns:
        Drafter | None: None decodes plainly.

    Raises:
        ConfigError: If `drafter` is none of these.
        CheckpointError: If it cannot be loaded or does not share the target's tokenizer.
    """
    if drafter is None:
        return None
    if isinstance(drafter, str | Path):
        if str(drafter) in NAMES:
            return LookupDrafter(stop_ids=special_ids(target))
        return _from_checkpoint(str(drafter), target, tokenizer, drafter_tokenizer)
    if isinstance(drafter, PreTrainedModel):
        return model_drafter(drafter, target, tokenizer, drafter_tokenizer)
    if not isinstance(drafter, type) and isinstance(drafter, Drafter):
        return drafter
    raise ConfigError(
        f"drafter must be None, one of {list(NAMES)}, a path or hub id, a PreTrainedModel, or an "
        f"object with name, propose() and free(); got {drafter!r}."
    )


def special_ids(target: PreTrainedModel) -> list[int]:
    """Return the ids lookup never drafts past: end and padding tokens, none or several."""
    ids: list[int] = []
    for name in ("eos_token_id", "pad_token_id"):
        value = getattr(target.generation_config, name, None)
        ids.extend(value if isinstance(value, list) else [] if value is None else [value])
    return ids


def model_drafter(
    drafter: PreTrainedModel, target: PreTrainedModel, tokenizer: Any, drafter_tokenizer: Any
) -> ModelDrafter:
    """Make a drafter of a loaded causal LM, once its tokenizer is known to be the target's."""
    target_size = int(compat.text_config(target).vocab_size)
    drafter_size = int(compat.text_config(drafter).vocab_size)
    ours = tokenizer if tokenizer is not None else _saved_tokenizer(target)
    theirs = drafter_tokenizer if drafter_tokenizer is not None else _saved_tokenizer(drafter)
    if ours is None or theirs is None:
        ours = theirs = None
    check_tokenizers(
        target_size,
        drafter_size,
        None if ours is None else ours.get_vocab(),
        None if theirs is None else theirs.get_vocab(),
    )
    return ModelDrafter(drafter, target_size)


def _from_checkpoint(
    source: str, target: PreTrainedModel, tokenizer: Any, drafter_tokenizer: Any
) -> ModelDrafter:
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=target.dtype)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"drafter must be one of {list(NAMES)} or the path or hub id of a causal LM; loading "
            f"{source!r} failed: {str(error).splitlines()[0]}"
        ) from error
    model.eval()
    if not hasattr(target, "hf_device_map"):
        model.to(target.device)
    return model_drafter(model, target, tokenizer, drafter_tokenizer)


def _saved_tokenizer(model: PreTrainedModel) -> Any:
    """Load the tokenizer beside a locally saved model; None where there is none."""
    folder = Path(getattr(model, "name_or_path", "") or "")
    has_tokenizer = any(
        (folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")
    )
    if not str(getattr(model, "name_or_path", "")) or not has_tokenizer:
        return None
    return AutoTokenizer.from_pretrained(folder)
