"""A row's processors and criteria answer as they would for the whole batch in plain decoding."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.generation import logits_process as lp
from transformers.generation import stopping_criteria as sc

from dspark_hf.processing import (
    HISTORY_FREE,
    PER_ROW_CRITERIA,
    STATEFUL,
    STATELESS,
    RowCriteria,
    RowProcessors,
    for_row,
    refusal,
)
from harness import toy_tokenizer
from tiny import VOCAB

ROWS, LENGTH = 4, 7
IDS = torch.randint(1, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
IDS[1] = IDS[1, 3]
SCORES = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1))
EOS = torch.tensor([5])


def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
    """Allow tokens that depend on the prompt's index and on the row's last token."""
    return [batch_id, int(ids[-1]), 30 + batch_id]


MAKERS: dict[type, Callable[[], Any]] = {
    lp.TemperatureLogitsWarper: lambda: lp.TemperatureLogitsWarper(0.6),
    lp.TopKLogitsWarper: lambda: lp.TopKLogitsWarper(7),
    lp.TopPLogitsWarper: lambda: lp.TopPLogitsWarper(0.8),
    lp.TopHLogitsWarper: lambda: lp.TopHLogitsWarper(0.5),
    lp.MinPLogitsWarper: lambda: lp.MinPLogitsWarper(0.1),
    lp.TypicalLogitsWarper: lambda: lp.TypicalLogitsWarper(0.8),
    lp.EpsilonLogitsWarper: lambda: lp.EpsilonLogitsWarper(0.005),
    lp.EtaLogitsWarper: lambda: lp.EtaLogitsWarper(0.005),
    lp.InfNanRemoveLogitsProcessor: lp.InfNanRemoveLogitsProcessor,
    lp.LogitNormalization: lp.LogitNormalization,
    lp.SuppressTokensLogitsProcessor: lambda: lp.SuppressTokensLogitsProcessor([3, 4]),
    lp.MinLengthLogitsProcessor: lambda: lp.MinLengthLogitsProcessor(LENGTH + 1, EOS),
    lp.MinNewTokensLengthLogitsProcessor: lambda: lp.MinNewTokensLengthLogitsProcessor(5, 4, EOS),
    lp.RepetitionPenaltyLogitsProcessor: lambda: lp.RepetitionPenaltyLogitsProcessor(
        1.7, prompt_ignore_length=torch.tensor([0, 2, 1, 3])
    ),
    lp.NoRepeatNGramLogitsProcessor: lambda: lp.NoRepeatNGramLogitsProcessor(1),
    lp.SequenceBiasLogitsProcessor: lambda: lp.SequenceBiasLogitsProcessor(
        [[[3], 2.0], [[int(IDS[0, -1]), 9], 4.0]]
    ),
    lp.NoBadWordsLogitsProcessor: lambda: lp.NoBadWordsLogitsProcessor(
        [[7], [int(IDS[2, -1]), 8]], EOS
    ),
    lp.ForcedBOSTokenLogitsProcessor: lambda: lp.ForcedBOSTokenLogitsProcessor(2),
    lp.ForcedEOSTokenLogitsProcessor: lambda: lp.ForcedEOSTokenLogitsProcessor(LENGTH + 1, 5),
    lp.ExponentialDecayLengthPenalty: lambda: lp.ExponentialDecayLengthPenalty((1, 1.5), EOS, 4),
    lp.SuppressTokensAtBeginLogitsProcessor: lambda: lp.SuppressTokensAtBeginLogitsProcessor(
        [9], LENGTH
    ),
    lp.WatermarkLogitsProcessor: lambda: lp.WatermarkLogitsProcessor(
        VOCAB, "cpu", bias=3.0, context_width=2
    ),
    lp.EncoderRepetitionPenaltyLogitsProcessor: lambda: lp.EncoderRepetitionPenaltyLogitsProcessor(
        1.5, IDS[::2, :4]
    ),
    lp.EncoderNoRepeatNGramLogitsProcessor: lambda: lp.EncoderNoRepeatNGramLogitsProcessor(
        1, IDS[::2, :4]
    ),
    lp.PrefixConstrainedLogitsProcessor: lambda: lp.PrefixConstrainedLogitsProcessor(allowed, 2),
}
"""Two sequences for each of two prompts: processors that hold prompts hold two of them."""


def test_every_known_processor_is_tested_here() -> None:
    assert set(MAKERS) == STATELESS
    assert HISTORY_FREE < STATELESS
    assert not STATEFUL & STATELESS


def in_batch(kind: type) -> torch.Tensor:
    """Return what a processor gives for the whole batch; encoder ones need expanded prompts."""
    if kind is lp.EncoderRepetitionPenaltyLogitsProcessor:
        return lp.EncoderRepetitionPenaltyLogitsProcessor(
            1.5, IDS[::2, :4].repeat_interleave(2, 0)
        )(IDS, SCORES.clone())
    if kind is lp.EncoderNoRepeatNGramLogitsProcessor:
        return lp.EncoderNoRepeatNGramLogitsProcessor(1, IDS[::2, :4].repeat_interleave(2, 0))(
            IDS, SCORES.clone()
        )
    return MAKERS[kind]()(IDS, SCORES.clone())


@pytest.mark.parametrize("kind", MAKERS, ids=lambda kind: kind.__name__)
def test_a_processor_bound_to_a_row_gives_that_row_of_the_batch(kind: type) -> None:
    expected, original = in_batch(kind), MAKERS[kind]()
    for row in range(ROWS):
        bound = for_row(original, row, ROWS)
        found = bound(IDS[row : row + 1], SCORES[row : row + 1].clone())
        assert torch.equal(found[0], expected[row])
    if kind not in (
        lp.ForcedBOSTokenLogitsProcessor,
        lp.InfNanRemoveLogitsProcessor,
    ):
        assert not torch.equal(expected, SCORES)


@pytest.mark.parametrize("kind", MAKERS, ids=lambda kind: kind.__name__)
def test_binding_leaves_the_callers_processor_as_it_was(kind: type) -> None:
    original = MAKERS[kind]()
    before = {name: repr(value) for name, value in vars(original).items()}
    for row in range(ROWS):
        for_row(original, row, ROWS)(IDS[row : row + 1], SCORES[row : row + 1].clone())
    if kind is not lp.SequenceBiasLogitsProcessor and not issubclass(
        kind, lp.SequenceBiasLogitsProcessor
    ):
        assert {name: repr(value) for name, value in vars(original).items()} == before


@pytest.mark.parametrize("kind", MAKERS, ids=lambda kind: kind.__name__)
def test_processing_a_row_leaves_its_raw_scores_alone(kind: type) -> None:
    raw = SCORES[2].clone()
    RowProcessors.of([MAKERS[kind]()], 2, ROWS)(IDS[2:3], raw)
    assert torch.equal(raw, SCORES[2])


def test_processors_run_in_the_callers_order() -> None:
    processors = [lp.TopKLogitsWarper(5), lp.TemperatureLogitsWarper(0.5), lp.LogitNormalization()]
    found = RowProcessors.of(processors, 1, ROWS)(IDS[1:2], SCORES[1])
    expected = SCORES[1:2].clone()
    for processor in processors:
        expected = processor(IDS[1:2], expected)
    assert torch.equal(found, expected[0])


def test_a_row_without_processors_gives_the_scores_themselves() -> None:
    scores = SCORES[0]
    assert RowProcessors(())(IDS[:1], scores) is scores


def test_a_drafters_distribution_gets_the_processors_that_need_no_history() -> None:
    processors = [
        lp.RepetitionPenaltyLogitsProcessor(3.0),
        lp.TemperatureLogitsWarper(0.5),
        lp.TopKLogitsWarper(4),
        lp.MinLengthLogitsProcessor(99, EOS),
    ]
    probs = RowProcessors.of(processors, 0, 1).warp(SCORES[:2].clone())
    expected = lp.TopKLogitsWarper(4)(IDS[:2], SCORES[:2] / 0.5).softmax(-1)
    assert torch.allclose(probs, expected)
    assert torch.equal((probs > 0).sum(-1), torch.tensor([4, 4]))


def test_a_drafters_distribution_may_be_over_another_vocabulary() -> None:
    processors = [lp.SuppressTokensLogitsProcessor([VOCAB - 1]), lp.TemperatureLogitsWarper(0.5)]
    probs = RowProcessors.of(processors, 0, 1).warp(SCORES[:2, :50].clone())
    assert torch.allclose(probs.sum(-1), torch.ones(2))


def test_only_processors_known_or_declared_may_be_asked_twice() -> None:
    class Mine(lp.LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            return scores

    declared = Mine()
    declared.dspark_per_row = True
    assert RowProcessors.of([lp.TopKLogitsWarper(3)], 0, 1).is_stateless
    assert not RowProcessors.of([Mine()], 0, 1).is_stateless
    assert RowProcessors.of([declared], 0, 1).is_stateless


class Mine(sc.StoppingCriteria):
    """A criterion of a caller's own; answers for the whole batch."""

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), int(input_ids[0, -1]) == 9)


