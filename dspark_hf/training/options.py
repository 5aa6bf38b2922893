"""TrainOptions: everything `dspark-hf train` can be told, by flag or in a YAML file."""

from __future__ import annotations

import dataclasses
import shlex
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dspark_hf.errors import ConfigError
from dspark_hf.training.settings import DrafterShape, TrainSettings
from dspark_hf.training.texts import TextRequest

DTYPES = ("bfloat16", "float16", "float32")
LAYOUTS = ("speculators", "deepspec")
SHAPE = DrafterShape()
SETTINGS = TrainSettings()
TEXTS = TextRequest(tokens=1)

RENAMED = {
    "layers": "num_layers", "taps": "target_layers", "mask_token": "mask_token_id",
    "confidence_loss": "confidence",
}  # fmt: skip
"""Options whose field in `DrafterShape` or `TrainSettings` has another name."""


@dataclass(frozen=True)
class TrainOptions:
    """The options by their names; see `DrafterShape`, `TrainSettings` and `TextRequest`."""

    target: str = ""
    out: str = ""
    data: str | None = None
    # Texts
    tokens: int | None = None
    regenerate: bool = TEXTS.regenerate
    temperatures: tuple[float, ...] = TEXTS.temperatures
    rows: int = TEXTS.rows
    question_tokens: int = TEXTS.question_tokens
    answer_tokens: int = TEXTS.answer_tokens
    # Drafter
    layers: int = SHAPE.num_layers
    block_size: int = SHAPE.block_size
    taps: tuple[int, ...] = SHAPE.target_layers
    markov_rank: int = SHAPE.markov_rank
    head: str = SHAPE.head
    confidence: bool = SHAPE.confidence
    intermediate_size: int | None = None
    draft_vocab_size: int | None = None
    mask_token: int | None = None
    reads_anchor: bool = SHAPE.reads_anchor
    # Training
    steps: int | None = None
    train_tokens: int | None = None
    batch_size: int = SETTINGS.batch_size
    anchors: int = SETTINGS.anchors
    learning_rate: float = SETTINGS.learning_rate
    warmup_steps: int = SETTINGS.warmup_steps
    weight_decay: float = SETTINGS.weight_decay
    clip_norm: float = SETTINGS.clip_norm
    max_tokens: int = SETTINGS.max_tokens
    top_k: int = SETTINGS.top_k
    validation_share: float = SETTINGS.validation_share
    validate_every: int = SETTINGS.validate_every
    save_every: int = SETTINGS.save_every
    from_target: bool = SETTINGS.from_target
    only_answers: bool = SETTINGS.only_answers
    precision: str = SETTINGS.precision
    seed: int = SETTINGS.seed
    cross_entropy: float = SETTINGS.cross_entropy
    distance: float = SETTINGS.distance
    confidence_loss: float = SETTINGS.confidence
    decay: float = SETTINGS.decay
    teacher: str | None = None
    distillation: float = SETTINGS.distillation
    from_bigrams: bool = SETTINGS.from_bigrams
    from_drafter: str | None = None
    # Target and result
    dtype: str = "bfloat16"
    lessons: str | None = None
    lessons_gb: float = 20.0
    layout: str = LAYOUTS[0]
    calibrate: bool = True
    calibration_prompts: str | None = None
    calibration_tokens: int = 128
    base_model: str | None = None
    license: str | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be honoured, naming the option."""
        for name in ("target", "out"):
            if not getattr(self, name):
                raise ConfigError(f"--{name} must be given; got none.")
        for name, allowed in (("dtype", DTYPES), ("layout", LAYOUTS)):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name} must be one of {list(allowed)}; got {getattr(self, name)!r}."
                )
        if self.steps is not None and self.train_tokens is not None:
            raise ConfigError(
                "steps and train_tokens both say how long to train; give one of them."
            )

    @classmethod
    def merge(cls, path: str | Path | None, flags: dict[str, Any]) -> TrainOptions:
        """Take a YAML file's values, and over them what was given by flag.

        Args:
            path: YAML file of option names, with - or _, and values; None for none.
            flags: By name; None for those not given. Lists may be text with commas.

        Returns:
            TrainOptions: The checked options.

        Raises:
            ConfigError: If the file is no mapping, or a name or value is not allowed.
        """
        given = {} if path is None else _read_yaml(Path(path))
        given.update({name: value for name, value in flags.items() if value is not None})
        hints = typing.get_type_hints(cls)
        values = {}
        for name, value in given.items():
            if name not in hints:
                raise ConfigError(
                    f"options must be among {sorted(hints)}; got {name!r}. Correct its name."
                )
            values[name] = _checked(name, value, hints[name])
        return cls(**values)

    def shape(self) -> DrafterShape:
        """Return the drafter's shape."""
        return DrafterShape(**self._fields_of(DrafterShape, skip="confidence_loss"))

    def settings(self, steps: int) -> TrainSettings:
        """Return the run's settings.

        Args:
            steps: Of the optimiser, in all.
        """
        values = self._fields_of(TrainSettings, skip="confidence")
        return TrainSettings(**{**values, "steps": steps})

    def texts(self) -> TextRequest:
        """Return what texts to write."""
        return TextRequest(**self._fields_of(TextRequest, skip=""))

    def arguments(self) -> list[str]:
        """Return the arguments of the command line that gives these options."""
        words = ["train"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            name = field.name.replace("_", "-")
            if field.name == "from_target":
                words.append("--from-scratch")
            elif isinstance(value, bool):
                words.append(f"--{name}" if value else f"--no-{name}")
            else:
                shown = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
                words.extend([f"--{name}", shlex.quote(shown)])
        return words

    def _fields_of(self, kind: Any, *, skip: str) -> dict[str, Any]:
        names = {field.name for field in dataclasses.fields(kind)}
        own = {field.name for field in dataclasses.fields(self)} - {skip}
        found = {RENAMED.get(name, name): getattr(self, name) for name in own}
        return {name: value for name, value in found.items() if name in names}


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"--config must be a file that exists; got {str(path)!r}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} must be a YAML file; reading it failed: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} must hold a mapping of option names to values; got a {type(values).__name__}."
        )
    return {str(name).replace("-", "_"): value for name, value in values.items()}


def _checked(name: str, value: Any, hint: Any) -> Any:
    """Return a value as its option's type, or refuse it."""
    is_optional = isinstance(hint, types.UnionType)
    if is_optional:
        if value is None:
            return None
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    if typing.get_origin(hint) is tuple:
        kind = typing.get_args(hint)[0]
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            items = [items]
        return tuple(_number(name, item, kind) for item in items)
    if hint in (int, float):
        return _number(name, value, hint)
    if not isinstance(value, hint):
        raise ConfigError(f"{name} must be a {hint.__name__}; got {value!r}.")
    return value


def _number(name: str, value: Any, kind: type) -> Any:
    try:
        number = kind(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} must be of type {kind.__name__}; got {value!r}.") from error
    if isinstance(value, bool) or (not isinstance(value, str) and number != value):
        raise ConfigError(f"{name} must be of type {kind.__name__}; got {value!r}.")
    return number
