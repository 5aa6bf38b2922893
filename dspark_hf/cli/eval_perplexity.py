"""`dspark-hf eval perplexity`: perplexity, and what sparse attention costs of it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dspark_hf.cli.options import Dtype  # noqa: TC001 - typer reads annotations
from dspark_hf.cli.progress import counting, show_table
from dspark_hf.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dspark_hf.attention.policy import SparsePolicy


def perplexity(
    model: Annotated[str, typer.Argument(help="Path or hub id of the model.")],
    data: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Text file. Default: Python's reference."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="quality, fast, or none: no drift. May be given twice. Default: quality."
        ),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens read per key head; several make a sweep."),
    ] = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 8192,
    scored: Annotated[int, typer.Option(min=1, help="Tokens scored at most.")] = 4096,
    bos: Annotated[
        str | None,
        typer.Option(
            help="Windows that begin with BOS: every, none, or auto: every if the tokenizer adds "
            "it by itself. With --policy none: every, none, or once. Default: auto, or once."
        ),
    ] = None,
    dtype: Dtype = "bfloat16",
    prefill: Annotated[
        bool,
        typer.Option("--prefill", help="Measure prompts read in blocks instead of steps."),
    ] = False,
    predictor: Annotated[
        str | None,
        typer.Option(
            help="What scores pages: bound, quest, recent, or a file that `train predictor` wrote. "
            "Default: bound."
        ),
    ] = None,
    budgets: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="File that `eval budgets` wrote."),
    ] = None,
    needle: Annotated[
        bool, typer.Option("--needle", help="Also ask for a code hidden at ten depths.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write results here.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw drift and speed against tokens here.")
    ] = None,
) -> None:
    """Measure perplexity, dense beside sparse on the same tokens, step by step as in decoding.

    Sparse attention is not lossless; the drift is what it costs. Steps and, with `--prefill`,
    prompts have each their own. With `--policy none`, plain perplexity over sliding windows.
    """
    from dspark_hf.benchmarks.environment import command_line, conditions, machine
    from dspark_hf.cli import session
    from dspark_hf.evaluation.budgets import LayerBudgets
    from dspark_hf.evaluation.drift import perplexity_drifts
    from dspark_hf.evaluation.needle import needle_check
    from dspark_hf.evaluation.plots import require_matplotlib

    policies = _policies(policy or ["quality"], tokens or [], predictor)
    if (needle or prefill or budgets is not None or plot is not None) and not policies:
        raise ConfigError(
            "--needle, --prefill, --budgets and --plot need a policy; got --policy none. Choose "
            "another."
        )
    if prefill:
        policies = {name: _with_prefill(chosen) for name, chosen in policies.items()}
    if plot is not None:
        require_matplotlib()
    wrapped, tokenizer = session.load(model, "none", dtype)
    if budgets is not None:
        factors = LayerBudgets.load(budgets)
        policies = {name: factors.policy(chosen, wrapped) for name, chosen in policies.items()}
    results: dict[str, Any] = {
        "model": Path(model).name,
        "dtype": dtype,
        "data": "pydoc_data.topics" if data is None else data.name,
        "predictor": None if predictor is None else Path(predictor).name,
        "budgets": None if budgets is None else budgets.name,
        "machine": machine(),
        "conditions": conditions(command_line(sys.argv[1:])),
    }
    console = Console(stderr=True)
    if not policies:
        results["perplexity"] = _plain(wrapped, tokenizer, data, context, scored, bos or "once")
    if policies:
        with counting(console, "windows", None) as tell:
            reports = perplexity_drifts(
                wrapped, tokenizer, data, policies, observer=tell,
                context=context, scored=scored, path="prefill" if prefill else "steps",
                bos=bos or "auto",
            )  # fmt: skip
        results["drift"] = [
            {"policy": name, "tokens": policies[name].tokens, "mass": policies[name].mass}
            | report.to_dict()
            for name, report in reports.items()
        ]
        _show(results)
    if needle:
        with counting(console, "answers", 10 * (1 + len(policies))) as tell:
            answers = needle_check(
                wrapped, tokenizer, policies, data, context=context, observer=tell
            )
        results["needle"] = [answer.to_dict() for answer in answers]
        _show({**results, "drift": None})
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        console.print(f"wrote {json_file}", soft_wrap=True)
    if plot is not None:
        from dspark_hf.evaluation.drift_plot import draw_sweep

        draw_sweep(results, plot)
        console.print(f"wrote {plot}", soft_wrap=True)


def _policies(
    names: Sequence[str], tokens: Sequence[int], predictor: str | None = None
) -> dict[str, SparsePolicy]:
    """Return the policies to measure, by the name that tables show."""
    from dspark_hf.attention.policy import PRESETS

    unknown = sorted({*names} - {*PRESETS, "none"})
    if unknown:
        raise ConfigError(
            f"--policy must be one of {[*sorted(PRESETS), 'none']}; got {unknown[0]!r}."
        )
    if "none" in names:
        if tokens or predictor or len(names) > 1:
            raise ConfigError(
                "--tokens, --predictor and another --policy need a policy; got --policy none with "
                f"{[*(tokens or []), *filter(None, [predictor]), *names]}. Choose one of "
                f"{sorted(PRESETS)}."
            )
        return {}
    policies = {}
    for name in dict.fromkeys(names):
        preset = PRESETS[name] if predictor is None else _with_predictor(PRESETS[name], predictor)
        if not tokens:
            policies[name] = preset
        for count in sorted(set(tokens)):
            policies[f"{name} {count}"] = replace(preset, tokens=count)
    return policies


def _with_prefill(policy: SparsePolicy) -> SparsePolicy:
    """Return a policy that reads prompts by the same budget as steps."""
    from dspark_hf.attention.policy import SparsePrefill

    return policy.replace(prefill=SparsePrefill(tokens=policy.tokens))


def _with_predictor(policy: SparsePolicy, name: str) -> SparsePolicy:
    from dspark_hf.attention.learned import load_predictor
    from dspark_hf.attention.predictors import RecentPredictor

    chosen = load_predictor(name)
    if policy.mass is not None and isinstance(chosen, RecentPredictor):
        raise ConfigError(
            "--predictor recent must come with --policy fast: its scores tell nothing of the mass "
            "that --policy quality asks for."
        )
    return policy.replace(predictor=chosen)


def _plain(
    model: Any, tokenizer: Any, data: Any, context: int, scored: int, bos: str
) -> dict[str, Any]:
    from dspark_hf.benchmarks.markers import Table
    from dspark_hf.evaluation.perplexity import perplexity as measure

    report = measure(model, tokenizer, data, context=context, bos=bos, max_tokens=scored + 1)
    header = ["perplexity", "scored tokens", "windows", "context", "stride", "BOS"]
    facts = [report.scored, report.windows, report.context, report.stride, report.bos]
    row = [f"{report.ppl:.4f}", *map(str, facts)]
    show_table(Table("Perplexity", header, [row], ""))
    return report.to_dict()


def _show(results: Mapping[str, Any]) -> None:
    from dspark_hf.evaluation.drift_tables import drift_tables

    for tables in drift_tables(results).values():
        for shown in tables:
            show_table(shown)
