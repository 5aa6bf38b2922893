"""What the commands share: loading a model quietly, encoding prompts, and timing a call."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import TemplateError
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from dspark_hf.errors import CheckpointError, ConfigError
from dspark_hf.losslessness import end_ids, unwrapped
from dspark_hf.metrics import SpeculationRecord
from dspark_hf.model import DSparkForCausalLM

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dspark_hf.config import DSparkConfig

DTYPES = ("auto", "float32", "bfloat16", "float16")
OWN_KEYWORDS = frozenset(
    {
        "max_new_tokens", "do_sample", "num_return_sequences", "return_dict_in_generate",
        "output_scores", "pad_token_id",
    }
)  # fmt: skip
"""Keywords of generate() that a command sets itself."""


@dataclass(frozen=True)
class Timed:
    """One generate() call.

    Attributes:
        ids: New tokens of each row, without the padding behind its end.
        seconds: The whole call, prompts included.
        records: One per row; empty for the plain model.
    """

    ids: list[list[int]]
    seconds: float
    records: list[SpeculationRecord]

    @property
    def tokens_per_s(self) -> float:
        """New tokens of all rows per second of the call."""
        return sum(map(len, self.ids)) / self.seconds


def load(
    source: str, drafter: str | None, dtype: str, config: DSparkConfig | None = None
) -> tuple[Any, Any]:
    """Load and wrap a model and its tokenizer, with the libraries' chatter off.

    Args:
        source: Path or hub id.
        drafter: "lookup", "none", or the path or hub id of a drafting model.
        dtype: One of `DTYPES`.
        config: Settings; defaults when None.

    Returns:
        tuple[Any, Any]: The wrapped model on the accelerator, if there is one, and its tokenizer.

    Raises:
        ConfigError: If the dtype is not allowed.
        CheckpointError: If the model, its tokenizer or the drafter cannot be loaded.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {list(DTYPES)}; got {dtype!r}.")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    tokenizer, model = _loaded(source, dtype)
    if torch.cuda.is_available():
        model.to("cuda")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    tokenizer.padding_side = "left"
    chosen = None if drafter in (None, "none") else drafter
    DSparkForCausalLM.wrap(model, drafter=chosen, config=config, tokenizer=tokenizer)
    # Checked now, so that no timed call pays for it.
    model.dspark.target_choice()
    return model, tokenizer


def _loaded(source: str, dtype: str) -> tuple[Any, Any]:
    """Return a tokenizer and a causal LM, or refuse what they cannot be loaded from."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model, loaded = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, ignore_mismatched_sizes=True, output_loading_info=True
        )
    except Exception as error:
        # A broken file raises whatever its reader does: of JSON, safetensors, pickle, a config.
        raise CheckpointError(
            f"model must be the path or hub id of a causal LM with its tokenizer; loading "
            f"{source!r} failed: {_reason(error)}"
        ) from error
    if loaded["mismatched_keys"]:
        name, held, wanted = min(loaded["mismatched_keys"])
        raise CheckpointError(
            f"model must have weights of the shapes its config.json says; {name} of {source!r} is "
            f"{tuple(held)}, not {tuple(wanted)}. Get config.json and weights of one model."
        )
    return tokenizer, model


def _reason(error: Exception) -> str:
    """Return what an error says first, with its kind where the words alone say little."""
    lines = str(error).strip().splitlines()
    said = " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])
    return said if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {said}"


def encode(
    model: Any, tokenizer: Any, prompts: Sequence[str], *, chat: bool | None = None
) -> dict[str, torch.Tensor]:
    """Encode prompts as one batch.

    Args:
        model: Tells the device.
        tokenizer: Pads on the left.
        prompts: What the user says.
        chat: Whether to apply the chat template; None applies it if there is one.

    Returns:
        dict[str, torch.Tensor]: input_ids and attention_mask, int64 of shape (B, longest).

    Raises:
        ConfigError: If a chat template is asked for and the tokenizer has none, or its own cannot
            be applied, or a batch needs padding that the tokenizer does not have.
    """
    texts = list(prompts)
    is_chat = bool(tokenizer.chat_template) if chat is None else chat
    if is_chat and not tokenizer.chat_template:
        raise ConfigError("--chat needs a tokenizer with a chat template; got none. Use --no-chat.")
    if is_chat:
        texts = [_as_chat(tokenizer, text) for text in texts]
    if len(texts) > 1 and tokenizer.pad_token_id is None:
        raise ConfigError(
            "a batch needs a tokenizer with a padding, end or unknown token; got "
            f"{len(texts)} prompts and a tokenizer with none of them. Run one prompt at a time."
        )
    encoded = tokenizer(
        texts, return_tensors="pt", padding=len(texts) > 1, add_special_tokens=not is_chat
    )
    return {name: encoded[name].to(model.device) for name in ("input_ids", "attention_mask")}


def _as_chat(tokenizer: Any, text: str) -> str:
    """Return a user's message as the chat template puts it."""
    message = {"role": "user", "content": text}
    try:
        return str(
            tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        )
    except TemplateError as error:
        raise ConfigError(
            "--chat needs a chat template that takes one user message; applying the tokenizer's "
            f"failed: {type(error).__name__}: {error}. Use --no-chat."
        ) from error


