"""When a replica counts as dead, and how often it is started again."""

from __future__ import annotations

from typing import Any

import pytest

from dspark_hf.errors import ConfigError
from dspark_hf.serving.liveness import Heart, RestartLimit
from dspark_hf.serving.replica_settings import ReplicaConfig


def test_silence_counts_only_while_the_observer_is_awake() -> None:
    heart = Heart(limit_s=1.0, tick_s=0.1)
    assert not heart.is_silent(0.0)
    # The observer itself slept for a minute.
    assert not heart.is_silent(60.0)
    assert heart.silent_s == pytest.approx(0.2)
    assert not heart.is_silent(60.15)
    heart.beat()
    assert not heart.is_silent(60.25)
    times = [60.25 + 0.1 * i for i in range(1, 13)]
    assert [heart.is_silent(now) for now in times] == [False] * 10 + [True] * 2


def test_restarts_are_limited_within_a_window() -> None:
    limit = RestartLimit(most=2, window_s=10.0)
    assert [limit.take(now) for now in (0.0, 1.0, 9.0, 10.5, 10.6, 11.5)] == [
        True, True, False, True, False, True,
    ]  # fmt: skip
    assert limit.total == 4


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"heartbeat_s": 0}, "heartbeat_s must be seconds above 0; got 0"),
        ({"silence_s": 0.1}, "silence_s must be at least two beats, 0.2 s; got 0.1"),
        ({"max_restarts": -1}, "max_restarts must be an integer of at least 0; got -1"),
        ({"num_threads": 0}, "num_threads must be an integer of at least 1; got 0"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ReplicaConfig(**settings)
