"""`dspark-hf verify`: a losslessness self-test of the user's own model, drafter and settings."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from dspark_hf.cli.options import Dtype  # noqa: TC001 - typer reads annotations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from dspark_hf.losslessness import Fork, GreedyResult, SamplingResult

DEFAULT_IDS = (
    "chat-01", "chat-13", "code-01", "code-10", "maths-01", "rewrite-03", "rewrite-10",
    "rewrite-15",
)  # fmt: skip
"""Prompts of every group; the rewrites are those in which lookup drafts most."""
SAMPLING_TEXTS = (
    "the cat and the dog and the",
    "a b c a c b a b",
    "red green blue red green blue red green",
)
"""Short texts that repeat without being certain, so that lookup drafts and is sometimes wrong."""
PROBE_SAMPLES = 16
"""Samples that show whether drafts are verified after a text."""
VERDICT_STYLES = {
    "equal": "green", "consistent": "green", "near-tie": "yellow", "inconclusive": "yellow",
    "different": "bold red",
}  # fmt: skip


def verify(
    model: Annotated[str, typer.Option(help="Path or hub id of a causal LM.")],
    drafter: Annotated[
        str, typer.Option(help="auto, lookup, or the path or hub id of a drafter.")
    ] = "lookup",
    prompts: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="One prompt a line. Default: 8 of ours."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens per prompt.")] = 64,
    dtype: Dtype = "bfloat16",
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per generate() call.")] = 1,
    exactness: Annotated[
        str, typer.Option(help="plain, or recheck: near-ties are decided by a one-token forward.")
    ] = "plain",
    acceptance: Annotated[
        str, typer.Option(help="Rule of the sampling test: rejection or coupled.")
    ] = "rejection",
    samples: Annotated[
        int, typer.Option(min=0, help="Samples of the sampling test; 0 skips it.")
    ] = 400,
    seed: Annotated[int, typer.Option(help="Seed of the sampling test.")] = 0,
    kw: Annotated[
        list[str] | None,
        typer.Option(help="Setting of generate(), such as repetition_penalty=1.1; repeatable."),
    ] = None,
) -> None:
    """Check that a model says the same with this package as without it.

    Exit code 0: every text is equal (in 16 bits: or differs first at a near-tie) and sampled tokens
    fit the exact distribution. Exit code 1: a real difference was found.
    """
    from dspark_hf.cli import session
    from dspark_hf.config import DSparkConfig
    from dspark_hf.losslessness import greedy_check

    console = Console(highlight=False)
    keywords = session.parse_keywords(kw or [])
    config = DSparkConfig(exactness=exactness, acceptance=acceptance)
    names, texts = _named_prompts(prompts)
    wrapped, tokenizer = session.load(model, drafter, dtype, config)
    encoded = [
        row for text in texts for row in session.rows_of(session.encode(wrapped, tokenizer, [text]))
    ]
    console.print(
        f"{model}: {str(wrapped.dtype).removeprefix('torch.')}, drafter {drafter}, {len(texts)} "
        f"prompts in batches of {batch_size}, {max_new_tokens} new tokens"
    )
    results = greedy_check(wrapped, encoded, max_new_tokens, batch_size=batch_size, **keywords)
    console.print(greedy_table(names, results, tokenizer))
    sampling = None
    if samples:
        candidates = [session.rows_of(session.encode(wrapped, tokenizer, [text], chat=False))[0]
                      for text in SAMPLING_TEXTS]  # fmt: skip
        sampling = sampling_test(wrapped, [*candidates, *encoded], samples, seed, keywords)
        console.print(sampling_line(sampling, tokenizer))
    message, is_failure = conclusion(results, sampling)
    console.print(Text(message, "bold red" if is_failure else "bold green"))
    if is_failure:
        raise typer.Exit(1)


def sampling_test(
    model: Any,
    candidates: Sequence[Sequence[int]],
    num_samples: int,
    seed: int,
    keywords: dict[str, Any],
) -> SamplingResult:
    """Run the sampling test on the first prompt after which drafts are verified.

    Args:
        model: A wrapped model.
        candidates: Encoded prompts, the shortest tried first.
        num_samples: Samples of the test.
        seed: Of the samples.
        keywords: Further keywords of generate().

    Returns:
        SamplingResult: Of that prompt, or of the shortest if nothing is drafted after any.
    """
    from dspark_hf.losslessness import sampling_check

    ordered = sorted(candidates, key=len)
    for ids in ordered:
        probe = sampling_check(model, ids, min(PROBE_SAMPLES, num_samples), seed, **keywords)
        if probe.verified:
            return sampling_check(model, ids, num_samples, seed, **keywords)
    return sampling_check(model, ordered[0], min(PROBE_SAMPLES, num_samples), seed, **keywords)


def greedy_table(names: Sequence[str], results: Sequence[GreedyResult], tokenizer: Any) -> Table:
    """Return the comparison of every prompt as a table.

    Args:
        names: Of the prompts.
        results: One per prompt.
        tokenizer: Shows the tokens at a difference.

    Returns:
        Table: One line per prompt.
    """
    from dspark_hf.cli.render import path_name, plain_table

    table = plain_table("prompt", "tokens", "path", "verified", "accepted", "verdict",
                        "first difference", left=("prompt", "verdict", "first difference"),
                        title="Greedy text, with and without")  # fmt: skip
    for name, result in zip(names, results, strict=True):
        record = result.record
        table.add_row(
            Text(name),
            str(len(result.plain_ids)),
            path_name(record.path),
            str(record.verified),
            str(record.accepted),
            Text(result.verdict, VERDICT_STYLES[result.verdict]),
            Text(_difference(result.fork, tokenizer)),
        )
    return table


def sampling_line(result: SamplingResult, tokenizer: Any) -> Text:
    """Return the sampling test in one line.

    Args:
        result: Of the test.
        tokenizer: Shows the first token.

    Returns:
        Text: Coloured by verdict.
    """
    line = Text("Sampled tokens: ")
    line.append(result.verdict, VERDICT_STYLES[result.verdict])
    line.append(
        f" (p-value {result.p_value:.3g}, {result.df} degrees of freedom; {result.num_tested} of "
        f"{result.num_samples} samples began with {tokenizer.decode([result.first_token])!r}; "
        f"{result.verified} draft tokens verified, {result.accepted} accepted)"
    )
    return line


def conclusion(
    results: Sequence[GreedyResult], sampling: SamplingResult | None
) -> tuple[str, bool]:
    """Sum up.

    Args:
        results: Of the greedy comparison.
        sampling: Of the sampling test; None if skipped.

    Returns:
        tuple[str, bool]: A sentence, and whether a real difference was found.
    """
    different = [result for result in results if result.verdict == "different"]
    if different or (sampling is not None and sampling.verdict == "different"):
        what = [f"{len(different)} greedy texts"] if different else []
        if sampling is not None and sampling.verdict == "different":
            what.append("sampled tokens")
        return f"DIFFERENT: {' and '.join(what)} differ by more than rounding.", True
    num_ties = sum(result.verdict == "near-tie" for result in results)
    message = f"No real difference: {len(results) - num_ties} of {len(results)} texts are equal"
    if num_ties:
        message += f", {num_ties} part at a near-tie within rounding"
    if not any(result.record.verified for result in results):
        message += "; but no draft was verified, so this tested no drafting"
    return message + ".", False


def _difference(fork: Fork | None, tokenizer: Any) -> str:
    if fork is None:
        return ""
    plain, ours = (repr(tokenizer.decode([token])) for token in (fork.plain_token, fork.token))
    return (
        f"token {fork.index + 1}: {plain}, not {ours}; margin {fork.margin:.3g}, rounding up to "
        f"{fork.margin_limit:.3g}"
    )


def _named_prompts(path: Path | None) -> tuple[list[str], list[str]]:
    if path is None:
        from dspark_hf.data import load_prompts

        chosen = [prompt for prompt in load_prompts() if prompt.id in DEFAULT_IDS]
        return [prompt.id for prompt in chosen], [prompt.text for prompt in chosen]
    from dspark_hf.errors import InputError

    texts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not texts:
        raise InputError(f"--prompts must name a file with one prompt a line; {path} has none.")
    return [f"line {number}" for number in range(1, len(texts) + 1)], texts
