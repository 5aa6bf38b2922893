"""Figures of an evaluation on made-up rounds, their tables, plots, and the prompts behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_hf.benchmarks.markers import as_markdown, update_markers
from dspark_hf.data import GROUPS, load_calibration_prompts, load_prompts
from dspark_hf.errors import ConfigError
from dspark_hf.evaluation import figures, plots
from dspark_hf.evaluation.acceptance import (
    AcceptanceSettings,
    _against,
    _by_group,
    _calibration,
    _group_figures,
)
from dspark_hf.evaluation.prompts import calibration_prompts, evaluation_prompts, read_prompts
from dspark_hf.evaluation.rounds import BlockRounds, Observed, PromptRounds
from dspark_hf.evaluation.tables import all_tables
from dspark_hf.metrics import SpeculationRecord
from dspark_hf.verification.costs import StepCosts
from dspark_hf.verification.scaling import Scaling, Scalings
from dspark_hf.verification.schedules.base import Draft, RowState
from dspark_hf.verification.schedules.confident import ThresholdSchedule

LEVELS = {"chat": 0.3, "code": 0.9, "maths": 0.7}
N = 7


def decoded(gain: float = 1.0, *, seed: int = 0, confident: bool = True) -> list[PromptRounds]:
    """Prompts of three groups at two temperatures, with confidences that overstate."""
    generator, found = np.random.default_rng(seed), []
    for temperature in (0.0, 1.0):
        for group, level in LEVELS.items():
            for number in range(4):
                rounds, record = [], SpeculationRecord(new_tokens=1)
                for _ in range(40):
                    odds = generator.normal(np.log(level / (1 - level)) - 0.4 * temperature, 1, N)
                    truth = gain / (1 + np.exp(-odds))
                    accepted = int(np.cumprod(generator.random(N) < truth).sum())
                    logits = tuple(float(x) for x in 2 * odds) if confident else ()
                    rounds.append(Observed(logits, N, N, accepted))
                    record.count_round(N, N, accepted, cut=False)
                    record.new_tokens += accepted + 1
                found.append(
                    PromptRounds(f"{group}-{number}", group, temperature, record, tuple(rounds))
                )
    return found


def results_of(ours: list[PromptRounds], stored: Scalings | None = None) -> dict[str, Any]:
    theirs = decoded(0.7, seed=1)
    run = {
        "section": "acceptance", "dtype": "bfloat16", "drafter": "toy", "num_drafts": N,
        "date": "2031-05-06 07:08:09", "versions": {"torch": "2.13", "transformers": "5.24"},
        "settings": {"max_new_tokens": 64, "temperatures": [0.0, 1.0], "seed": 0},
        "groups": _by_group(ours, lambda part: _group_figures(part, N)),
        "calibration": _calibration(ours, N, stored),
        "against": {"other": _against(ours, theirs, (0.0, 1.0))},
        "rows": [{"prompt": entry.prompt} for entry in ours],
    }  # fmt: skip
    return {"model": {"name": "m"}, "runs": {"acceptance-bfloat16": run}}


@pytest.fixture(scope="module")
def ours() -> list[PromptRounds]:
    return decoded()


@pytest.fixture(scope="module")
def rounds() -> BlockRounds:
    logits = np.array([[2.0, -1.0, 3.0], [0.5, 0.5, 0.5], [3.0, 3.0, 3.0], [-2.0, 1.0, 1.0]])
    return BlockRounds(logits, np.array([3, 3, 3, 3]), np.array([2, 0, 3, 1]))


def test_depths_count_what_shorter_blocks_would_have_kept(rounds: BlockRounds) -> None:
    found = figures.depth_figures(rounds)
    assert [at["accepted_length"] for at in found] == [1.75, 2.25, 2.5]
    assert [at["verified_per_round"] for at in found] == [1, 2, 3]
    assert [at["share_accepted"] for at in found] == [0.75, 0.625, 0.5]


def test_positions_count_only_rounds_that_got_there() -> None:
    partial = BlockRounds(np.zeros((3, 3)), np.array([3, 2, 1]), np.array([1, 2, 1]))
    found = figures.position_figures(partial)
    assert [(at["tested"], at["accepted"]) for at in found] == [(3, 3), (2, 1), (0, 0)]
    assert [at["rate"] for at in found] == [1.0, 0.5, None]


def test_the_sweep_cuts_where_the_schedule_would(rounds: BlockRounds) -> None:
    for at in figures.threshold_figures(rounds, Scaling.plain(3)):
        schedule = ThresholdSchedule(3, StepCosts(), at["threshold"])
        stated = 1 / (1 + np.exp(-rounds.logits))
        drafts = [Draft(3, 0, row.tolist()) for row in stated]
        lengths = schedule.cut([RowState(i, 9, 9) for i in range(4)], drafts)
        assert at["verified_per_round"] == np.mean(lengths)
        kept = np.minimum(rounds.accepted, lengths)
        assert at["accepted_length"] == pytest.approx(kept.mean() + 1)
    first = figures.threshold_figures(rounds, Scaling.plain(3))[0]
    assert (first["threshold"], first["verified_per_round"]) == (0.0, 3)


def test_more_accepted_drafts_are_counted_per_round_with_an_interval() -> None:
    better, worse = decoded(1.0), decoded(0.7, seed=1)
    found = figures.gain_figures(better, worse)
    ratio = figures.accepted_per_round(better) / figures.accepted_per_round(worse)
    assert found["gain"] == pytest.approx(ratio - 1, abs=1e-4)
    low, high = found["interval"]
    assert 0 < low < found["gain"] < high
    silent = [PromptRounds("p", "all", 0.0, SpeculationRecord(), ())]
    assert figures.gain_figures(silent, silent) == {"gain": None, "interval": None}


def test_lengths_are_those_of_the_metrics(ours: list[PromptRounds]) -> None:
    found = figures.length_figures(ours)
    assert found["accepted_length"] == pytest.approx(found["accepted_per_round"] + 1, abs=1e-3)
    assert found["verified"] == found["rounds"] * N


def test_confidences_are_measured_on_prompts_that_were_not_fitted_on(
    ours: list[PromptRounds],
) -> None:
    found = _calibration(ours, N, None)
    assert found is not None
    assert "every other prompt" in found["source"]
    total = found["groups"][-1]
    assert (total["group"], total["rounds"]) == ("all", 40 * 6)
    assert total["after"]["ece"] < total["before"]["ece"]
    assert sum(entry["count"] for entry in total["after"]["reliability"]) == 240 * N
    halved = Scaling((2.0,) * N, (0.0,) * N)
    stored = _calibration(ours, N, Scalings(halved, Scaling.plain(N)))
    assert stored is not None
    for entry in stored["groups"]:
        assert entry["scaling"]["temperatures"] == [1.0 if entry["temperature"] else 2.0] * N
    assert stored["groups"][-1]["rounds"] == 480
    assert _calibration(decoded(confident=False), N, None) is None


def test_rounds_without_confidences_do_not_disturb_those_with() -> None:
    mixed = [
        PromptRounds(a.prompt, a.group, a.temperature, a.record, (*a.rounds, *b.rounds))
        for a, b in zip(decoded(), decoded(0.1, seed=5, confident=False), strict=True)
    ]
    halved = Scaling((2.0,) * N, (0.0,) * N)
    scalings = Scalings(halved, halved)
    assert _calibration(mixed, N, scalings) == _calibration(decoded(), N, scalings)
    assert _group_figures(mixed, N, has_blocks=False)["depth"] == []


def test_tables_fill_a_document(ours: list[PromptRounds]) -> None:
    tables = all_tables(results_of(ours))
    assert sorted(tables) == [
        "acceptance", "against", "calibration", "depth", "positions", "threshold",
    ]  # fmt: skip
    text = "<!-- eval:acceptance -->\n<!-- /eval --> <!-- bench:overview --><!-- /bench -->"
    filled, names = update_markers(text, tables, kind="eval")
    assert names == ["acceptance"]
    assert "| chat | greedy |" in filled
    assert filled.endswith("<!-- bench:overview --><!-- /bench -->")
    assert update_markers(filled, tables, kind="eval")[0] == filled
    for parts in tables.values():
        widths = {line.count(" | ") for line in as_markdown(parts).splitlines() if line[:1] == "|"}
        assert len(widths) == 1
    silent = all_tables(results_of(decoded(confident=False)))
    assert "calibration" not in silent


def test_plots_are_written_for_what_there_is(
    ours: list[PromptRounds], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    names = [path.name for path in plots.draw_plots(results_of(ours), tmp_path)]
    assert names == [
        "acceptance_by_position.png", "accepted_length.png", "reliability.png", "threshold.png",
    ]  # fmt: skip
    assert all((tmp_path / name).read_bytes()[:4] == b"\x89PNG" for name in names)
    monkeypatch.setattr(plots, "save", lambda draw, run, path: path)
    few = plots.draw_plots(results_of(decoded(confident=False)), tmp_path)
    assert [path.stem for path in few] == ["acceptance_by_position", "accepted_length"]


def test_plots_ask_for_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"dspark-hf\[eval\]"):
        plots.require_matplotlib()


def test_prompts_of_evaluation_and_calibration_never_meet() -> None:
    judged, fitted = evaluation_prompts(), calibration_prompts()
    assert {prompt.id for prompt in judged}.isdisjoint(prompt.id for prompt in fitted)
    assert {prompt.text for prompt in judged}.isdisjoint(prompt.text for prompt in fitted)
    assert (judged, fitted) == (load_prompts(), load_calibration_prompts())
    for part in (evaluation_prompts(3), calibration_prompts(3)):
        assert [prompt.group for prompt in part] == [g for g in GROUPS for _ in range(3)]


def test_a_prompt_file_is_read_by_group(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "a", "group": "x", "id": "one"}\n\n{"text": "b"}\n'
        '{"prompt": "c", "group": "x"}\n'
    )
    found = read_prompts(path, limit=1)
    assert [(p.id, p.group, p.text) for p in found] == [("one", "x", "a"), ("3", "all", "b")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON; line 1"),
        ('{"prompt": 3}', "must have a text under one of"),
        ("[]", "must have a text"),
        ("\n", "at least one line"),
    ],
)
def test_a_wrong_prompt_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_prompts(path)
    with pytest.raises(ConfigError, match="readable JSONL"):
        read_prompts(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 1}, "max_new_tokens must be at least 2"),
        ({"temperatures": ()}, "temperatures must be"),
        ({"temperatures": (-0.5,)}, "temperatures must be"),
    ],
)
def test_settings_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AcceptanceSettings("lookup", **changes)
