"""Statistics add up: every committed token is counted once, and nothing that was not committed.

Tokens behind a stop were once counted as accepted: https://github.com/vllm-project/vllm/issues/56101;
the first position left out: https://github.com/vllm-project/speculators/pull/805;
drafts never tested in the denominator: https://github.com/ggml-org/llama.cpp/pull/14104.
"""

from __future__ import annotations

import random
from dataclasses import replace
from time import perf_counter
from typing import Any

import pytest
from transformers import PreTrainedModel

from drafters import EndOfTextDrafter
from dspark_hf.metrics import LifetimeMetrics, SpeculationRecord
from harness import CONFIG, DRAFTERS, generate, noisy_copy, oracle_of, wrapped
from tiny import llama, plain_generate, prompt

NUM_RUNS = 50
KINDS = (*DRAFTERS, "end_of_text")
NEW_TOKENS = 15


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llama()


@pytest.fixture(scope="module")
def noisy_model() -> PreTrainedModel:
    return noisy_copy(llama())


def check_record(record: SpeculationRecord, kind: str) -> None:
    """Assert every identity that a record promises."""
    own_tokens = record.rounds - record.cut_rounds
    assert record.new_tokens == 1 + record.accepted + own_tokens
    assert record.drafted >= record.verified >= record.accepted >= 0
    assert len(record.accepted_per_round) == record.rounds
    assert sum(record.accepted_per_round) == record.accepted
    assert len(record.accepted_mask) == record.new_tokens
    assert sum(record.accepted_mask) == record.accepted
    histogram = [record.accepted_per_round.count(n) for n in range(20)]
    assert sum(histogram) == record.rounds
    assert sum(n * count for n, count in enumerate(histogram)) == record.accepted
    assert record.accepted <= sum(record.tested_by_position) <= record.verified
    assert sum(record.accepted_by_position) == record.accepted
    assert record.tested_by_position == sorted(record.tested_by_position, reverse=True)
    assert all(0 <= share <= 1 for share in record.acceptance_by_position)
    # A position is tested only where all positions before it were accepted.
    for before, tested in zip(
        record.accepted_by_position, record.tested_by_position[1:], strict=False
    ):
        assert tested <= before
    if record.rounds:
        assert record.accepted_length == pytest.approx((record.new_tokens - 1) / record.rounds)
    if kind in ("itself", "right"):
        assert all(share == 1.0 for share in record.acceptance_by_position)
        assert record.accepted == sum(record.tested_by_position)
    if kind == "wrong":
        assert record.accepted == 0
    assert min(record.draft_s, record.verify_s, record.other_s) >= 0


