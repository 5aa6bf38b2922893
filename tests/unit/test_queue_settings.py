"""Settings of the queue: fields, the published YAML sections, units, and what is refused."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from dspark_hf import DSparkConfig, QueueConfig
from dspark_hf.errors import ConfigError, DSparkError

BAD: list[tuple[str, Any]] = [
    ("min_rows", 0),
    ("min_rows", 1.5),
    ("max_rows", 0),
    ("max_rows", True),
    ("max_rows", "8"),
    ("max_wait_ms", -1),
    ("max_wait_ms", float("nan")),
    ("max_wait_ms", "soon"),
    ("dynamic", 1),
    ("target_latency_ms", 0),
    ("target_latency_ms", float("inf")),
    ("order", "lifo"),
    ("order", None),
    ("patience_s", -0.1),
    ("patience_s", None),
    ("preempt", "yes"),
    ("prefill_tokens", 0),
    ("prefill_tokens", 2.0),
    ("kv_budget", 0),
    ("kv_budget", -5),
    ("kv_budget", 1.5),
    ("kv_budget", True),
    ("max_pending", 0),
    ("when_full", "drop"),
    ("drafter_failures", 0),
    ("drafter_retry_s", -1),
    ("drafter_slow_factor", 0),
    ("prefix_cache", None),
    ("host_cache", 0),
    ("disk_cache", -1),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{n}={v!r}" for n, v in BAD])
def test_a_bad_value_is_refused_with_its_name_and_itself(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        QueueConfig(**{name: value})
    assert str(caught.value).startswith(f"{name} must be")
    assert repr(value) in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, DSparkError)


def test_the_least_rows_are_at_most_the_most() -> None:
    with pytest.raises(ConfigError, match="min_rows must be at most max_rows 4; got 5"):
        QueueConfig(min_rows=5, max_rows=4)


def test_settings_are_frozen_and_equal_by_value() -> None:
    settings = QueueConfig(max_rows=4)
    assert settings == QueueConfig(max_rows=4) != QueueConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.max_rows = 5


def test_every_field_is_documented() -> None:
    for field in dataclasses.fields(QueueConfig):
        assert f"        {field.name}: " in (QueueConfig.__doc__ or "")


DOCUMENT = (Path(__file__).parents[2] / "docs" / "queue.md").read_text()


def test_the_yaml_in_the_document_can_be_read(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", DOCUMENT, flags=re.S)
    queue = from_yaml(tmp_path, text).queue
    assert queue == QueueConfig(
        max_rows=16, min_rows=2, max_wait_ms=50.0, patience_s=5, prefill_tokens=128
    )


def test_the_document_names_every_field_and_its_default() -> None:
    found: dict[str, str] = {}
    for line in DOCUMENT.splitlines():
        names, _, rest = line.strip("| ").partition(" | ")
        fields = re.findall(r"`(\w+)`", names)
        defaults = rest.partition(" | ")[0].split(", ")
        if line.startswith("| `") and len(fields) == len(defaults):
            found.update(zip(fields, defaults, strict=True))
    for field in dataclasses.fields(QueueConfig):
        assert found[field.name] == repr(field.default).replace("'", '"')


TIMES: list[tuple[Any, float]] = [
    (50, 50.0),
    (0.5, 0.5),
    ("50", 50.0),
    ("50ms", 50.0),
    (" 50 ms ", 50.0),
    ("0.1s", 100.0),
    ("2s", 2000.0),
    ("500us", 0.5),
]


@pytest.mark.parametrize(("given", "ms"), TIMES, ids=[repr(t) for t, _ in TIMES])
def test_times_may_have_a_unit(given: Any, ms: float) -> None:
    assert QueueConfig.from_dict({"max_wait_ms": given}).max_wait_ms == pytest.approx(ms)
    batching = {"batching": {"max_wait_time": given}}
    assert QueueConfig.from_dict(batching).max_wait_ms == pytest.approx(ms)
    scheduling = {"scheduling": {"max_queue_delay": given}}
    assert QueueConfig.from_dict(scheduling).max_wait_ms == pytest.approx(ms)


@pytest.mark.parametrize("given", ["50 min", "-5ms", "ms", "", "1e3ms", "5 0ms"])
def test_a_time_that_is_none_is_refused_naming_the_key(given: str) -> None:
    with pytest.raises(ConfigError, match=r"batching\.max_wait_time must be a time such as '50ms'"):
        QueueConfig.from_dict({"batching": {"max_wait_time": given}})


def test_the_published_sections_mean_our_fields() -> None:
    scheduling = {
        "dynamic_batching": False,
        "min_batch_size": 2,
        "max_batch_size": 9,
        "max_queue_delay": "50ms",
    }
    wanted = QueueConfig(dynamic=False, min_rows=2, max_rows=9, max_wait_ms=50.0)
    assert QueueConfig.from_dict({"scheduling": scheduling}) == wanted
    batching = {"min_size": 2, "max_size": 9, "max_wait_time": "0.05s"}
    assert QueueConfig.from_dict({"batching": batching, "dynamic": False}) == wanted


UNKNOWN: list[tuple[dict[str, Any], str]] = [
    ({"rows": 4}, "got 'rows'"),
    ({"batching": {"size": 4}}, "batching may hold .*got 'size'"),
    ({"scheduling": {"min_size": 4}}, "scheduling may hold .*got 'min_size'"),
    ({"batching": 4}, "batching must be a mapping; got 4"),
    ({"scheduling": None}, "scheduling must be a mapping; got None"),
    ({"batching": {"max_size": 4}, "max_rows": 5}, "max_rows must be given once"),
    (
        {"batching": {"max_wait_time": 1}, "scheduling": {"max_queue_delay": 1}},
        "max_wait_ms must be given once",
    ),
]


@pytest.mark.parametrize(("values", "words"), UNKNOWN, ids=[w for _, w in UNKNOWN])
def test_what_is_unknown_or_given_twice_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        QueueConfig.from_dict(values)


YAML = """
verification:
  batch_size: 12
  confidence_threshold: 0.8
  max_candidates: 6
