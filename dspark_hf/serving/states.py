"""States of replicas and of a router's groups, for Prometheus; needs prometheus-client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from prometheus_client.metrics_core import Metric

LOADING, DEAD = "loading", "dead"
"""States of a replica, as its queue names them."""
OF_REPLICAS: tuple[tuple[str, str, Callable[[Mapping[str, Any]], float]], ...] = (
    ("replica_alive", "Whether it has a process", lambda r: r["state"] != DEAD),
    ("replica_ready", "Whether it takes requests", lambda r: r["state"] not in (LOADING, DEAD)),
    (
        "replica_restarting", "Whether it is being started again",
        lambda r: r["state"] == LOADING and r["restarts"] > 0,
    ),
    ("replica_answers", "Whether it told its metrics in time", lambda r: r["queue"] is not None),
    ("replica_requests", "Requests it decodes or lets wait", lambda r: r["num_requests"]),
)  # fmt: skip
OF_GROUPS = (
    ("group_open", "Whether it takes requests", "open"),
    ("group_expected_delay_seconds", "Expected wait of a request", "expected_delay_s"),
)


def states(metrics: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield states of replicas and groups, where there are any.

    Args:
        metrics: Of a queue, of replicas or of a router.
    """
    if "groups" in metrics:
        yield from _of_groups(metrics)
        fronts = {name: group for name, group in metrics["groups"].items() if "replicas" in group}
        yield from _of_replicas(["group"], [([name], front) for name, front in fronts.items()])
    elif "replicas" in metrics:
        yield from _of_replicas([], [([], metrics)])


def _of_replicas(
    labels: list[str], fronts: Sequence[tuple[list[str], Mapping[str, Any]]]
) -> Iterator[Metric]:
    if not fronts:
        return
    for name, text, value in OF_REPLICAS:
        found = GaugeMetricFamily(f"dspark_{name}", text, labels=[*labels, "replica"])
        for values, front in fronts:
            for replica in front["replicas"]:
                found.add_metric([*values, str(replica["place"])], float(value(replica)))
        yield found
    restarts = CounterMetricFamily(
        "dspark_replica_restarts", "Times it was started again", labels=[*labels, "replica"]
    )
    moves = CounterMetricFamily(
        "dspark_moves", "Times a request went on in another replica", labels=labels
    )
    present = GaugeMetricFamily("dspark_requests_present", "Requests that are there", labels=labels)
    for values, front in fronts:
        for replica in front["replicas"]:
            restarts.add_metric([*values, str(replica["place"])], replica["restarts"])
        moves.add_metric(values, front["moves"])
        present.add_metric(values, front["requests"])
    yield from (restarts, moves, present)


def _of_groups(metrics: Mapping[str, Any]) -> Iterator[Metric]:
    for name, text, key in OF_GROUPS:
        found = GaugeMetricFamily(f"dspark_{name}", text, labels=["group"])
        for group, value in metrics[key].items():
            found.add_metric([group], float(value))
        yield found
    left = GaugeMetricFamily(
        "dspark_group_left", "Whether it is left for its load", labels=["group"]
    )
    for group in metrics["groups"]:
        left.add_metric([group], float(group in metrics["left"]))
    breakers = GaugeMetricFamily(
        "dspark_group_breaker", "State of each group's breaker", labels=["group", "state"]
    )
    for group, state in metrics["breakers"].items():
        breakers.add_metric([group, state], 1)
    decisions = CounterMetricFamily(
        "dspark_group_decisions", "Requests that a group took", labels=["group", "reason"]
    )
    for group, reasons in metrics["decisions"].items():
        for reason, count in reasons.items():
            decisions.add_metric([group, reason], count)
    yield from (left, breakers, decisions)
