"""QueueConfig: every setting of the batching queue, frozen and checked at construction."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dspark_hf.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

ORDERS = ("shortest", "fifo")
WHEN_FULL = ("error", "block")
_UNITS = {"": 1.0, "ms": 1.0, "s": 1000.0, "us": 0.001}


@dataclass(frozen=True)
class QueueConfig:
    """How requests share a model.

    Attributes:
        min_rows: Rows worth starting with: an idle queue waits up to `max_wait_ms` for as many.
        max_rows: Most rows decoded together.
        max_wait_ms: Longest wait for `min_rows`; 0 starts with whatever is there.
        dynamic: Whether fewer than `max_rows` are decoded together while tokens take longer than
            `target_latency_ms`.
        target_latency_ms: Time per token that a row should not exceed; None for no limit.
        order: "shortest" serves the least remaining work first, within a priority; "fifo" by
            arrival, within a priority.
        patience_s: A request that has waited so long goes before all that came after it, whatever
            their priority, and is not parked any more.
        preempt: Whether a row is parked, with its cache, for a request that should go first.
        prefill_tokens: Most prompt tokens fed in one step while others decode; None for all.
        kv_budget: Bytes of keys and values on the device (integer above 1), or share of its free
            memory (number up to 1).
        prefix_cache: Whether prompts that begin alike share what was computed for the beginning.
        host_cache: Bytes of host memory (integer above 1), or share of what is free (number up to
            1), for beginnings and parked rows.
        disk_cache: Bytes of disk behind it; 0 for none.
        disk_folder: Where they lie; None for `$DSPARK_HF_CACHE/kv`. Beginnings are there again
            after a restart.
        max_pending: Requests that may wait; beyond it `when_full` decides.
        when_full: "error" raises QueueFullError, "block" lets submit() wait.
        drafter_failures: Failures in a row after which a drafter is switched off for a while.
        drafter_retry_s: Seconds until a drafter that was switched off is tried again.
        drafter_slow_factor: A draft that takes this many times a target step counts as a failure.
    """

    min_rows: int = 1
    max_rows: int = 16
    max_wait_ms: float = 0.0
    dynamic: bool = True
    target_latency_ms: float | None = None
    order: str = "shortest"
    patience_s: float = 10.0
    preempt: bool = True
    prefill_tokens: int | None = 256
    kv_budget: float = 0.5
    prefix_cache: bool = True
    host_cache: float = 0.1
    disk_cache: int = 0
    disk_folder: str | None = None
    max_pending: int = 1024
    when_full: str = "error"
    drafter_failures: int = 3
    drafter_retry_s: float = 5.0
    drafter_slow_factor: float = 20.0

    def __post_init__(self) -> None:
        """Refuse values that cannot be honoured, naming the parameter."""
        for name in ("min_rows", "max_rows", "max_pending", "drafter_failures"):
            _whole(name, getattr(self, name), least=1)
        if self.prefill_tokens is not None:
            _whole("prefill_tokens", self.prefill_tokens, least=1)
        if self.min_rows > self.max_rows:
            raise ConfigError(
                f"min_rows must be at most max_rows {self.max_rows}; got {self.min_rows}."
            )
        _whole("disk_cache", self.disk_cache, least=0)
        for name in ("max_wait_ms", "patience_s", "drafter_retry_s"):
            _number(name, getattr(self, name), above=-1e-300)
        for name in ("kv_budget", "host_cache", "drafter_slow_factor"):
            _number(name, getattr(self, name), above=0)
        if self.target_latency_ms is not None:
            _number("target_latency_ms", self.target_latency_ms, above=0)
        for name in ("kv_budget", "host_cache"):
            value = getattr(self, name)
            if value > 1 and value != int(value):
                raise ConfigError(
                    f"{name} must be whole bytes, or a share of at most 1; got {value}."
                )
        for name, allowed in (("order", ORDERS), ("when_full", WHEN_FULL)):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name} must be one of {list(allowed)}; got {getattr(self, name)!r}."
                )
        for name in ("dynamic", "preempt", "prefix_cache"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False; got {getattr(self, name)!r}.")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> QueueConfig:
        """Build settings from a mapping of field names, or of the published sections.

        Sections: `scheduling` (dynamic_batching, min_batch_size, max_batch_size, max_queue_delay)
        and `batching` (min_size, max_size, max_wait_time). Times may have a unit, as in "50ms".

        Args:
            values: Fields or sections; both may be given, but not for one setting.

        Raises:
            ConfigError: If a key is unknown, given twice, or a value is not allowed.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        found: dict[str, Any] = {}
        for key, value in values.items():
            if key in SECTIONS:
                entries = _section(key, value)
            elif key in known:
                entries = {key: _in_ms(key, value) if key.endswith("_ms") else value}
            else:
                allowed = sorted(known | set(SECTIONS))
                raise ConfigError(f"a queue setting must be one of {allowed}; got {key!r}.")
            for name, entry in entries.items():
                if name in found:
                    raise ConfigError(f"{name} must be given once; got it again in {key!r}.")
                found[name] = entry
        return cls(**found)


SECTIONS = {
    "scheduling": {
        "dynamic_batching": "dynamic",
        "min_batch_size": "min_rows",
        "max_batch_size": "max_rows",
        "max_queue_delay": "max_wait_ms",
    },
    "batching": {"min_size": "min_rows", "max_size": "max_rows", "max_wait_time": "max_wait_ms"},
}
"""Published section -> its keys -> our fields."""


def _section(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a mapping; got {value!r}.")
    entries = {}
    for key, entry in value.items():
        if key not in SECTIONS[name]:
            raise ConfigError(
                f"{name} may hold {sorted(SECTIONS[name])}; got {key!r}. Correct or remove it."
            )
        field = SECTIONS[name][key]
        entries[field] = _in_ms(f"{name}.{key}", entry) if field.endswith("_ms") else entry
    return entries


def _in_ms(name: str, value: Any) -> Any:
    """Return a time in milliseconds: a number, or text such as "50ms" or "0.1s"."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(us|ms|s)?\s*", value)
    if match is None:
        raise ConfigError(f"{name} must be a time such as '50ms' or '0.1s'; got {value!r}.")
    return float(match[1]) * _UNITS[match[2] or ""]


def _whole(name: str, value: Any, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}; got {value!r}.")


def _number(name: str, value: Any, *, above: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not value > above:
        bound = "above 0" if above >= 0 else "of at least 0"
        raise ConfigError(f"{name} must be a number {bound}; got {value!r}.")