class Declared(Mine):
    """The same, declared to answer for each row alone."""

    dspark_per_row = True


class SubclassOfKnown(lp.TopKLogitsWarper):
    """Not what its base is: it may do anything."""


NO_END = sc.MaxLengthCriteria(20)
END = sc.EosTokenCriteria(EOS)


@pytest.mark.parametrize(
    ("processors", "criteria", "size", "reason"),
    [
        ([], [NO_END], 3, None),
        ([maker() for maker in MAKERS.values()], [NO_END, END], 3, None),
        ([], [NO_END, END, sc.MaxTimeCriteria(9.0)], 3, None),
        ([], [NO_END, sc.MaxTimeCriteria(9.0)], 3, "without an end token"),
        ([], [NO_END, sc.MaxTimeCriteria(9.0)], 1, None),
        ([], [NO_END, Mine()], 1, None),
        ([], [NO_END, END, Mine()], 2, "Mine may depend on the whole batch"),
        ([], [NO_END, END, Declared()], 2, None),
        ([], [NO_END, Declared()], 2, "without an end token"),
        ([SubclassOfKnown(3)], [NO_END], 1, None),
        ([SubclassOfKnown(3)], [NO_END], 2, "SubclassOfKnown may depend"),
    ],
)
def test_a_call_is_refused_exactly_where_rows_cannot_be_told_apart(
    processors: list[Any], criteria: list[Any], size: int, reason: str | None
) -> None:
    found = refusal(processors, criteria, size)
    assert (found is None) == (reason is None)
    assert reason is None or reason in found


