"""A trace as one HTML page that needs nothing else: every round, token by token."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from dspark_hf.cli.token_view import (
    ACCEPTED,
    BEHIND,
    MEANINGS,
    OWN,
    REFUSED,
    UNVERIFIED,
    TokenView,
    round_tokens,
    token_text,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dspark_hf.metrics import SpeculationRecord
    from dspark_hf.tracing import RoundTrace

LIGHTEST = 0.25
"""Strength of a token's colour at confidence 0; 1 at confidence 1."""
STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --paper: #fcfcfa; --rule: #d5d8de;
  --faint: #697080; --good: 38 141 83; --bad: 203 62 52; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ec; --paper: #15181d; --rule: #3a404a;
  --faint: #99a1ae; --good: 62 168 106; --bad: 226 92 80; } }
body { margin: 2rem auto; max-width: 64rem; padding: 0 1rem; color: var(--ink);
  background: var(--paper); font: 16px/1.6 system-ui, sans-serif; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
.note, th, .index { color: var(--faint); }
dl { display: flex; flex-wrap: wrap; gap: .3rem 2rem; margin: 1rem 0; }
dt { color: var(--faint); font-size: .8rem; } dd { margin: 0; font-size: 1.2rem; }
.flow { border-top: 1px solid var(--rule); padding-top: .7rem; line-height: 2; }
.round { border-left: 2px solid var(--rule); padding-left: 2px; margin-right: 4px; }
.t { font: .85rem/1.5 ui-monospace, monospace; white-space: pre-wrap; padding: .1em .2em;
  border-radius: 3px; border: 1px solid transparent; }
.accepted { background: rgb(var(--good) / calc(var(--c, 1) * .5)); }
.refused { background: rgb(var(--bad) / calc(var(--c, 1) * .5)); text-decoration: line-through; }
.behind { color: rgb(var(--bad)); border: 1px dotted rgb(var(--bad) / .6); }
.unverified { color: var(--faint); border: 1px dashed var(--rule); }
.own { font-weight: 700; border-bottom: 2px solid var(--ink); border-radius: 0; }
summary { cursor: pointer; margin-top: .7rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; }
td, th { text-align: left; padding: .2rem .7rem .2rem 0; border-bottom: 1px solid var(--rule);
  vertical-align: top; }
.n { text-align: right; font-variant-numeric: tabular-nums; }
"""


def trace_page(
    rounds: Sequence[RoundTrace],
    records: Sequence[SpeculationRecord],
    prompts: Sequence[Sequence[int]],
    tokenizer: Any,
    *,
    title: str,
    first: Sequence[int | None] = (),
) -> str:
    """Return the page.

    Args:
        rounds: Of one call.
        records: One per row of it.
        prompts: Ids of each row's prompt.
        tokenizer: Names the tokens.
        title: What ran; shown and escaped.
        first: Each row's first token, which comes with the prompt's forward and is in no round.

    Returns:
        str: HTML; everything that is not ours is escaped.
    """
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        _totals(records),
        _legend(),
    ]
    for place, prompt in enumerate(prompts):
        own = [trace for trace in rounds if trace.row == place]
        start = first[place] if place < len(first) else None
        parts.append(
            _row(own, place, len(prompts), str(tokenizer.decode(prompt)), start, tokenizer)
        )
    return "\n".join([*parts, "</body></html>", ""])


def _totals(records: Sequence[SpeculationRecord]) -> str:
    names = ("new_tokens", "rounds", "drafted", "verified", "accepted")
    sums = {name: sum(getattr(record, name) for record in records) for name in names}
    length = (sums["new_tokens"] - len(records)) / sums["rounds"] if sums["rounds"] else 0.0
    shown = {name.replace("_", " "): f"{value:,}" for name, value in sums.items()}
    shown["accepted length"] = f"{length:.2f}"
    cells = (f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in shown.items())
    return f"<dl>{''.join(cells)}</dl>"


def _legend() -> str:
    names = {
        ACCEPTED: "accepted", REFUSED: "refused", BEHIND: "behind", UNVERIFIED: "unverified",
        OWN: "own",
    }  # fmt: skip
    items = (
        f'<span class="t {state}">{names[state]}</span> {what}' for state, what in MEANINGS.items()
    )
    return (
        f'<p class="note">{"; ".join(items)}. The stronger a colour, the more confident the '
        "drafter; point at a token for the number.</p>"
    )


def _row(
    rounds: Sequence[RoundTrace],
    place: int,
    num_rows: int,
    prompt: str,
    first: int | None,
    tokenizer: Any,
) -> str:
    views = [round_tokens(trace, tokenizer) for trace in rounds]
    flow = [] if first is None else [_token(TokenView(token_text(tokenizer, first), first, OWN))]
    flow += [f'<span class="round">{"".join(map(_token, tokens))}</span><wbr>' for tokens in views]
    table = [
        f'<tr><td class="n index">{trace.index + 1}</td><td class="n">{trace.context}</td>'
        f'<td class="n">{len(trace.drafted)}</td><td class="n">{trace.verified}</td>'
        f'<td class="n">{trace.accepted}</td><td>{escape(trace.drafter)}</td>'
        f"<td>{' '.join(_detail(view) for view in tokens)}</td></tr>"
        for trace, tokens in zip(rounds, views, strict=True)
    ]
    heading = f"<h2>Row {place + 1}</h2>" if num_rows > 1 else ""
    head = "".join(
        f"<th>{name}</th>"
        for name in ("round", "context", "drafted", "verified", "accepted", "drafter", "tokens")
    )
    return (
        f"{heading}<details><summary>Prompt</summary>"
        f'<div class="t">{escape(prompt)}</div></details>'
        f'<div class="flow">{"".join(flow)}</div>'
        f"<details><summary>{len(rounds)} rounds as a table</summary>"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(table)}</tbody>'
        "</table></div></details>"
    )


def _token(view: TokenView) -> str:
    style, said = "", ""
    if view.confidence is not None:
        style = f' style="--c:{LIGHTEST + (1 - LIGHTEST) * view.confidence:.2f}"'
        said = f", confidence {view.confidence:.3f}"
    tip = escape(f"{MEANINGS[view.state]}, id {view.token}{said}", quote=True)
    return f'<span class="t {view.state}" title="{tip}"{style}>{escape(view.text)}</span>'


def _detail(view: TokenView) -> str:
    said = "" if view.confidence is None else f' <span class="note">{view.confidence:.2f}</span>'
    return _token(view) + said
