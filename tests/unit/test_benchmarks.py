"""The benchmark cannot flatter: order, pairing, comparison and files on made-up timings."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import tiny
from benchmark_runs import MACHINE, THREE_CALLS, file_of, run_of, sample
from dspark_hf.benchmarks import comparing, contenders, environment, results, timing
from dspark_hf.benchmarks.bench import warm_up
from dspark_hf.benchmarks.comparing import Difference
from dspark_hf.benchmarks.contenders import Contender
from dspark_hf.benchmarks.contest import Item, Outcome, hold, new_tokens, whole_call
from dspark_hf.benchmarks.prompts import alternating, batch_item
from dspark_hf.benchmarks.settings import BenchSettings
from dspark_hf.benchmarks.stats import paired_ratios, spread, summarise
from dspark_hf.errors import ConfigError


class FakeClock:
    """Moves only when told to; CPU time runs at half the speed of wall time."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> timing.Clock:
        return timing.Clock(wall=lambda: self.now, cpu=lambda: self.now / 2)


class SlowModel:
    """Appends fixed tokens and takes a fixed time for it."""

    def __init__(self, clock: FakeClock, tokens: list[int], seconds: float) -> None:
        self.clock, self.tokens, self.seconds = clock, tokens, seconds
        self.generation_config = SimpleNamespace(eos_token_id=[7, 8])

    def generate(self, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.clock.now += self.seconds
        return torch.cat([input_ids, torch.tensor([self.tokens])], dim=-1)


def item(name: str = "chat-01", group: str = "chat", length: int = 3) -> Item:
    ids = torch.arange(1, length + 1)[None]
    return Item(name, group, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 4)


def outcome(contender: str, texts: list[list[int]], repeat: int = 0) -> Outcome:
    num_tokens = sum(map(len, texts))
    return Outcome("chat-01", contender, repeat, 0, 1.0, 1.0, num_tokens, texts)


def test_a_call_takes_what_the_clocks_say() -> None:
    fake = FakeClock()
    took = timing.timed(lambda: setattr(fake, "now", 3.0), fake.clock())
    assert (took.wall_s, took.cpu_s) == (3.0, 1.5)


def test_over_as_many_turns_as_entries_each_takes_every_place_once() -> None:
    turns = [timing.rotated("abc", turn) for turn in range(3)]
    assert turns == [list("abc"), list("bca"), list("cab")]
    assert all(sorted(place) == list("abc") for place in zip(*turns, strict=True))


def test_contenders_take_turns_on_each_item_before_the_next_one() -> None:
    fake, watcher = FakeClock(), Mock()
    rivals = [
        Contender("plain", SlowModel(fake, [5, 6], 2.0)),
        Contender("other", SlowModel(fake, [5, 7, 9], 1.0)),
    ]
    how = {"clock": fake.clock(), "observer": watcher, "section": "prompts"}
    outcomes = hold(rivals, [item("one"), item("two")], 2, whole_call, **how)
    order = [(o.repeat, o.item, o.contender) for o in outcomes]
    assert order == [
        (0, "one", "plain"), (0, "one", "other"), (0, "two", "other"), (0, "two", "plain"),
        (1, "one", "other"), (1, "one", "plain"), (1, "two", "plain"), (1, "two", "other"),
    ]  # fmt: skip
    watcher.start.assert_called_once_with("prompts", 8)
    assert watcher.advance.call_count == 8
    took = {(o.contender, o.wall_s, o.cpu_s, o.num_tokens) for o in outcomes}
    assert took == {("plain", 2.0, 1.0, 2), ("other", 1.0, 0.5, 2)}


def test_tokens_behind_a_rows_own_end_do_not_count() -> None:
    batch = item(length=2)
    sequences = torch.tensor([[1, 1, 4, 7, 7, 7], [1, 1, 4, 5, 6, 4], [1, 1, 8, 0, 0, 0]])
    contender = Contender("plain", SlowModel(FakeClock(), [], 0.0))
    assert new_tokens(sequences, batch, contender) == [[4, 7], [4, 5, 6, 4], [8]]


def test_percentiles_are_interpolated_and_missing_without_values() -> None:
    assert spread([5.0, 1.0, 2.0, 3.0, 4.0]) == {"p20": 1.8, "p50": 3.0, "p80": 4.2}
    assert spread([]) is None


def test_a_ratio_compares_calls_of_the_same_item_and_repeat_only() -> None:
    calls = [*THREE_CALLS, sample("dspark-lookup", 3, 0.01)]
    assert paired_ratios(calls, "dspark-lookup") == [2.0, 4.0, 1.0]


def test_ratios_are_of_tokens_per_second_so_a_shorter_text_gains_nothing() -> None:
    calls = [sample("plain", 0, 2.0), sample("dspark-none", 0, 1.0, new_tokens=10, cpu_s=8.0)]
    assert paired_ratios(calls, "dspark-none") == [1.0]
    assert paired_ratios(calls, "dspark-none", cpu=True) == [0.25]


def test_the_median_of_ratios_is_not_the_ratio_of_medians() -> None:
    plain, ours = summarise(THREE_CALLS)
    assert [s["tokens_per_s"]["p50"] for s in (plain, ours)] == [10.0, 20.0]
    assert (plain["ratio"], ours["ratio"]["p50"], ours["cores_busy"]) == (None, 2.0, 2.0)
    assert ours["ratio"]["p20"] == pytest.approx(1.4)


def test_several_groups_are_summed_up_as_all() -> None:
    calls = [*THREE_CALLS, sample("plain", item="code-01", group="code")]
    summaries = summarise(calls)
    assert summarise(calls, adds_all=False) == summaries[:3]
    assert [(s["group"], s["contender"], s["calls"]) for s in summaries] == [
        ("chat", "plain", 3), ("chat", "dspark-lookup", 3), ("code", "plain", 1),
        ("all", "plain", 4), ("all", "dspark-lookup", 3),
    ]  # fmt: skip


def test_accepted_length_counts_all_rounds_and_fallbacks_apart() -> None:
    fallback = sample("dspark-lookup", 3, speculation={"path": "transformers"})
    ours = summarise([*THREE_CALLS, fallback])[1]
    # Three texts of 20 tokens, of which the first comes from the prompt's forward.
    assert ours["accepted_length"] == pytest.approx(3 * 19 / 27, abs=1e-4)
    assert (ours["rounds"], ours["rechecks"], ours["fallback_calls"]) == (27, 6, 1)


@pytest.mark.parametrize(
    ("plain", "other", "index"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0), ([], [], None)],
)
def test_a_first_difference_may_be_an_end(plain: Any, other: Any, index: Any) -> None:
    assert comparing.first_difference(plain, other) == index