scheduling:
  dynamic_batching: true
  min_batch_size: 2
  max_queue_delay: 50ms
queue:
  patience_s: 3
  prefill_tokens: 64
acceptance: coupled
"""


def from_yaml(folder: Path, text: str) -> DSparkConfig:
    path = folder / "settings.yaml"
    path.write_text(text)
    return DSparkConfig.from_yaml(path)


def test_a_yaml_file_may_hold_fields_and_all_published_sections(tmp_path: Path) -> None:
    config = from_yaml(tmp_path, YAML)
    assert config == DSparkConfig(
        acceptance="coupled",
        schedule="threshold",
        confidence_threshold=0.8,
        max_draft_tokens=6,
        queue=QueueConfig(
            max_rows=12, min_rows=2, max_wait_ms=50.0, patience_s=3, prefill_tokens=64
        ),
    )


def test_sections_may_stand_inside_queue_too(tmp_path: Path) -> None:
    text = "queue:\n  batching: {min_size: 2, max_size: 4, max_wait_time: 10ms}\n  order: fifo\n"
    queue = QueueConfig(min_rows=2, max_rows=4, max_wait_ms=10.0, order="fifo")
    assert from_yaml(tmp_path, text) == DSparkConfig(queue=queue)


def test_a_threshold_does_not_override_a_schedule_that_is_named(tmp_path: Path) -> None:
    text = "verification: {confidence_threshold: 0.5}\nschedule: fixed\n"
    config = from_yaml(tmp_path, text)
    assert (config.schedule, config.confidence_threshold) == ("fixed", 0.5)


def test_without_a_queue_there_is_none(tmp_path: Path) -> None:
    assert from_yaml(tmp_path, "verification: {max_candidates: 3}\n").queue is None


WRONG: list[tuple[str, str]] = [
    ("verification: {batch: 3}\n", "verification may hold .*got 'batch'"),
    ("verification: 3\n", "verification must be a mapping; got 3"),
    ("verification: {max_candidates: 3}\nmax_draft_tokens: 4\n", "max_draft_tokens .*given once"),
    ("verification: {batch_size: 3}\nbatching: {max_size: 4}\n", "max_rows must be given once"),
    ("batching: {min_size: 2}\nqueue: {batching: {max_size: 4}}\n", "batching .*given once"),
    ("queue: {order: lifo}\n", "order must be one of .*got 'lifo'"),
    ("queue: fast\n", "queue must be a mapping; got 'fast'"),
    ("queue: [1]\n", r"queue must be a mapping; got \[1\]"),
    ("queues: {}\n", "a setting must be one of .*got 'queues'"),
    ("verification: {max_candidates: 99}\n", "max_draft_tokens must be an integer from 1 to 64"),
]


@pytest.mark.parametrize(("text", "words"), WRONG, ids=[t.strip() for t, _ in WRONG])
def test_a_yaml_file_that_cannot_be_honoured_is_refused(
    tmp_path: Path, text: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        from_yaml(tmp_path, text)


def test_a_queue_beside_its_sections_is_refused() -> None:
    values = {"queue": QueueConfig(), "batching": {"max_size": 4}}
    with pytest.raises(ConfigError, match="queue must be given once"):
        DSparkConfig.from_dict(values)
    assert DSparkConfig.from_dict({"queue": QueueConfig(max_rows=3)}).queue == QueueConfig(
        max_rows=3
    )


@pytest.mark.parametrize("queue", [{"max_rows": 3}, "fast", 4])
def test_a_queue_in_code_is_a_queue_config(queue: Any) -> None:
    with pytest.raises(ConfigError, match="queue must be a QueueConfig or None"):
        DSparkConfig(queue=queue)
