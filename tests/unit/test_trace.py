"""Traces: they agree with the counts, cost nothing when off, and pages and lines show them."""

from __future__ import annotations

import copy
import io
from html import escape
from typing import Any

import pytest
from rich.console import Console

import tiny
from block_drafters import block_drafter
from drafters import RandomDrafter
from dspark_hf import DSparkConfig
from dspark_hf.cli.token_view import (
    ACCEPTED,
    BEHIND,
    OWN,
    REFUSED,
    UNVERIFIED,
    print_trace,
    round_tokens,
    token_text,
)
from dspark_hf.cli.trace_page import trace_page
from dspark_hf.drafting.choice import choose_between
from dspark_hf.drafting.lookup import LookupDrafter
from dspark_hf.tracing import RoundTrace
from harness import generate, oracle_of, wrapped

PROMPTS = [tiny.prompt(9, seed=1), tiny.prompt(5, seed=2), tiny.prompt(7, seed=3)]
WHOLE = DSparkConfig(schedule="fixed", max_draft_tokens=5, never_slower=False)


class OddTokenizer:
    """Texts that a page must escape."""

    def decode(self, ids: Any) -> str:
        return "".join(f"<b>&\"{token}'\n" if token % 3 else "" for token in ids)

    def convert_ids_to_tokens(self, token: int) -> str:
        return f"<0x{token:02X}>"


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.llama()


@pytest.fixture(scope="module")
def texts(model: Any) -> list[list[int]]:
    return [tiny.plain_generate(model, [p], max_new_tokens=20)[0].tolist() for p in PROMPTS]


def traced(model: Any, drafter: Any, config: DSparkConfig = WHOLE, **kwargs: Any) -> Any:
    with wrapped(model, drafter, config), model.dspark.trace() as rounds:
        out = generate(model, PROMPTS, **{"max_new_tokens": 20, **kwargs})
    return out, rounds


def interrupted(model: Any, seen: list[RoundTrace]) -> None:
    with model.dspark.trace() as rounds:
        generate(model, PROMPTS, max_new_tokens=4)
        seen.extend(rounds)
        raise ZeroDivisionError


def made(**changes: Any) -> RoundTrace:
    values: dict[str, Any] = {
        "row_id": 7, "row": 0, "index": 2, "context": 9, "drafter": "block", "signal": 0,
        "drafted": (11, 12, 13, 14), "confidence": (0.9, 0.8, 0.5, 0.1), "verified": 3,
        "accepted": 1, "emitted": (11, 21), "is_cut": False,
    }  # fmt: skip
    return RoundTrace(**{**values, **changes})


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("schedule", ["fixed", "threshold", "auto"])
def test_a_trace_agrees_with_the_records_and_the_text(
    model: Any, texts: Any, schedule: str, sampled: bool
) -> None:
    config = DSparkConfig(schedule=schedule, max_draft_tokens=5, never_slower=False, seed=3)
    drafter = block_drafter(model, texts=texts)
    out, rounds = traced(model, drafter, config, do_sample=sampled)
    longest = max(map(len, PROMPTS))
    for place, record in enumerate(out.speculation):
        own = [trace for trace in rounds if trace.row == place]
        assert [trace.index for trace in own] == list(range(record.rounds))
        assert sum(len(trace.drafted) for trace in own) == record.drafted
        assert sum(trace.verified for trace in own) == record.verified
        assert [trace.accepted for trace in own] == record.accepted_per_round
        assert sum(trace.is_cut for trace in own) == record.cut_rounds
        assert all(len(trace.confidence) == len(trace.drafted) for trace in own)
        new = out.sequences[place, longest:].tolist()
        assert [token for trace in own for token in trace.emitted] == new[1:]
        start = len(PROMPTS[place]) + 1
        assert [trace.context for trace in own] == [
            start + sum(len(t.emitted) for t in own[:i]) for i in range(len(own))
        ]
        for trace in own:
            assert trace.emitted[: trace.accepted] == trace.drafted[: trace.accepted]
    assert len({trace.row_id for trace in rounds}) == len(PROMPTS)
    # Sampled texts leave the path the drafter was taught.
    assert sampled or schedule == "auto" or any(trace.accepted for trace in rounds)


def test_nothing_is_recorded_unless_asked_for(model: Any) -> None:
    with wrapped(model, RandomDrafter(tiny.VOCAB), WHOLE):
        assert model.dspark.decoder(None, WHOLE, 8).trace is None
        with model.dspark.trace() as rounds:
            pass
        generate(model, PROMPTS, max_new_tokens=4)
        assert rounds == []
        assert model.dspark.decoder(None, WHOLE, 8).trace is None


def test_tracing_does_not_change_the_text(model: Any) -> None:
    with wrapped(model, RandomDrafter(tiny.VOCAB), WHOLE):
        plain = generate(model, PROMPTS, max_new_tokens=12).sequences
        with model.dspark.trace():
            assert generate(model, PROMPTS, max_new_tokens=12).sequences.equal(plain)