@pytest.mark.parametrize("size", [1, 2])
def test_processors_with_state_for_the_batch_are_refused_for_one_row_too(size: int) -> None:
    synthid = lp.SynthIDTextWatermarkLogitsProcessor(
        ngram_len=3,
        keys=[1, 2],
        sampling_table_size=8,
        sampling_table_seed=0,
        context_history_size=8,
        device=torch.device("cpu"),
    )
    assert "keeps state" in refusal([synthid], [NO_END], size)


def is_met(criteria: list[Any], ids: list[int], pad: int = 0, scores: Any = None) -> bool:
    prefix = torch.tensor([[0] * pad + ids])
    return RowCriteria(criteria, pad).is_met(ids, prefix, scores)


def test_lengths_count_padding_as_plain_decoding_counts_it() -> None:
    assert RowCriteria([sc.MaxLengthCriteria(10)], pad=4).max_tokens == 6
    assert not is_met([sc.MaxLengthCriteria(10)], [1] * 5, pad=4)
    assert is_met([sc.MaxLengthCriteria(10)], [1] * 6, pad=4)
    several = [sc.MaxLengthCriteria(10), sc.MaxLengthCriteria(8)]
    assert RowCriteria(several, pad=0).max_tokens == 8


def test_any_of_several_end_tokens_stops_a_row() -> None:
    criteria = [sc.EosTokenCriteria([5, 6]), sc.EosTokenCriteria(9)]
    assert [is_met(criteria, [5, token]) for token in (5, 6, 7, 9)] == [True, True, False, True]


def test_a_stop_string_is_found_where_it_completes() -> None:
    tokenizer = toy_tokenizer()
    criteria = [sc.StopStringCriteria(tokenizer, ["bcd"])]
    ids = tokenizer("abcdaa").input_ids
    assert [is_met(criteria, ids[: n + 1]) for n in range(3)] == [False, True, False]
    assert type(criteria[0]) in PER_ROW_CRITERIA


def test_a_time_limit_is_asked_for_every_token() -> None:
    criterion = sc.MaxTimeCriteria(100.0, initial_timestamp=time.time() - 99.9)
    assert not is_met([criterion], [1])
    criterion.initial_timestamp -= 1
    assert is_met([criterion], [1])


def test_every_criterion_is_asked_even_behind_one_that_stops() -> None:
    asked = []

    def note(input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        asked.append((input_ids.tolist(), scores))
        return torch.tensor([False])

    def stop(input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        return torch.tensor([True])

    scores = (SCORES[:1],)
    assert is_met([sc.EosTokenCriteria(3), stop, note], [1, 3], pad=1, scores=scores)
    assert asked == [([[0, 1, 3]], scores)]


def test_a_criterion_may_answer_with_a_plain_bool() -> None:
    assert is_met([lambda ids, scores: True], [1])
    assert not is_met([lambda ids, scores: False], [1])
