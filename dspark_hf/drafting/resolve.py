"""From what a caller writes as `drafter=` to a Drafter."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from dspark_hf import compat
from dspark_hf.drafting.base import Drafter
from dspark_hf.drafting.block.build import build_block_drafter
from dspark_hf.drafting.block.drafter import BlockDrafter
from dspark_hf.drafting.checkpoints.detect import detect_kind
from dspark_hf.drafting.checkpoints.load import load_checkpoint, read_config
from dspark_hf.drafting.choice import DrafterChoice, choose_between
from dspark_hf.drafting.lookup import LookupDrafter
from dspark_hf.drafting.self_sparse import SelfSparseDrafter
from dspark_hf.drafting.shipped import find_shipped
from dspark_hf.drafting.small_model import ModelDrafter, check_tokenizers
from dspark_hf.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

NAMES = ("lookup", "auto", "self-sparse")


def resolve_drafter(
    drafter: Any, target: PreTrainedModel, tokenizer: Any = None, drafter_tokenizer: Any = None
) -> Drafter | None:
    """Make a drafter for a target.

    Args:
        drafter: None; "lookup"; "self-sparse" for the target itself over few pages of a long
            context; "auto" for the drafter that ships for this target, with lookup
            beside it; a path or hub id of a block drafter (DSpark, DFlash) or of a causal LM; a
            PreTrainedModel; any object with `name`, `propose` and `free`; or a list of these, of
            which the one that promises most is chosen per row and round.
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
        if str(drafter) == "lookup":
            return LookupDrafter(stop_ids=special_ids(target))
        if str(drafter) == "self-sparse":
            return SelfSparseDrafter()
        if str(drafter) == "auto":
            return _automatic(target)
        return _from_checkpoint(str(drafter), target, tokenizer, drafter_tokenizer)
    if isinstance(drafter, PreTrainedModel):
        return model_drafter(drafter, target, tokenizer, drafter_tokenizer)
    if isinstance(drafter, list | tuple):
        members = [
            made
            for item in drafter
            if (made := resolve_drafter(item, target, tokenizer, drafter_tokenizer)) is not None
        ]
        return members[0] if len(members) == 1 else choose_between(members)
    if not isinstance(drafter, type) and isinstance(drafter, Drafter):
        _check_made_for(drafter, target)
        return drafter
    raise ConfigError(
        f"drafter must be None, one of {list(NAMES)}, a path or hub id, a PreTrainedModel, an "
        f"object with name, propose() and free(), or a list of these; got {drafter!r}."
    )


def _check_made_for(drafter: Drafter, target: PreTrainedModel) -> None:
    """Refuse a block drafter that borrows from another model."""
    members = drafter.members if isinstance(drafter, DrafterChoice) else [drafter]
    for member in members:
        if isinstance(member, BlockDrafter) and member.target is not target:
            raise ConfigError(
                f"block drafter {member.name!r} must be made for the model it drafts for; got one "
                "made for another model object. Pass its path, or build another for this model."
            )


def _automatic(target: PreTrainedModel) -> Drafter:
    """Return the drafter that ships for the target with lookup beside it, or lookup alone."""
    lookup = LookupDrafter(stop_ids=special_ids(target))
    folder = find_shipped(target)
    if folder is None:
        logger.info(
            "No drafter ships for %s; drafting by lookup. `dspark-hf train` makes one.",
            getattr(target, "name_or_path", "") or type(target).__name__,
        )
        return lookup
    checkpoint = load_checkpoint(folder)
    return choose_between([build_block_drafter(checkpoint, target, name=folder.name), lookup])


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
) -> Drafter:
    config = read_config(source)
    if config is not None and detect_kind(config) is not None:
        rows = int(target.get_input_embeddings().weight.shape[0])
        checkpoint = load_checkpoint(source, vocab_size=rows)
        return build_block_drafter(checkpoint, target, name=Path(source).name)
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=target.dtype)
    except Exception as error:
        # A broken file raises whatever its reader does: of JSON, safetensors, pickle, a config.
        raise CheckpointError(
            f"drafter must be one of {list(NAMES)} or the path or hub id of a "
            f"block drafter or a causal LM; loading "
            f"{source!r} failed: {type(error).__name__}: {(str(error) or '-').splitlines()[0]}"
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
