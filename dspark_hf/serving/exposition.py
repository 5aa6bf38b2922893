"""Metrics in the text form that Prometheus reads; needs prometheus-client.

Of one queue as they are; of replicas with the label `replica`, of a router's groups with `group`,
and their counters once more added up, under names that begin with `dspark_all_`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from dspark_hf.serving.metrics import QUANTILES
from dspark_hf.serving.states import states

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from prometheus_client.metrics_core import Metric

PREFIX, ALL = "dspark_", "all_"
NO_LABELS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Family:
    """One metric of the text.

    Attributes:
        name: Without prefix; a counter's gets `_total` behind it.
        help: What it is.
        path: Keys that lead to its value; the last one may lead to a mapping.
        label: What the mapping's keys are; None for a single value.
        is_counter: Whether it only grows.
    """

    name: str
    help: str
    path: tuple[str, ...]
    label: str | None = None
    is_counter: bool = False


def _counter(name: str, text: str, *path: str, label: str | None = None) -> Family:
    return Family(name, text, path, label, is_counter=True)


def _gauge(name: str, text: str, *path: str, label: str | None = None) -> Family:
    return Family(name, text, path, label)


DRAFT_STAGES = ("drafted", "verified", "accepted")
FAMILIES = (
    _gauge("requests_waiting", "Requests that wait, parked ones included", "requests", "waiting"),
    _gauge("requests_parked", "Requests that were parked for others", "requests", "parked"),
    _gauge("requests_running", "Requests that run", "requests", "running"),
    _gauge("oldest_wait_seconds", "Longest wait so far", "requests", "oldest_s"),
    _counter("requests", "Requests that ended, by outcome", "ended", label="outcome"),
    _counter("requests_alone", "Of these, in the model's own loop", "alone"),
    _gauge("batch_rows", "Rows that run", "batch", "rows"),
    _gauge("batch_rows_limit", "Most rows at present", "batch", "limit"),
    _gauge("batch_rows_max", "Most rows by the settings", "batch", "max_rows"),
    _gauge("batch_utilisation", "Rows in rounds / most rows", "batch", "utilisation"),
    _gauge("queue_delay_seconds", "Submitted to begun", "delay_s", "queue", label="quantile"),
    _gauge(
        "first_token_seconds", "Submitted to first token", "delay_s", "first_token",
        label="quantile",
    ),
    _gauge("token_seconds", "Time per token", "delay_s", "per_token", label="quantile"),
    _gauge("new_tokens_per_second", "New tokens", "speed", "new_tokens_per_s"),
    _gauge("prompt_tokens_per_second", "Prompt tokens fed", "speed", "prompt_tokens_per_s"),
    _gauge("accepted_length", "Tokens per round", "speculation", "accepted_length"),
    _gauge("hit_rate", "Accepted / drafted", "speculation", "hit_rate"),
    _gauge("verified_per_row", "Drafts verified a round", "speculation", "verified_per_row"),
    _gauge("target_bytes_per_second", "Read by target forwards", "bandwidth", "bytes_per_s"),
    _gauge("weight_bytes", "The target's weights", "bandwidth", "weight_bytes"),
    _gauge(
        "machine_bytes_per_second", "What copying memory moves", "bandwidth", "machine_bytes_per_s"
    ),
    _gauge("kv_tokens", "Tokens that running rows hold", "kv", "tokens"),
    _gauge("kv_bytes", "Keys and values held", "kv", "bytes", label="tier"),
    _gauge("kv_budget_bytes", "Most keys and values", "kv", "budget_bytes", label="tier"),
    _gauge("kv_use", "Share of the device's budget in use", "kv", "use"),
    _counter("kv_damaged_files", "Files found damaged", "kv", "damaged_files"),
    _counter("prefix_asked_tokens", "Prompt tokens looked up", "prefix", "asked"),
    _counter("prefix_found_tokens", "Prompt tokens found", "prefix", "found"),
    _counter("preemptions", "Times a request was parked", "preemptions"),
    _counter("steps", "Steps", "total", "steps"),
    _counter("step_seconds", "Seconds in steps", "total", "seconds"),
    _counter("draft_seconds", "Seconds in drafters", "total", "draft_s"),
    _counter("verify_seconds", "Seconds in target forwards", "total", "verify_s"),
    _counter("new_tokens", "New tokens", "total", "new_tokens"),
    _counter("prompt_tokens", "Prompt tokens fed", "total", "prompt_tokens"),
    _counter("rounds", "Row rounds", "total", "rounds"),
    *(
        _counter(f"{stage}_tokens", f"Draft tokens {stage}", "total", stage)
        for stage in DRAFT_STAGES
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A queue's metrics, and which queue it is.

    Attributes:
        labels: The group and replica, where there are any.
        metrics: Of `GenerationQueue.metrics()`.
    """

    labels: Mapping[str, str]
    metrics: Mapping[str, Any]


