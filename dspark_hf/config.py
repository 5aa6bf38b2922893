"""DSparkConfig: every setting of the wrapper, frozen and checked at construction."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dspark_hf.attention.policy import SparsePolicy, resolve_policy
from dspark_hf.errors import ConfigError
from dspark_hf.queue_settings import SECTIONS, QueueConfig

ACCEPTANCE = ("rejection", "coupled")
SCHEDULES = ("auto", "fixed", "threshold", "prefix", "budget")
EXACTNESS = ("plain", "recheck")
MOST_DRAFT_TOKENS = 64
"""Longest draft; beyond it no measured step cost lets a longer one pay."""


@dataclass(frozen=True)
class DSparkConfig:
    """How drafts are made, verified and accepted.

    Attributes:
        acceptance: Rule for sampling: "rejection" (accept with min(1, p/q)) or "coupled" (noise
            keyed by seed and position: same seed, same text for any drafter, batch or schedule).
            Greedy decoding uses neither.
        schedule: "auto" chooses each row's draft length from the drafter's confidences or past
            acceptance, and measured step cost. The others ask for `max_draft_tokens` each round:
            "fixed" verifies all that is proposed; "threshold" stops before the first token whose
            confidence is below `confidence_threshold`; "prefix" takes the likeliest tokens of all
            rows while expected speed grows; "budget" takes as many as older rounds make worth it.
            Where a drafter gives no confidences, past acceptance stands in for them.
        confidence_threshold: Least confidence of a token that "threshold" verifies, from 0 to 1:
            the drafter's probability that the token survives given that those before it did.
        max_draft_tokens: Most draft tokens a row verifies in one round, 1 to 64.
        never_slower: With "auto", stop drafting where it does not pay and probe again later. Also
            sends several rows of a model that must run row by row to the model's own loop.
        exactness: "plain" trusts the verify forward; "recheck" decides near-ties (margin of at
            most `recheck_margin`) by a one-token forward, for greedy decoding of 16-bit models.
        recheck_margin: Gap between the two best scores up to which "recheck" looks again, in
            logit units; two steps of the model's type at that score always count.
        seed: Key of the per-row random streams; None draws one from torch's global generator at
            every call. A row's stream follows from seed and prompt: with a fixed seed, repeating a
            call repeats its draws, while equal prompts of one batch draw differently.
            With "coupled" the same seed gives the same text; with "rejection" so long as the
            draft lengths are the same (`schedule="fixed"`), as others follow measured times.
        sparse: How much of a long context decoding reads: None for all of it, "quality", "fast",
            or a `SparsePolicy`. Not lossless: see `model.dspark.sparse_attention`.
        queue: Settings of a `GenerationQueue` over the model; None for its defaults.
    """

    acceptance: str = "rejection"
    schedule: str = "auto"
    confidence_threshold: float = 0.92
    max_draft_tokens: int = 16
    never_slower: bool = True
    exactness: str = "plain"
    recheck_margin: float = 0.1
    seed: int | None = None
    sparse: SparsePolicy | str | None = None
    queue: QueueConfig | None = None

    def __post_init__(self) -> None:
        """Refuse values that cannot be honoured, naming the parameter."""
        _one_of("acceptance", self.acceptance, ACCEPTANCE)
        _one_of("schedule", self.schedule, SCHEDULES)
        _one_of("exactness", self.exactness, EXACTNESS)
        if not _is_number(self.confidence_threshold) or not 0 <= self.confidence_threshold <= 1:
            raise ConfigError(
                "confidence_threshold must be a number from 0 to 1; got "
                f"{self.confidence_threshold!r}."
            )
        if (
            not isinstance(self.max_draft_tokens, int)
            or isinstance(self.max_draft_tokens, bool)
            or not 1 <= self.max_draft_tokens <= MOST_DRAFT_TOKENS
        ):
            raise ConfigError(
                f"max_draft_tokens must be an integer from 1 to {MOST_DRAFT_TOKENS}; got "
                f"{self.max_draft_tokens!r}. To decode without drafting, pass drafter=None."
            )
        if not isinstance(self.never_slower, bool):
            raise ConfigError(f"never_slower must be True or False; got {self.never_slower!r}.")
        if not _is_number(self.recheck_margin) or not self.recheck_margin >= 0:
            raise ConfigError(
                f"recheck_margin must be a number of at least 0; got {self.recheck_margin!r}."
            )
        is_integer = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        if self.seed is not None and not is_integer:
            raise ConfigError(f"seed must be an integer or None; got {self.seed!r}.")
        resolve_policy(self.sparse)
        if self.queue is not None and not isinstance(self.queue, QueueConfig):
            raise ConfigError(f"queue must be a QueueConfig or None; got {self.queue!r}.")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DSparkConfig:
        """Build a configuration from a mapping; an unknown key is an error.

        Beside the fields, the published sections are understood: `verification` (batch_size,
        confidence_threshold, max_candidates), and `scheduling` and `batching` of the queue.

        Args:
            values: Field names or sections, and their values; `queue` may be a mapping.

        Returns:
            DSparkConfig: The checked configuration.

        Raises:
            ConfigError: If a key is unknown or a value is not allowed.
        """
        values = _unfolded(values)
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ConfigError(
                f"a setting must be one of {known}; got {unknown[0]!r}. Correct or remove it."
            )
        return cls(**values)

    @classmethod
    def from_yaml(cls, path: str | Path) -> DSparkConfig:
        """Read a configuration from a YAML file of field names and values.

        Args:
            path: The file; a missing one raises FileNotFoundError.

        Returns:
            DSparkConfig: The checked configuration.

        Raises:
            ConfigError: If the file does not hold a mapping, or as `from_dict`.
        """
        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} must be a YAML file; reading it failed: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(
                f"{path} must hold a mapping of setting names to values; got a "
                f"{type(values).__name__}."
            )
        return cls.from_dict(values)


VERIFICATION = {
    "confidence_threshold": "confidence_threshold",
    "max_candidates": "max_draft_tokens",
}
"""Keys of the published section `verification` and our fields; its batch_size is the queue's."""


def _unfolded(values: dict[str, Any]) -> dict[str, Any]:
    """Return a mapping of our fields, with what published sections say in their places."""
    found = {k: v for k, v in values.items() if k not in ("verification", "queue", *SECTIONS)}
    queue = values.get("queue")
    if isinstance(queue, QueueConfig):
        found["queue"] = queue
        queue = None
    if queue is not None and not isinstance(queue, dict):
        raise ConfigError(f"queue must be a mapping; got {queue!r}.")
    queued = dict(queue or {})
    for name in SECTIONS:
        if name in values:
            _give(queued, name, values[name], "queue")
    section = values.get("verification", {})
    if not isinstance(section, dict):
        raise ConfigError(f"verification must be a mapping; got {section!r}.")
    for key, value in section.items():
        if key == "batch_size":
            _give(queued, "max_rows", value, "verification")
        elif key in VERIFICATION:
            _give(found, VERIFICATION[key], value, "verification")
        else:
            allowed = ["batch_size", *VERIFICATION]
            raise ConfigError(
                f"verification may hold {allowed}; got {key!r}. Correct or remove it."
            )
    if "confidence_threshold" in section:
        # The section means the schedule that has a threshold.
        found.setdefault("schedule", "threshold")
    if queued:
        _give(found, "queue", QueueConfig.from_dict(queued), "queue")
    return found


def _give(values: dict[str, Any], name: str, value: Any, where: str) -> None:
    if name in values:
        raise ConfigError(f"{name} must be given once; got it again in {where!r}.")
    values[name] = value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {list(allowed)}; got {value!r}.")
