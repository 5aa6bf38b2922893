"""Factors of budgets by layer: refused at construction, or where the policy meets the model.

Regimes: too few and too many; every way in which a policy comes to a model; layers that do not
select, which count as well; budgets of the user's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import tiny
from dspark_hf.attention.policy import BoostedBudget, FlatBudget, SparsePolicy, StepSignals
from dspark_hf.attention.sparse import SparseRow, SparseStats
from dspark_hf.drafting.self_sparse import SelfSparseDrafter
from dspark_hf.errors import ConfigError
from dspark_hf.evaluation import calibrate_budgets, perplexity_drift
from dspark_hf.evaluation.needle import needle_check
from dspark_hf.serving.queue import GenerationQueue
from dspark_hf.targets.flat import FlatTarget
from harness import CONFIG, generate, wrapped
from sparse_rows import LEAST
from training_files import byte_llama, byte_tokenizer

TEXT = "It was a bright cold day in April. " * 40
PROMPT = tiny.prompt(90)
WRONG = {
    "too few": FlatBudget((1.0, 0.5)),
    "too many": BoostedBudget(by_layer=(1.0, 0.5, 2.0, 1.0)),
}


@pytest.fixture(scope="module")
def llama() -> Any:
    return byte_llama()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FlatBudget((1.0, -0.5)), "factors in by_layer must be .* at least 0; got -0.5"),
        (lambda: FlatBudget((math.nan,)), "by_layer must be finite.*got nan"),
        (lambda: BoostedBudget(by_layer=(1.0, math.inf)), "by_layer must be finite.*got inf"),
        (lambda: BoostedBudget(by_layer=(-1.0,)), "by_layer must.*got -1.0"),
        (lambda: BoostedBudget(boost=-2.0), "boost must be .* at least 0; got -2.0"),
        (lambda: BoostedBudget(boost=math.nan), "boost must be finite.*got nan"),
    ],
    ids=["flat", "flat nan", "boosted inf", "boosted", "boost", "boost nan"],
)
def test_factors_that_no_budget_can_be_multiplied_by_are_refused(
    make: Callable[[], object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_factor_of_zero_reads_what_is_always_read(llama: Any) -> None:
    policy = SparsePolicy(tokens=96, recent_pages=2, min_context=0, budget=FlatBudget((0.0,) * 3))
    with wrapped(llama, drafter=None) as model, model.dspark.sparse_attention(policy) as stats:
        generate(model, [PROMPT], max_new_tokens=3)
    assert stats.calls > 0
    assert stats.mean_pages == 3


def read_in_a_context(model: Any, policy: SparsePolicy) -> None:
    with wrapped(model, drafter=None), model.dspark.sparse_attention(policy):
        generate(model, [PROMPT], max_new_tokens=2)


def read_by_a_config(model: Any, policy: SparsePolicy) -> None:
    with wrapped(model, drafter=None):
        generate(model, [PROMPT], max_new_tokens=2, dspark=replace(CONFIG, sparse=policy))


def draft_by_it(model: Any, policy: SparsePolicy) -> None:
    with wrapped(model, drafter=SelfSparseDrafter(policy, min_context=64)):
        generate(model, [PROMPT], max_new_tokens=2)


def queue_for_it(model: Any, policy: SparsePolicy) -> None:
    with wrapped(model, drafter=None), GenerationQueue(model) as queue:
        queue.submit(PROMPT, max_new_tokens=2, dspark=replace(CONFIG, sparse=policy))


def read_a_row(model: Any, policy: SparsePolicy) -> None:
    FlatTarget(model).read_sparsely(0, SparseRow(policy, SparseStats(), 0))


def calibrate(model: Any, policy: SparsePolicy) -> None:
    calibrate_budgets(model, byte_tokenizer(), TEXT, policy, context=200, queries=1)


def measure_drift(model: Any, policy: SparsePolicy) -> None:
    perplexity_drift(model, byte_tokenizer(), TEXT, policy, context=200, scored=8)


def look_for_a_needle(model: Any, policy: SparsePolicy) -> None:
    needle_check(model, byte_tokenizer(), {"it": policy}, TEXT, context=400, max_new_tokens=1)


WAYS = [
    read_in_a_context, read_by_a_config, draft_by_it, queue_for_it, read_a_row, calibrate,
    measure_drift, look_for_a_needle,
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_wrong_number_of_factors_is_refused_before_anything_is_decoded(
    llama: Any, way: Callable[[Any, SparsePolicy], None], wrong: str
) -> None:
    policy = LEAST.replace(budget=WRONG[wrong])
    words = f"each of the model's 3 layers; got {len(WRONG[wrong].by_layer)}. Measure them"
    lengths = [0]

    def note(_embeddings: Any, inputs: tuple[Any, ...]) -> None:
        lengths.append(inputs[0].shape[-1])

    hook = llama.get_input_embeddings().register_forward_pre_hook(note)
    try:
        with pytest.raises(ConfigError, match=words):
            way(llama, policy)
    finally:
        hook.remove()
    # The model may have been tried on a few tokens of no text: whether it runs on the flat target.
    assert max(lengths) < len(PROMPT)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_as_many_factors_as_layers_are_put_to_use(
    llama: Any, way: Callable[[Any, SparsePolicy], None]
) -> None:
    way(llama, LEAST.replace(budget=FlatBudget((1.0, 0.5, 2.0))))


def test_layers_that_do_not_select_count_as_well() -> None:
    gemma = tiny.gemma3()
    LEAST.replace(budget=FlatBudget((1.0, 1.0, 0.5))).require_fit(gemma)
    with pytest.raises(ConfigError, match="3 layers; got 1"):
        LEAST.replace(budget=FlatBudget((0.5,))).require_fit(gemma)


class Own:
    """A budget of a user's own, without factors by layer."""

    needs_entropy = False

    def factor(self, layer: int, signals: StepSignals) -> float:
        return 1.0 + layer


def test_a_budget_of_the_users_own_needs_no_factors_by_layer(llama: Any) -> None:
    read_in_a_context(llama, LEAST.replace(budget=Own()))