def random_call(stream: random.Random) -> tuple[list[list[int]], dict[str, Any]]:
    """Draw prompts and settings of a call, half of them with a stop inside the text."""
    prompts = [
        prompt(stream.randint(1, 12), seed=stream.randrange(1000))
        for _ in range(stream.choice([1, 1, 2, 4]))
    ]
    kwargs: dict[str, Any] = {"max_new_tokens": stream.randint(1, NEW_TOKENS)}
    if stream.random() < 0.3:
        kwargs["repetition_penalty"] = 1.5
    return prompts, kwargs


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_add_up_over_random_runs(
    model: PreTrainedModel, noisy_model: PreTrainedModel, kind: str
) -> None:
    stream = random.Random(KINDS.index(kind))  # noqa: S311 - not for secrets
    totals = {"rows": 0, "cut_rounds": 0, "verified": 0}
    for run in range(NUM_RUNS // len(KINDS) + 1):
        prompts, kwargs = random_call(stream)
        free = plain_generate(model, prompts, **kwargs)
        new = free[:, -kwargs["max_new_tokens"] :]
        eos = int(new[0, stream.randrange(new.shape[1])])
        if run % 2:
            kwargs["eos_token_id"] = eos
        right = oracle_of(free, prompts)
        if kind == "end_of_text":
            drafter: Any = EndOfTextDrafter(right, eos, at=run % 4)
        elif kind == "noisy_copy":
            drafter = noisy_model
        else:
            drafter = DRAFTERS[kind](model, right)
        config = replace(CONFIG, max_draft_tokens=stream.randint(1, 6))
        with wrapped(model, drafter, config):
            out = generate(model, prompts, **kwargs)
            metrics = model.dspark.metrics
        for record in out.speculation:
            check_record(record, kind)
            for name in totals:
                totals[name] += getattr(record, name, 1)
        assert_sums(metrics, out.speculation)
        lengths = [record.new_tokens for record in out.speculation]
        assert max(lengths) == out.sequences.shape[1] - max(map(len, prompts))
    assert totals["verified"] > 0
    if kind in ("itself", "right"):
        assert totals["cut_rounds"] > 0, "no run was stopped inside a block"


def assert_sums(metrics: LifetimeMetrics, records: list[SpeculationRecord]) -> None:
    """Assert that a model's first call is what its lifetime sums hold."""
    assert metrics.rows == len(records)
    assert metrics.last == records
    for name in ("new_tokens", "rounds", "drafted", "verified", "accepted"):
        assert getattr(metrics, name) == sum(getattr(record, name) for record in records)
    for name in ("draft_s", "verify_s", "other_s"):
        found = sum(getattr(record, name) for record in records)
        assert getattr(metrics, name) == pytest.approx(found)


def test_records_start_afresh_in_every_call_and_lifetime_sums_go_on(
    model: PreTrainedModel,
) -> None:
    prompts = [prompt(9, seed=2), prompt(5, seed=3)]
    with wrapped(model, model):
        outs = [generate(model, prompts, max_new_tokens=n) for n in (8, 8, 1)]
        metrics = model.dspark.metrics
    counts = [[replace_seconds(record) for record in out.speculation] for out in outs]
    assert counts[0] == counts[1] != counts[2]
    assert metrics.rows == 6
    assert metrics.new_tokens == 2 * (8 + 8 + 1)
    assert metrics.last == outs[2].speculation
    assert metrics.accepted_length == pytest.approx(
        (metrics.new_tokens - metrics.rows) / metrics.rounds
    )


def replace_seconds(record: SpeculationRecord) -> SpeculationRecord:
    """Return a record without its times, which vary."""
    return replace(record, draft_s=0.0, verify_s=0.0, other_s=0.0)


def test_a_round_cut_at_an_accepted_token_tests_no_position_behind_it() -> None:
    record = SpeculationRecord()
    record.count_round(5, 4, 2, cut=True)
    assert record.tested_by_position == record.accepted_by_position == [1, 1]
    assert (record.drafted, record.verified, record.accepted) == (5, 4, 2)
    assert record.cut_rounds == 1
    assert record.acceptance_by_position == [1.0, 1.0]


def test_the_position_that_is_refused_counts_as_tested() -> None:
    record = SpeculationRecord()
    record.count_round(4, 4, 1, cut=False)
    record.count_round(4, 2, 2, cut=False)
    record.count_round(4, 0, 0, cut=False)
    assert record.tested_by_position == [2, 2]
    assert record.accepted_by_position == [2, 1]
    assert record.acceptance_by_position == [1.0, 0.5]
    assert record.accepted_per_round == [1, 2, 0]


def test_a_row_without_a_round_has_no_accepted_length() -> None:
    assert SpeculationRecord(new_tokens=1).accepted_length == 0.0
    assert LifetimeMetrics().accepted_length == 0.0


def test_calls_that_ran_elsewhere_are_counted_by_reason() -> None:
    metrics = LifetimeMetrics()
    for reason in ("a", "b", "a"):
        metrics.count_fallback(reason)
    assert metrics.fallback_calls == 3
    assert metrics.fallback_reasons == {"a": 2, "b": 1}
    assert metrics.rows == 0


def test_seconds_are_shared_out_and_stay_within_the_call(model: PreTrainedModel) -> None:
    with wrapped(model, model):
        generate(model, [prompt(9, seed=2)], max_new_tokens=4)
        begin = perf_counter()
        out = generate(model, [prompt(9, seed=2), prompt(5, seed=3)], max_new_tokens=15)
        wall = perf_counter() - begin
    first, second = out.speculation
    assert min(first.draft_s, first.verify_s, second.draft_s, second.verify_s) > 0
    assert sum(r.draft_s + r.verify_s + r.other_s for r in out.speculation) <= wall
