"""The lookup drafter against a scan of the whole history, and its bookkeeping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_hf.drafting.base import Drafter
from dspark_hf.drafting.lookup import LookupDrafter, length_signal
from dspark_hf.errors import ConfigError
from dspark_hf.values import DraftRequest, Proposal

GENERATOR = torch.Generator()
EMPTY = Proposal()


def ask(drafter: LookupDrafter, ids: Sequence[int], max_tokens: int = 8, row: int = 0) -> Proposal:
    """One proposal for one row."""
    return drafter.propose([DraftRequest(row, ids, max_tokens, None, GENERATOR)])[0]


def scan(
    ids: Sequence[int],
    max_tokens: int,
    max_ngram: int,
    min_ngram: int = 1,
    stop_ids: Iterable[int] = (),
) -> Proposal:
    """The oracle: longest, then most recent, by comparing the ending with every earlier place."""
    for length in range(min(max_ngram, len(ids) - 1), min_ngram - 1, -1):
        for end in range(len(ids) - 2, length - 2, -1):
            if list(ids[end + 1 - length : end + 1]) == list(ids[len(ids) - length :]):
                text = list(ids)
                for k in range(max_tokens):
                    if text[end + 1 + k] in stop_ids:
                        break
                    text.append(text[end + 1 + k])
                proposed = text[len(ids) :]
                return Proposal(proposed, None, length_signal(length)) if proposed else EMPTY
    return EMPTY


small_texts = st.integers(1, 4).flatmap(
    lambda size: st.lists(st.integers(0, size - 1), min_size=1, max_size=60)
)


@settings(max_examples=150, deadline=None)
@given(
    text=small_texts,
    max_ngram=st.sampled_from([1, 2, 3, 5, 16]),
    min_ngram=st.integers(1, 3),
    stop_ids=st.sets(st.integers(0, 3), max_size=2),
    max_tokens=st.integers(1, 9),
)
def test_every_proposal_is_the_one_a_full_scan_finds(
    text: list[int], max_ngram: int, min_ngram: int, stop_ids: set[int], max_tokens: int
) -> None:
    min_ngram = min(min_ngram, max_ngram)
    drafter = LookupDrafter(max_ngram, min_ngram, stop_ids)
    for length in range(1, len(text) + 1):
        found = ask(drafter, text[:length], max_tokens)
        assert found == scan(text[:length], max_tokens, max_ngram, min_ngram, stop_ids)


@settings(max_examples=80, deadline=None)
@given(text=small_texts, cuts=st.sets(st.integers(1, 60)), max_ngram=st.sampled_from([2, 4, 16]))
def test_how_many_tokens_arrive_at_a_time_does_not_matter(
    text: list[int], cuts: set[int], max_ngram: int
) -> None:
    drafter = LookupDrafter(max_ngram)
    for cut in sorted(cuts):
        ask(drafter, text[:cut])
    assert ask(drafter, text) == scan(text, 8, max_ngram)


def test_a_lookup_drafter_is_a_drafter() -> None:
    assert isinstance(LookupDrafter(), Drafter)
    assert LookupDrafter().name == "lookup"


def test_the_longest_match_wins_over_a_more_recent_one() -> None:
    assert ask(LookupDrafter(), [1, 2, 3, 9, 3, 7, 1, 2, 3], 2) == Proposal([9, 3], None, 3)


def test_the_most_recent_of_equally_long_matches_wins() -> None:
    assert ask(LookupDrafter(), [4, 5, 6, 4, 5, 7, 8, 4, 5], 1) == Proposal([7], None, 2)


def test_matches_beyond_the_longest_ngram_are_equally_long() -> None:
    ids = [1, 2, 3, 8, 0, 2, 3, 9, 1, 2, 3]
    assert ask(LookupDrafter(max_ngram=3), ids, 1).ids == [8]
    assert ask(LookupDrafter(max_ngram=2), ids, 1).ids == [9]


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_a_repeating_text_is_drafted_at_full_length(period: int) -> None:
    ids = [k % period for k in range(2 * period)]
    proposal = ask(LookupDrafter(), ids, 12)
    assert proposal.ids == [k % period for k in range(2 * period, 2 * period + 12)]


def test_nothing_is_proposed_without_a_match() -> None:
    assert ask(LookupDrafter(), []) == EMPTY
    assert ask(LookupDrafter(), [3]) == EMPTY
    assert ask(LookupDrafter(), list(range(50))) == EMPTY


def test_matches_shorter_than_the_shortest_ngram_are_ignored() -> None:
    ids = [1, 2, 7, 3, 2]
    assert ask(LookupDrafter(min_ngram=1), ids, 1) == Proposal([7], None, 1)
    assert ask(LookupDrafter(min_ngram=2), ids, 1) == EMPTY


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 64])
def test_max_tokens_is_respected(max_tokens: int) -> None:
    assert len(ask(LookupDrafter(), [1, 2, 1, 2], max_tokens).ids) == max_tokens


@pytest.mark.parametrize(
    ("stop_ids", "expected"),
    [((), [3, 4, 5, 1, 2]), ((4,), [3]), ((5, 4), [3]), ((5, 9), [3, 4]), ((3,), [])],
)
def test_a_proposal_ends_before_the_first_stop_token(
    stop_ids: tuple[int, ...], expected: list[int]
) -> None:
    proposal = ask(LookupDrafter(stop_ids=stop_ids), [1, 2, 3, 4, 5, 1, 2], 5)
    assert proposal.ids == expected or (proposal == EMPTY and not expected)


def test_the_periodic_part_of_a_proposal_has_no_stop_token() -> None:
    assert ask(LookupDrafter(stop_ids=(0,)), [7, 0, 7, 8, 7], 9).ids == [8, 7, 8, 7, 8, 7, 8, 7, 8]
    assert ask(LookupDrafter(stop_ids=(8,)), [7, 8, 7], 9) == EMPTY


def test_stop_ids_may_come_as_a_tensor() -> None:
    assert ask(LookupDrafter(stop_ids=torch.tensor([2])), [1, 3, 2, 1], 4).ids == [3]


@pytest.mark.parametrize(
    ("length", "signal"),
    [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (7, 5), (8, 6), (15, 6), (16, 7), (40, 7)],
)
def test_the_signal_is_the_bucket_of_the_matched_length(length: int, signal: int) -> None:
    assert length_signal(length) == signal
    ids = [*range(length), 99, *range(length)]
    assert ask(LookupDrafter(max_ngram=64), ids).signal == signal


def test_rows_do_not_see_each_other() -> None:
    drafter = LookupDrafter()
    requests = [
        DraftRequest(0, [1, 2, 3, 1, 2], 2, None, GENERATOR),
        DraftRequest(1, [1, 2, 4, 1, 2], 2, None, GENERATOR),
        DraftRequest(2, [5, 6, 1, 2], 2, None, GENERATOR),
    ]
    expected = [Proposal([3, 1], None, 2), Proposal([4, 1], None, 2), EMPTY]
    assert drafter.propose(requests) == expected
    assert drafter.propose(requests[::-1]) == expected[::-1]
    assert drafter.propose([]) == []


def test_a_freed_row_is_forgotten() -> None:
    drafter = LookupDrafter()
    ask(drafter, [1, 2, 3, 1, 2], row=5)
    drafter.free(5)
    drafter.free(6)
    assert not drafter._rows
    assert ask(drafter, [1, 2, 4, 4, 2], 1, row=5) == Proposal([4], None, 1)


@pytest.mark.parametrize(
    "changed",
    [[1, 2], [9, 2, 3, 9, 2], [1, 2, 3, 1, 9, 1], []],
    ids=["shorter", "first", "last", "none"],
)
def test_a_history_that_did_not_only_grow_is_indexed_afresh(changed: list[int]) -> None:
    drafter = LookupDrafter()
    ask(drafter, [1, 2, 3, 1, 2])
    assert ask(drafter, changed) == scan(changed, 8, 16)
    grown = [*changed, 4, 1, 2]
    assert ask(drafter, grown) == scan(grown, 8, 16)


@pytest.mark.parametrize("size", [1, 2, 50])
def test_work_and_memory_per_token_do_not_grow_with_the_history(size: int) -> None:
    text = torch.randint(size, (3000,), generator=torch.Generator().manual_seed(0)).tolist()
    drafter = LookupDrafter(max_ngram=8)
    steps = []
    for length in range(1, len(text) + 1):
        before = drafter._rows[0].num_steps if 0 in drafter._rows else 0
        ask(drafter, text[:length], 1)
        steps.append(drafter._rows[0].num_steps - before)
    assert max(steps) <= 2 * 8
    assert drafter._rows[0].num_nodes <= 8 * len(text)
    before = drafter._rows[0].num_steps
    ask(drafter, text)
    assert drafter._rows[0].num_steps == before


def test_text_that_never_repeats_costs_one_node_a_token() -> None:
    drafter = LookupDrafter()
    ask(drafter, list(range(1000)))
    assert drafter._rows[0].num_nodes == drafter._rows[0].num_steps == 1000


class CountingIds(list[int]):
    """Committed tokens that count how often one is read."""

    num_reads = 0

    def __getitem__(self, key: int) -> int:  # type: ignore[override]
        self.num_reads += 1
        return super().__getitem__(key)


def test_a_proposal_reads_a_bounded_number_of_old_tokens() -> None:
    ids = CountingIds(k * k % 17 for k in range(5000))
    drafter = LookupDrafter(max_ngram=8)
    ask(drafter, ids)
    for token in range(20):
        ids.append(token % 17)
        ids.num_reads = 0
        ask(drafter, ids, 4)
        assert ids.num_reads <= 2 * 8 + 4 + 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_ngram": 0}, r"max_ngram must be an integer of at least 1; got 0"),
        ({"min_ngram": True}, r"min_ngram must be an integer of at least 1; got True"),
        ({"max_ngram": 2, "min_ngram": 3}, r"at most max_ngram 2; got 3\. Lower"),
        ({"stop_ids": None}, r"collection of token ids; got None\. Pass \(\)"),
        ({"stop_ids": 2}, r"collection of token ids; got 2"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(
    arguments: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LookupDrafter(**arguments)  # type: ignore[arg-type]