def rows_of(batch: dict[str, torch.Tensor]) -> list[list[int]]:
    """Return a batch's prompts without their padding."""
    pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in pairs]


def generate(model: Any, batch: dict[str, torch.Tensor], **kwargs: Any) -> Timed:
    """Time a call of a wrapped model."""
    return observe(model, lambda: new_ids(model, model.generate(**batch, **kwargs), batch))


def generate_plain(model: Any, batch: dict[str, torch.Tensor], **kwargs: Any) -> Timed:
    """Time the same call as Transformers wrote it."""
    with unwrapped(model):
        return observe(model, lambda: new_ids(model, model.generate(**batch, **kwargs), batch))


def observe(model: Any, call: Callable[[], list[list[int]]]) -> Timed:
    """Time a call that returns new tokens, and read what speculation did in it.

    Args:
        model: Wrapped, or unwrapped for a while.
        call: Generates with it once.

    Returns:
        Timed: Without records for the unwrapped model.
    """
    metrics = model.dspark.metrics if isinstance(model, DSparkForCausalLM) else None
    num_fallbacks = 0 if metrics is None else metrics.fallback_calls
    begin = perf_counter()
    ids = call()
    seconds = perf_counter() - begin
    if metrics is None:
        return Timed(ids, seconds, [])
    if metrics.fallback_calls > num_fallbacks:
        records = [SpeculationRecord(path="transformers", new_tokens=len(row)) for row in ids]
        return Timed(ids, seconds, records)
    return Timed(ids, seconds, list(metrics.last))


def new_ids(model: Any, sequences: torch.Tensor, batch: dict[str, torch.Tensor]) -> list[list[int]]:
    """Return what generate() added to each row, up to its end token.

    Args:
        model: Knows the end tokens.
        sequences: int64 of shape (B, longest + new).
        batch: The prompts.

    Returns:
        list[list[int]]: One list a row, its end token included.
    """
    ends = end_ids(model, {})
    return [_until_end(ids, ends) for ids in sequences[:, batch["input_ids"].shape[1] :].tolist()]


def parse_keywords(pairs: Sequence[str]) -> dict[str, Any]:
    """Read `name=value` pairs as keywords of generate().

    Args:
        pairs: Such as "repetition_penalty=1.1"; values are Python literals, or text.

    Returns:
        dict[str, Any]: By name.

    Raises:
        ConfigError: If a pair has no "=", generate() has no such setting, or a command sets it.
    """
    known = vars(GenerationConfig())
    keywords: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or name not in known or name in OWN_KEYWORDS:
            raise ConfigError(
                f"--kw must be name=value with a name of GenerationConfig, and not one of "
                f"{sorted(OWN_KEYWORDS)}; got {pair!r}."
            )
        try:
            keywords[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            keywords[name] = value
    return keywords


def _until_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    places = [ids.index(end) for end in ends if end in ids]
    return ids[: min(places) + 1] if places else ids
