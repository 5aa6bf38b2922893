"""BenchSettings: what a run of the benchmark measures."""

from __future__ import annotations

from dataclasses import dataclass

from dspark_hf.errors import ConfigError

DEFAULT_SECTIONS = ("prompts", "context", "batch", "recheck")
SECTIONS = (*DEFAULT_SECTIONS, "scheduling", "drafter", "never-slower", "queue", "sparse")
NEED_DRAFTER = frozenset({"scheduling", "drafter"})
"""Sections about one drafter; they and "never-slower" run only where they are named."""
ROWS = (1, 2, 4, 8, 16)
DTYPES = ("bfloat16", "float32")
CONTEXTS = (256, 8192)
HALF_ONLY = frozenset({"recheck"})
"""Sections about rounding in 16 bits; in float32 there is nothing to measure."""


@dataclass(frozen=True)
class BenchSettings:
    """Settings of one run, checked at construction.

    Attributes:
        sections: What to measure; None for all of `DEFAULT_SECTIONS` that the dtype allows.
        dtype: "bfloat16" or "float32".
        model: Path or hub id of the target; None prepares SmolLM2-135M-Instruct.
        drafter: Path or hub id of a drafter to measure as well.
        repeats: Timed calls of each contender on each prompt.
        max_new_tokens: Tokens generated per prompt at most; "recheck" stays at 64 or fewer.
        limit: Prompts per group at most; None for all.
        threads: Threads torch may use; None leaves its choice.
        contexts: Lengths of the sections "context" and "sparse", in tokens; by default the latter
            has longer ones of its own.
        rows: Batch sizes of the section "scheduling".
    """

    sections: tuple[str, ...] | None = None
    dtype: str = "bfloat16"
    model: str | None = None
    drafter: str | None = None
    repeats: int = 3
    max_new_tokens: int = 128
    limit: int | None = None
    threads: int | None = None
    contexts: tuple[int, ...] = CONTEXTS
    rows: tuple[int, ...] = ROWS

    def __post_init__(self) -> None:
        """Refuse values that cannot be honoured, naming the option."""
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {list(DTYPES)}; got {self.dtype!r}.")
        for section in self.sections or ():
            if section not in SECTIONS:
                raise ConfigError(f"section must be one of {list(SECTIONS)}; got {section!r}.")
            if section in HALF_ONLY and self.dtype == "float32":
                raise ConfigError(
                    f"section {section!r} must run in bfloat16; got dtype 'float32', in which "
                    "nothing is rechecked. Drop the section or change the dtype."
                )
            if section in NEED_DRAFTER and self.drafter is None:
                raise ConfigError(
                    f"section {section!r} measures a drafter; got none. Name one with --drafter, "
                    "such as auto for the one that ships for this target."
                )
        for name in ("repeats", "max_new_tokens", "limit", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1; got {value}.")
        if not self.contexts or min(self.contexts) < 1:
            raise ConfigError(
                f"contexts must be one or more lengths of at least 1; got {list(self.contexts)}."
            )
        if not self.rows or min(self.rows) < 1:
            raise ConfigError(
                f"rows must be one or more batch sizes of at least 1; got {list(self.rows)}."
            )

    @property
    def chosen(self) -> tuple[str, ...]:
        """Sections to run, in order."""
        if self.sections is not None:
            return tuple(section for section in SECTIONS if section in self.sections)
        is_half = self.dtype != "float32"
        return tuple(name for name in DEFAULT_SECTIONS if is_half or name not in HALF_ONLY)
