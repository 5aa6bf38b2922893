"""Windows of a text: spread over it, of one length, with one BOS at most, which is never scored.

Regimes: tokenizers that put BOS before texts, that have one on request, or none; texts that bring
their own; one window and several; all of a window scored and its end.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import tiny
from dspark_hf.attention.policy import SparsePolicy, SparsePrefill
from dspark_hf.errors import ConfigError
from dspark_hf.evaluation import budgets, calibrate_budgets, perplexity_drift
from dspark_hf.evaluation.windows import leading_bos, spread_windows
from word_texts import BOS, text_of, word_tokenizer, words

KINDS = ["automatic", "on request", "without"]
POLICY = SparsePolicy(tokens=48, recent_pages=2).replace(
    prefill=SparsePrefill(tokens=48, min_context=0)
)


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny.llama(max_position_embeddings=512, initializer_range=0.3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bos", ["auto", "every", "none"])
def test_bos_leads_where_asked_and_by_itself_where_the_tokenizer_adds_one(
    kind: str, bos: str
) -> None:
    asks = {"auto": kind == "automatic", "every": kind != "without", "none": False}
    assert leading_bos(word_tokenizer(kind), bos) == [BOS] * asks[bos]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("length", [48, 49, 100, 333])
@pytest.mark.parametrize("bos", ["auto", "none"])
def test_windows_lie_from_end_to_end_of_a_text_whether_behind_a_bos_or_not(
    count: int, length: int, bos: str
) -> None:
    # Every word stands once, so that a window tells where it was cut.
    ids, context = list(range(2, length + 2)), 16
    tokenizer = word_tokenizer(num_words=length + 2)
    found = spread_windows(tokenizer, text_of(ids), context, count, bos)
    room = context - (bos == "auto")
    assert len(found) == min(count, length // room)
    for window in found:
        assert len(window) == context
        body = window[context - room :]
        assert window[: context - room] == [BOS] * (context - room)
        assert body == list(range(body[0], body[0] + room))
    starts = [window[context - room] - 2 for window in found]
    assert starts[0] == 0
    if len(found) > 1:
        assert starts[-1] == length - room
        steps = [b - a for a, b in itertools.pairwise(starts)]
        assert min(steps) >= room
        assert max(steps) - min(steps) <= 1


def test_a_bos_that_the_text_brings_is_not_doubled() -> None:
    ids = words(30)
    tokenizer = word_tokenizer()
    assert spread_windows(tokenizer, text_of([BOS, *ids]), 16, 1) == [[BOS, *ids[:15]]]
    assert spread_windows(tokenizer, text_of([BOS, *ids]), 16, 1, "none") == [[BOS, *ids[:15]]]
    # The second window would begin with the second document's own.
    documents = [text_of(ids[:15]), text_of([BOS, *ids[15:29]])]
    first, second = spread_windows(tokenizer, documents, 16, 2)
    assert first == [BOS, *ids[:15]]
    assert second == [BOS, ids[14], BOS, *ids[15:28]]
    assert spread_windows(tokenizer, documents, 15, 2, "none") == [ids[:15], [BOS, *ids[15:29]]]


def test_a_text_must_fill_a_window_of_which_bos_is_a_part() -> None:
    ids = words(15)
    assert spread_windows(word_tokenizer(), text_of(ids), 16, 3) == [[BOS, *ids]]
    with pytest.raises(ConfigError, match="at least one window of 17 tokens; got 16"):
        spread_windows(word_tokenizer(), text_of(ids), 17, 3)
    with pytest.raises(ConfigError, match="at least one window of 16 tokens; got 15"):
        spread_windows(word_tokenizer("on request"), text_of(ids), 16, 3)


def drift(model: Any, kind: str, ids: list[int], **kwargs: Any) -> Any:
    settings = {"context": 150, "scored": 149, "scored_per_window": 149, **kwargs}
    return perplexity_drift(model, word_tokenizer(kind), text_of(ids), POLICY, **settings)


@pytest.mark.parametrize("path", ["steps", "prefill"])
@pytest.mark.parametrize("scored", [149, 20])
def test_drift_reads_a_bos_before_its_windows_and_does_not_score_it(
    llama: Any, path: str, scored: int
) -> None:
    ids = words(149, seed=3)
    found = drift(llama, "automatic", ids, path=path, scored=scored, scored_per_window=scored)
    with torch.no_grad():
        logits = llama(torch.tensor([[BOS, *ids]])).logits[0, -scored - 1 : -1].double()
    wanted = torch.tensor(ids[-scored:])
    loss = torch.nn.functional.cross_entropy(logits, wanted)
    assert found.ppl_dense == pytest.approx(math.exp(float(loss)), rel=1e-5)
    assert (found.scored, found.windows, found.context, found.bos) == (scored, 1, 150, "every")
    # Without it there is one token less than a window.
    with pytest.raises(ConfigError, match="window of 150 tokens; got 149"):
        drift(llama, "automatic", ids, path=path, bos="none")


def test_drift_of_a_tokenizer_that_adds_no_bos_is_what_it_is_without(llama: Any) -> None:
    ids = words(320)
    sizes = {"scored": 40, "scored_per_window": 20}
    plain = drift(llama, "without", ids, **sizes)
    by_itself = drift(llama, "on request", ids, **sizes)
    asked = drift(llama, "on request", ids, bos="every", **sizes)
    assert (plain.bos, by_itself.bos, asked.bos) == ("none", "none", "every")
    for field in ("ppl_dense", "ppl_sparse", "kl", "mean_pages", "windows"):
        assert getattr(by_itself, field) == getattr(plain, field)
    assert asked.ppl_dense != plain.ppl_dense
    assert asked.ppl_dense == drift(llama, "automatic", ids, **sizes).ppl_dense


@pytest.mark.parametrize("bos", ["once", "", "all"])
def test_a_bos_before_no_known_windows_is_refused(llama: Any, bos: str) -> None:
    with pytest.raises(ConfigError, match=r"bos must be one of \['auto', 'every', 'none'\]"):
        drift(llama, "automatic", words(150), bos=bos)
    with pytest.raises(ConfigError, match="bos must be one of"):
        calibrate_budgets(
            llama, word_tokenizer(), text_of(words(150)), POLICY, context=100, bos=bos
        )


@pytest.mark.parametrize(("kind", "bos"), [("automatic", "auto"), ("on request", "none")])
def test_budgets_are_calibrated_on_the_windows_that_drift_is_measured_on(
    llama: Any, kind: str, bos: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    measure = budgets.measure_losses

    def note(model: Any, windows: list[list[int]], *rest: Any) -> Any:
        seen.extend(windows)
        return measure(model, windows, *rest)

    monkeypatch.setattr(budgets, "measure_losses", note)
    tokenizer, text = word_tokenizer(kind), text_of(words(300))
    calibrate_budgets(llama, tokenizer, text, POLICY, context=120, queries=2, bos=bos)
    assert seen == spread_windows(tokenizer, text, 120, 2, bos)
    assert [window.count(BOS) for window in seen] == [bos == "auto"] * 2