def compared(texts: list[list[int]], scores: list[list[float]]) -> list[list[Difference]]:
    outcomes = [outcome("plain", [[1, 2, 0]]), *(outcome("other", [text]) for text in texts)]
    logits = [torch.tensor([row]) for row in scores]
    asked: list[int] = []

    def step_logits(asked_item: Item, num_steps: int) -> list[torch.Tensor]:
        asked.append(num_steps)
        return logits[:num_steps]

    found = comparing.compare(outcomes, [item()], step_logits, torch.bfloat16)
    assert len(asked) <= 1
    return found


SCORES = [[0.0, 9.0, 1.0, 2.0], [19.8, 17.0, 20.05, 19.5], [3.0, 1.0, 1.0, 1.0]]


def test_the_margin_is_the_baselines_own_at_its_own_step() -> None:
    own, same, near, far = compared([[1, 2, 0], [1, 0, 0], [1, 3]], SCORES)
    assert (own, same, near[0].is_near_tie) == ([], [], True)
    assert near[0].margin == pytest.approx(0.25, abs=1e-4)
    # Two steps of bfloat16, in which scores from 16 to 32 lie 0.125 apart.
    assert near[0].margin_limit == 0.25
    assert not far[0].is_near_tie
    assert (far[0].index, far[0].plain_token, far[0].token) == (1, 2, 3)
    assert far[0].margin == pytest.approx(0.55, abs=1e-4)
    assert far[0].top_gap == pytest.approx(0.25, abs=1e-4)


def test_an_early_end_or_a_baseline_that_changes_its_mind_is_no_near_tie() -> None:
    early = compared([[1, 2]], SCORES)[1][0]
    assert (early.index, early.margin, early.is_near_tie) == (2, None, False)
    changed = compared([[3, 2, 0]], [[5.0, 4.0, 0.0, 4.99]])[1][0]
    assert (changed.margin, changed.is_near_tie) == (None, False)


def test_the_baseline_is_compared_with_its_own_first_repeat() -> None:
    outcomes = [outcome("plain", [[1, 2]]), outcome("plain", [[1, 3]], repeat=1)]
    found = comparing.compare(outcomes, [item()], lambda *_: [], torch.float32)
    assert [len(differences) for differences in found] == [0, 1]
    pair = [outcome("one", [[1], [2]]), outcome("two", [[1], [2, 3]])]
    assert comparing.count_unlike(pair, "two") == {"one": 1}


