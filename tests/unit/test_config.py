"""Settings are frozen, refuse what they cannot honour, and say which setting and which value."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from dspark_hf import DSparkConfig
from dspark_hf.errors import ConfigError, DSparkError

BAD: list[tuple[str, Any]] = [
    ("acceptance", "greedy"),
    ("acceptance", None),
    ("schedule", "always"),
    ("schedule", True),
    ("exactness", "exact"),
    ("confidence_threshold", -0.01),
    ("confidence_threshold", 1.01),
    ("confidence_threshold", float("nan")),
    ("confidence_threshold", "high"),
    ("confidence_threshold", True),
    ("max_draft_tokens", 0),
    ("max_draft_tokens", -3),
    ("max_draft_tokens", 65),
    ("max_draft_tokens", 4.0),
    ("max_draft_tokens", "4"),
    ("max_draft_tokens", True),
    ("max_draft_tokens", None),
    ("never_slower", 1),
    ("never_slower", None),
    ("recheck_margin", -0.1),
    ("recheck_margin", float("nan")),
    ("recheck_margin", "wide"),
    ("recheck_margin", None),
    ("seed", 1.5),
    ("seed", "1"),
    ("seed", True),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{n}={v!r}" for n, v in BAD])
def test_a_bad_value_is_refused_with_its_name_and_itself(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        DSparkConfig(**{name: value})
    assert str(caught.value).startswith(f"{name} must be")
    assert repr(value) in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, DSparkError)


@pytest.mark.parametrize("name", ["acceptance", "schedule", "exactness"])
def test_a_refused_choice_lists_what_is_allowed(name: str) -> None:
    with pytest.raises(ConfigError, match=r"must be one of \[.*\]; got 'nonsense'"):
        DSparkConfig(**{name: "nonsense"})


@pytest.mark.parametrize(
    "values",
    [
        {"acceptance": "rejection"},
        {"acceptance": "coupled", "seed": -5},
        {"schedule": "fixed", "max_draft_tokens": 1},
        {"schedule": "auto", "max_draft_tokens": 64, "never_slower": False},
        {"schedule": "threshold", "confidence_threshold": 0},
        {"schedule": "prefix", "confidence_threshold": 1.0},
        {"schedule": "budget"},
        {"exactness": "recheck", "recheck_margin": 0},
        {"seed": 1 << 70},
    ],
)
def test_an_allowed_value_is_kept(values: dict[str, Any]) -> None:
    config = DSparkConfig(**values)
    assert {name: getattr(config, name) for name in values} == values


def test_settings_cannot_be_changed_and_equal_ones_are_equal() -> None:
    config = DSparkConfig(seed=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 4  # type: ignore[misc]
    assert config == DSparkConfig(seed=3) != DSparkConfig(seed=4)
    assert hash(config) == hash(DSparkConfig(seed=3))
    assert dataclasses.replace(config, seed=4) == DSparkConfig(seed=4)


def test_replacing_a_value_checks_it_again() -> None:
    with pytest.raises(ConfigError, match="max_draft_tokens"):
        dataclasses.replace(DSparkConfig(), max_draft_tokens=0)


def test_a_file_gives_the_settings_it_names_and_defaults_for_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "dspark.yaml"
    file.write_text("schedule: fixed\nmax_draft_tokens: 3\nnever_slower: false\nseed: 12\n")
    expected = DSparkConfig(schedule="fixed", max_draft_tokens=3, never_slower=False, seed=12)
    assert DSparkConfig.from_yaml(file) == expected
    assert DSparkConfig.from_yaml(str(file)) == expected


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "dspark.yaml"
    file.write_text("# nothing yet\n")
    assert DSparkConfig.from_yaml(file) == DSparkConfig()


def test_an_unknown_setting_is_named_beside_the_known_ones(tmp_path: Path) -> None:
    file = tmp_path / "dspark.yaml"
    file.write_text("schedule: fixed\nmax_draft_token: 3\n")
    with pytest.raises(ConfigError, match="'max_draft_token'") as caught:
        DSparkConfig.from_yaml(file)
    assert "max_draft_tokens" in str(caught.value)
    with pytest.raises(ConfigError, match="'no_such'"):
        DSparkConfig.from_dict({"no_such": 1})


@pytest.mark.parametrize("text", ["- schedule\n- fixed\n", "fixed\n", "3\n"])
def test_a_file_that_is_no_mapping_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "dspark.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="must hold a mapping") as caught:
        DSparkConfig.from_yaml(file)
    assert str(file) in str(caught.value)


def test_a_file_that_is_no_yaml_is_refused_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "dspark.yaml"
    file.write_text("schedule: [fixed\n")
    with pytest.raises(ConfigError) as caught:
        DSparkConfig.from_yaml(file)
    assert str(file) in str(caught.value)


def test_a_bad_value_in_a_file_is_refused_as_anywhere(tmp_path: Path) -> None:
    file = tmp_path / "dspark.yaml"
    file.write_text("max_draft_tokens: many\n")
    with pytest.raises(ConfigError, match=r"max_draft_tokens must be .*got 'many'"):
        DSparkConfig.from_yaml(file)


def test_a_missing_file_is_reported_as_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        DSparkConfig.from_yaml(tmp_path / "missing.yaml")
