"""lm-evaluation-harness sees a wrapped model as the plain one: the same answers and likelihoods.

What is run is examples/lm_eval_drift.py, on its own model of random weights.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dspark_hf.attention.policy import SparsePolicy
from harness import noisy_copy, wrapped

pytest.importorskip("lm_eval", reason="lm_eval comes with the extra: pip install '.[lm-eval]'")

FEW = SparsePolicy(tokens=128, min_context=0)
ALL = SparsePolicy(tokens=4096, min_context=0)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "lm_eval_drift.py"
    spec = importlib.util.spec_from_file_location("lm_eval_drift", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tiny(example: ModuleType) -> tuple[Any, Any]:
    return example.tiny_model()


@pytest.fixture(scope="module")
def docs(example: ModuleType) -> Any:
    return example.line_docs(num_lines=12, num_docs=3)


@pytest.fixture(scope="module")
def plain(example: ModuleType, tiny: Any, docs: Any) -> Any:
    found = example.evaluate(*tiny, docs)
    assert len(set(found["answers"])) == len(set(found["likelihoods"])) == 3
    return found


@pytest.mark.parametrize("drafter", ["lookup", "model"])
def test_scores_and_answers_are_the_plain_models_with_drafts(
    example: ModuleType, tiny: Any, docs: Any, plain: Any, drafter: str
) -> None:
    model, tokenizer = tiny
    with wrapped(model, noisy_copy(model) if drafter == "model" else drafter):
        assert example.evaluate(model, tokenizer, docs) == plain
        metrics = model.dspark.metrics
        assert (metrics.rows, metrics.fallback_calls) == (3, 0)
        assert metrics.verified > 0
        assert metrics.accepted > 0 or drafter == "lookup"


def test_batches_run_in_the_models_own_loop_as_their_stop_criterion_is_one_for_all(
    example: ModuleType, tiny: Any, docs: Any, plain: Any
) -> None:
    model, tokenizer = tiny
    with wrapped(model), model.dspark.sparse_attention(FEW) as stats:
        assert example.evaluate(model, tokenizer, docs, batch_size=3)["answers"] == plain["answers"]
        assert "MultiTokenEOSCriteria" in next(iter(model.dspark.metrics.fallback_reasons))
        assert stats.calls == 0


@pytest.mark.parametrize("drafter", [None, "lookup"])
def test_sparse_attention_with_all_pages_changes_no_score_and_no_answer(
    example: ModuleType, tiny: Any, docs: Any, plain: Any, drafter: str | None
) -> None:
    model, tokenizer = tiny
    with wrapped(model, drafter), model.dspark.sparse_attention(ALL) as stats:
        assert example.evaluate(model, tokenizer, docs) == plain
    assert stats.calls > 0
    assert stats.share == 1


def test_sparse_attention_changes_what_is_written_and_never_a_likelihood(
    example: ModuleType, tiny: Any, docs: Any, plain: Any
) -> None:
    model, tokenizer = tiny
    with wrapped(model, None):
        with model.dspark.sparse_attention(FEW) as stats:
            sparse = example.evaluate(model, tokenizer, docs)
        assert example.evaluate(model, tokenizer, docs) == plain
    assert sparse["likelihoods"] == plain["likelihoods"]
    assert sparse["answers"] != plain["answers"]
    assert stats.calls > 0
    assert stats.share < 0.5


def test_the_example_prints_all_three_ways(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lm_eval_drift.py", "--tiny", "--lines", "10"])
    example.main()
    plain, dense, drafted, sparse, read = capsys.readouterr().out.splitlines()[-5:]
    assert dense == plain.replace("plain:", "wrapped:")
    assert drafted.startswith("  accepted ")
    assert sparse.startswith("sparse: ")
    assert "of the pages in" in read