def test_a_batch_is_left_padded_and_takes_the_first_prompts_of_each_group() -> None:
    items = [item(f"{g}-{n}", g, n + 1) for g in ("chat", "code") for n in (1, 2, 3)]
    batch = batch_item(items, pad_id=0, max_new_tokens=9)
    expected = [[0, 1, 2], [1, 2, 3], [0, 1, 2], [1, 2, 3]]
    assert batch.inputs["input_ids"].tolist() == expected
    assert batch.inputs["attention_mask"].tolist() == (torch.tensor(expected) > 0).long().tolist()
    assert [i.name for i in alternating(items, 3)] == ["chat-1", "code-1", "chat-2"]


def test_twins_share_every_weight_and_no_setting() -> None:
    plain = tiny.llama()
    ours = contenders.wrapped(plain, "dspark-none", None).model
    assert contenders.shares_weights(plain, ours)
    assert type(plain) is not type(ours)
    assert plain.config is not ours.config
    assert plain.generation_config is not ours.generation_config
    assert not contenders.shares_weights(plain, tiny.llama())


def test_texts_are_endless_only_inside_the_block() -> None:
    model = tiny.llama()
    ids = torch.tensor([tiny.prompt(6)])
    first = int(model.generate(input_ids=ids, do_sample=False, max_new_tokens=1)[0, -1])
    model.generation_config.eos_token_id = first
    rivals = contenders.context_contenders(model)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with contenders.endless(rivals):
        lengths = [c.generate(inputs, max_new_tokens=5).shape[1] for c in rivals]
    assert lengths == [11, 11]
    assert [c.generate(inputs, max_new_tokens=5).shape[1] for c in rivals] == [7, 7]


def test_only_transformers_own_means_may_be_excluded_by_the_warm_up() -> None:
    class Refusing:
        def generate(self, **kwargs: Any) -> None:
            raise ValueError("not supported\nsecond line")

    assert warm_up([Contender("hf-lookup", Refusing())], {}) == {"hf-lookup": "not supported"}
    with pytest.raises(ValueError, match="not supported"):
        warm_up([Contender("dspark-lookup", Refusing())], {})


def test_a_models_fingerprint_follows_its_weights_and_not_its_dtype() -> None:
    known = environment.fingerprint(tiny.llama())
    assert environment.fingerprint(tiny.llama().to(torch.bfloat16)) == known
    assert environment.fingerprint(tiny.llama(seed=6)) != known


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with environment.threads_set_to(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_a_recorded_command_names_no_folder_of_the_machine() -> None:
    line = environment.command_line(["bench", "--model", "/home/me/toy", "--output=/tmp/a.json"])
    assert line == "dspark-hf bench --model .../toy --output=.../a.json"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int4"}, "dtype must be one of"),
        ({"sections": ("poems",)}, r"section must be one of \['prompts'.*got 'poems'"),
        ({"sections": ("recheck",), "dtype": "float32"}, "must run in bfloat16"),
        ({"repeats": 0}, "repeats must be at least 1; got 0"),
        ({"contexts": ()}, "contexts must be one or more"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BenchSettings(**changes)


def test_sections_are_all_that_the_dtype_allows() -> None:
    assert BenchSettings().chosen == ("prompts", "context", "batch", "recheck")
    assert BenchSettings(dtype="float32").chosen == ("prompts", "context", "batch")
    assert BenchSettings(sections=("batch", "prompts")).chosen == ("prompts", "batch")


def test_saving_keeps_other_entries_and_one_line_per_call(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.json"
    old, new = run_of(THREE_CALLS), run_of(THREE_CALLS[:2])
    held = file_of(prompts_bfloat16=old, batch_float32=old)
    results.save_results(path, held)
    found = results.open_results(path, held["machine"], {**held["model"], "name": "other name"})
    results.save_results(path, results.merge(found, "prompts-bfloat16", new))
    assert results.load_results(path)["runs"] == {"prompts-bfloat16": new, "batch-float32": old}
    lines = [line for line in path.read_text().splitlines() if '"item"' in line]
    assert [json.loads(line.strip().rstrip(",")) for line in lines] == new["rows"] + old["rows"]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("machine", "model", "message"),
    [
        ({"cpu": "Other", "cores": 2}, {"fingerprint": "aa"}, "results of this machine"),
        (MACHINE, {"fingerprint": "bb"}, "results of this model"),
    ],
)
def test_results_of_another_machine_or_model_are_never_mixed(
    tmp_path: Path, machine: Any, model: Any, message: str
) -> None:
    results.save_results(tmp_path / "r.json", file_of(prompts_bfloat16=run_of(THREE_CALLS)))
    with pytest.raises(ConfigError, match=f"{message}.*--output"):
        results.open_results(tmp_path / "r.json", machine, model)


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 0}'])
def test_a_file_that_holds_no_results_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ConfigError, match="must be a result file"):
        results.load_results(tmp_path / "r.json")
