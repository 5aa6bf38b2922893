"""A throughput profile on disk: found again, and not used when it is broken, old or another's."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from dspark_hf.verification.profile import (
    MOST_DAYS,
    StepSeconds,
    ThroughputProfile,
    mark_stale,
    profile_folder,
    profile_path,
)

KEY = {"machine": "a CPU", "threads": "1", "torch": "2.9", "config": "abc"}
ENTRIES = (StepSeconds(1, 1, 256, 0.05), StepSeconds(1, 4, 256, 0.06), StepSeconds(4, 4, 256, 0.09))


def measured(days_ago: float = 0.0) -> ThroughputProfile:
    date = datetime.now(timezone.utc) - timedelta(days=days_ago)
    return ThroughputProfile(KEY, date.isoformat(timespec="seconds"), ENTRIES)


def test_a_profile_comes_back_as_it_was(tmp_path: Path) -> None:
    profile = measured()
    path = profile.save(tmp_path / "not" / "there")
    assert ThroughputProfile.load(path.parent, dict(KEY)) == profile
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert profile.seconds_by_width() == {1: 0.05, 4: 0.06}
    assert profile.seconds_by_rows() == {1: 0.05, 4: 0.09}


def test_there_is_no_profile_before_one_was_stored(tmp_path: Path) -> None:
    assert ThroughputProfile.load(tmp_path / "absent", KEY) is None


@pytest.mark.parametrize("name", KEY)
def test_a_profile_of_another_machine_version_or_model_is_not_found(
    tmp_path: Path, name: str
) -> None:
    measured().save(tmp_path)
    assert ThroughputProfile.load(tmp_path, {**KEY, name: "another"}) is None


def test_a_file_that_holds_another_key_than_its_name_says_is_not_used(tmp_path: Path) -> None:
    path = measured().save(tmp_path)
    other = {**KEY, "threads": "8"}
    path.rename(profile_path(tmp_path, other))
    assert ThroughputProfile.load(tmp_path, other) is None


@pytest.mark.parametrize(("days", "is_used"), [(MOST_DAYS - 1, True), (MOST_DAYS + 1, False)])
def test_an_old_profile_is_not_used(tmp_path: Path, days: float, is_used: bool) -> None:
    measured(days).save(tmp_path)
    assert (ThroughputProfile.load(tmp_path, KEY) is not None) == is_used


def test_a_profile_marked_stale_is_not_used_until_it_is_measured_anew(tmp_path: Path) -> None:
    measured().save(tmp_path)
    mark_stale(tmp_path, KEY)
    assert ThroughputProfile.load(tmp_path, KEY) is None
    measured().save(tmp_path)
    assert ThroughputProfile.load(tmp_path, KEY) is not None


def test_marking_a_profile_that_is_gone_is_harmless(tmp_path: Path) -> None:
    mark_stale(tmp_path, KEY)
    assert not list(tmp_path.iterdir())


def _with(**changes: object) -> str:
    values = {"format": 1, "key": KEY, "date": measured().date, "entries": []}
    return json.dumps({**values, **changes})


CORRUPTED = {
    "empty": "",
    "half": _with()[:40],
    "no_mapping": "[1, 2]",
    "another_format": _with(format=0),
    "no_entries": json.dumps({"format": 1, "key": KEY, "date": measured().date}),
    "odd_entry": _with(entries=[{"num_rows": 1}]),
    "negative": _with(entries=[{"num_rows": 1, "num_tokens": 1, "context": 1, "seconds": -1.0}]),
    "odd_date": _with(date="yesterday"),
    "no_time_zone": _with(date="2026-01-01T00:00:00"),
    "future": _with(date="2999-01-01T00:00:00+00:00"),
    "binary": b"\xff\xfe\x00".decode("latin-1"),
}


@pytest.mark.parametrize("name", CORRUPTED)
def test_a_corrupted_file_is_no_profile_and_is_replaced_by_the_next(
    tmp_path: Path, name: str
) -> None:
    path = profile_path(tmp_path, KEY)
    path.write_bytes(CORRUPTED[name].encode("latin-1"))
    assert ThroughputProfile.load(tmp_path, KEY) is None
    mark_stale(tmp_path, KEY)
    measured().save(tmp_path)
    assert ThroughputProfile.load(tmp_path, KEY) is not None


def test_profiles_live_where_the_users_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_HF_CACHE", "/somewhere")
    assert profile_folder() == Path("/somewhere/profiles")
    monkeypatch.delenv("DSPARK_HF_CACHE")
    assert profile_folder() == Path("~/.cache/dspark_hf/profiles").expanduser()
