"""Section "scheduling": a mixed load at several batch sizes, schedules beside fixed lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dspark_hf.benchmarks import contenders as who
from dspark_hf.benchmarks import prompts as what
from dspark_hf.benchmarks.bench import Bench, SectionResult, contest
from dspark_hf.benchmarks.contest import Item, whole_call
from dspark_hf.benchmarks.drafting import GROUPS, chosen_drafter
from dspark_hf.benchmarks.stats import spread
from dspark_hf.benchmarks.timing import rotated, timed
from dspark_hf.config import MOST_DRAFT_TOKENS, DSparkConfig
from dspark_hf.evaluation.rounds import block_drafter
from dspark_hf.targets.select import choose_target
from dspark_hf.values import Feed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dspark_hf.benchmarks.contenders import Contender
    from dspark_hf.benchmarks.timing import Clock
    from dspark_hf.targets.base import Target

SCHEDULES = ("auto", "budget", "prefix", "threshold")
BATCHES, PROMPTS = 2, 16
"""Batches of each size at least, and prompts they hold together at least: a few single prompts
would say how lucky a length is with them. The settings' limit may lower the batches."""
OTHER_DRAFTS = 7
"""Longest draft of a drafter that has no block of its own."""
SPLITS = (
    (1, 1, 1, 1, 1, 1, 1, 0),
    (7, 0, 0, 0, 0, 0, 0, 0),
    (4, 3, 0, 0, 0, 0, 0, 0),
    (2, 2, 2, 1, 0, 0, 0, 0),
)
"""Ways to verify seven drafts of eight rows: fifteen tokens in every forward."""
SPLIT_CONTEXT = 128
"""Cached tokens per row while splits are timed."""
SPLIT_PASSES = 10
"""Timed forwards per split and repeat."""


def scheduling_section(bench: Bench) -> SectionResult:
    """Time every schedule and every fixed length against Transformers' static batch.

    Args:
        bench: Its settings name the drafter.

    Returns:
        SectionResult: One group per batch size; `extra["splits"]` has the cost of a step by how
        its tokens are spread over rows.
    """
    contenders = schedule_contenders(bench)
    result = contest(bench, "scheduling", contenders, batch_items(bench), whole_call)
    return replace(result, adds_all=False, extra={"splits": split_costs(bench)})


def schedule_contenders(bench: Bench) -> list[Contender]:
    """Return plain decoding, the schedules, and fixed lengths up to a whole block.

    Each has a drafter of its own, the block drafter alone where it comes with others.

    Args:
        bench: Model and settings.
    """
    first = _with_block(who.wrapped(bench.model, SCHEDULES[0], chosen_drafter(bench)))
    most = min(getattr(first.dspark.drafter, "block_size", OTHER_DRAFTS), MOST_DRAFT_TOKENS)
    configs = {
        name: DSparkConfig(schedule=name, max_draft_tokens=most, never_slower=name == "auto")
        for name in SCHEDULES
    }
    for length in range(1, most + 1):
        configs[f"fixed-{length}"] = DSparkConfig(
            schedule="fixed", max_draft_tokens=length, never_slower=False
        )
    contenders = [who.Contender(who.PLAIN, bench.model)]
    for name, config in configs.items():
        made = who.wrapped(bench.model, name, chosen_drafter(bench), config, bench.tokenizer)
        _with_block(made)
        contenders.append(made)
    return contenders


def _with_block(contender: Contender) -> Any:
    """Leave a wrapped model only its block drafter, if it has one; return the model."""
    model: Any = contender.model
    model.dspark.drafter = block_drafter(model.dspark.drafter) or model.dspark.drafter
    return model


def batch_items(bench: Bench) -> list[Item]:
    """Return batches of every size of the settings, code, chat and maths in turn.

    Args:
        bench: Tokenizer and settings.
    """
    tokens = bench.settings.max_new_tokens
    singles = what.prompt_items(bench.tokenizer, tokens, None)
    mixed = what.alternating([item for item in singles if item.group in GROUPS], len(singles))
    items = []
    for size in bench.settings.rows:
        group = f"{size} row" if size == 1 else f"{size} rows"
        batches = max(BATCHES, -(-PROMPTS // size))
        for turn in range(min(batches, bench.settings.limit or batches)):
            taken = [mixed[(turn * size + i) % len(mixed)] for i in range(size)]
            inputs = what.stacked([item.inputs["input_ids"][0] for item in taken], bench.pad_id)
            items.append(Item(f"{group}, batch {turn + 1}", group, inputs, tokens))
    return items


def split_costs(bench: Bench) -> list[dict[str, Any]]:
    """Time forwards of the same number of tokens, spread over rows in different ways.

    Args:
        bench: Model, settings and clock.

    Returns:
        list[dict[str, Any]]: Per split: lengths, seconds, and ratios to the first split's forward
        of the same pass; empty for a model that cannot be run here.
    """
    model = who.twin(bench.model)
    choice = choose_target(model)
    if choice.path is None:
        return []
    target = choice.build(model, SPLIT_CONTEXT + 16)
    for row in range(len(SPLITS[0])):
        target.forward([Feed(row, [1 + row] * SPLIT_CONTEXT, 1)])
    seconds: dict[tuple[int, ...], list[float]] = {split: [] for split in SPLITS}
    for turn in range(-1, SPLIT_PASSES * bench.settings.repeats):
        for split in rotated(SPLITS, turn):
            took = _step_seconds(target, split, bench.clock)
            # The first pass warms up.
            if turn >= 0:
                seconds[split].append(took)
    first = seconds[SPLITS[0]]
    return [
        {
            "lengths": list(split),
            "step_s": spread(times),
            "ratio": spread(time / base for time, base in zip(times, first, strict=True)),
        }
        for split, times in seconds.items()
    ]


def _step_seconds(target: Target, lengths: Sequence[int], clock: Clock) -> float:
    """Time one forward over every row's newest token and its draft, and take it back."""
    feeds = [Feed(row, [1] * (length + 1), length + 1) for row, length in enumerate(lengths)]
    for feed in feeds:
        target.hold(feed.row_id)
    took = timed(lambda: target.forward(feeds), clock)
    for feed in feeds:
        target.rollback(feed.row_id, SPLIT_CONTEXT)
    return took.wall_s