def exposition(metrics: Mapping[str, Any]) -> str:
    """Return metrics as Prometheus reads them.

    Args:
        metrics: Of a queue, of replicas or of a router: their `metrics()`.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(metrics))
    return generate_latest(registry).decode()


class _Snapshot(Collector):
    """Metrics as they were once."""

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self.metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yield every metric that has a value."""
        sources = list(queues_of(self.metrics))
        for family in FAMILIES:
            yield from collected(family, sources)
        if sources:
            yield _breakers(sources)
        yield from states(self.metrics)
        if "groups" in self.metrics or "replicas" in self.metrics:
            counters = [family for family in FAMILIES if family.is_counter]
            for family in counters:
                summed = replace(family, name=ALL + family.name, help=f"{family.help}, in all")
                yield from collected(summed, list(summed_of(self.metrics)))


def queues_of(
    metrics: Mapping[str, Any], labels: Mapping[str, str] = NO_LABELS
) -> Iterator[Source]:
    """Yield every single queue's metrics.

    Args:
        metrics: Of a queue, of replicas or of a router.
        labels: That all of them have.
    """
    if "groups" in metrics:
        for name, group in metrics["groups"].items():
            yield from queues_of(group, {**labels, "group": name})
    elif "replicas" in metrics:
        for replica in metrics["replicas"]:
            # Without an answer in time there is nothing to say.
            if replica["queue"] is not None:
                yield Source({**labels, "replica": str(replica["place"])}, replica["queue"])
    elif "batch" in metrics:
        yield Source(labels, metrics)


def summed_of(metrics: Mapping[str, Any]) -> Iterator[Source]:
    """Yield what replicas come to together, by group where there are groups."""
    if "groups" not in metrics:
        yield Source(NO_LABELS, metrics)
        return
    for name, group in metrics["groups"].items():
        if "ended" in group:
            yield Source({"group": name}, group)


def collected(family: Family, sources: Sequence[Source]) -> Iterator[Metric]:
    """Yield a family's values of all sources, if there are any.

    Args:
        family: The metric.
        sources: Whose.
    """
    names = _names(sources)
    labels = [*names, *([] if family.label is None else [family.label])]
    kind = CounterMetricFamily if family.is_counter else GaugeMetricFamily
    found = kind(PREFIX + family.name, family.help, labels=labels)
    for source in sources:
        value: Any = source.metrics
        for key in family.path:
            value = value[key]
        values = {"": value} if family.label is None else value
        for key, number in values.items():
            if number is not None:
                shown = str(QUANTILES[key]) if family.label == "quantile" else key
                own = [] if family.label is None else [shown]
                found.add_metric([*_values(names, source), *own], number)
    if found.samples:
        yield found


def _breakers(sources: Sequence[Source]) -> Metric:
    """Return each drafter's state as a series that is 1."""
    name, text, names = (
        PREFIX + "drafter_breaker",
        "State of each drafter's breaker",
        _names(sources),
    )
    found = GaugeMetricFamily(name, text, labels=[*names, "drafter", "state"])
    for source in sources:
        for drafter, state in source.metrics["breakers"].items():
            found.add_metric([*_values(names, source), drafter, state], 1)
    return found


def _names(sources: Sequence[Source]) -> list[str]:
    """Return the labels that some source has, in order."""
    return list(dict.fromkeys(name for source in sources for name in source.labels))


def _values(names: Sequence[str], source: Source) -> list[str]:
    # An empty label is none, to Prometheus: a group of one queue has no replicas.
    return [source.labels.get(name, "") for name in names]