def test_nested_traces_get_the_same_rounds_and_end_on_errors(model: Any) -> None:
    with wrapped(model, RandomDrafter(tiny.VOCAB), WHOLE):
        with model.dspark.trace() as outer:
            inner: list[RoundTrace] = []
            with pytest.raises(ZeroDivisionError):
                interrupted(model, inner)
            seen = len(inner)
            generate(model, PROMPTS, max_new_tokens=4)
        assert (len(inner), outer[:seen]) == (seen, inner)
        assert len(outer) == 2 * seen > 0
        with model.dspark.trace():
            assert copy.deepcopy(model.dspark.__getstate__()["_traces"]) == []


def test_a_round_names_the_member_of_a_choice_that_drafted(model: Any, texts: Any) -> None:
    choice = choose_between([LookupDrafter(), block_drafter(model, texts=texts)])
    _, rounds = traced(model, choice)
    names = {trace.drafter for trace in rounds}
    assert "block" in names
    assert names <= {"block", "lookup"}
    _, rounds = traced(model, None)
    assert {(trace.drafter, trace.drafted) for trace in rounds} == {("", ())}


@pytest.mark.parametrize(
    ("changes", "ends", "known"),
    [
        ({}, (), 3),  # all that was verified
        ({}, (12,), 2),  # nothing can stand behind a drafted end token, refused or not
        ({}, (14,), 3),  # never verified
        ({"is_cut": True, "emitted": (11,)}, (11,), 1),  # cut by an end token
        ({"is_cut": True, "emitted": (11,)}, (), 1),  # cut by another stop
        ({"verified": 0, "accepted": 0, "emitted": (5,)}, (11,), 0),
    ],
)
def test_what_is_settled_ends_where_nothing_could_be_accepted(
    changes: Any, ends: Any, known: int
) -> None:
    assert made(**changes).num_known(ends) == known


def test_tokens_of_a_round_are_told_apart() -> None:
    views = round_tokens(made(), OddTokenizer())
    assert [view.state for view in views] == [ACCEPTED, REFUSED, BEHIND, UNVERIFIED, OWN]
    assert [view.confidence for view in views] == [0.9, 0.8, 0.5, 0.1, None]
    cut = round_tokens(made(is_cut=True, emitted=(11,)), OddTokenizer())
    assert [view.state for view in cut] == [ACCEPTED, BEHIND, BEHIND, UNVERIFIED]


def test_a_token_without_text_shows_its_name_and_line_breaks_show() -> None:
    assert token_text(OddTokenizer(), 12) == "<0x0C>"
    assert token_text(OddTokenizer(), 13) == "<b>&\"13'⏎"


def test_a_page_escapes_every_token_and_its_totals_agree(model: Any, texts: Any) -> None:
    drafter = block_drafter(model, texts=texts)
    out, rounds = traced(model, drafter, DSparkConfig(schedule="threshold", seed=0))
    tokenizer = OddTokenizer()
    first = [row[len(prompt)] for row, prompt in zip(texts, PROMPTS, strict=True)]
    page = trace_page(rounds, out.speculation, PROMPTS, tokenizer, title="<m> & d", first=first)
    for trace in rounds:
        for view in round_tokens(trace, tokenizer):
            assert f">{escape(view.text)}</span>" in page
    for prompt in PROMPTS:
        assert escape(tokenizer.decode(prompt)) in page
    assert "<b>" not in page
    assert "&lt;m&gt; &amp; d" in page
    for name in ("rounds", "drafted", "verified", "accepted", "new_tokens"):
        total = sum(getattr(record, name) for record in out.speculation)
        assert f"<dt>{name.replace('_', ' ')}</dt><dd>{total:,}</dd>" in page
    assert page.count("<tr><td") == len(rounds)
    # Each is in the text and in the table, and the legend shows one.
    accepted = sum(record.accepted for record in out.speculation)
    assert page.count(f'class="t {ACCEPTED}"') == 2 * accepted + 1


def test_a_page_needs_nothing_else_and_suits_light_and_dark(model: Any) -> None:
    out, rounds = traced(model, RandomDrafter(tiny.VOCAB))
    page = trace_page(rounds, out.speculation, PROMPTS, OddTokenizer(), title="t")
    for outside in ("http", "src=", "<link", "<script", "@import", "url("):
        assert outside not in page
    assert "prefers-color-scheme: dark" in page
    assert "<details>" in page
    assert "<details open" not in page


def test_a_terminal_shows_a_line_per_round_without_markup(model: Any, texts: Any) -> None:
    drafter = block_drafter(model, texts=texts)
    _, rounds = traced(model, drafter)
    file = io.StringIO()
    console = Console(file=file, width=400, force_terminal=True, color_system="standard")
    print_trace(console, [*rounds, made(drafted=(10,), confidence=())], OddTokenizer())
    lines = file.getvalue().splitlines()
    assert len(lines) == 1 + len(rounds) + 1
    assert "<b>&\"10'⏎" in lines[-1]
    assert "\x1b[32m" in file.getvalue()


def test_oracle_drafts_are_all_green(model: Any, texts: Any) -> None:
    longest = max(map(len, PROMPTS))
    plain = tiny.plain_generate(model, PROMPTS, max_new_tokens=20)
    assert plain.shape[1] == longest + 20
    _, rounds = traced(model, oracle_of(plain, PROMPTS))
    states = {view.state for trace in rounds for view in round_tokens(trace, OddTokenizer())}
    assert states == {ACCEPTED, OWN}
