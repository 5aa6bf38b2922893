"""What traces show of a token, on a terminal and on a page: its text and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from dspark_hf.tracing import RoundTrace

ACCEPTED, REFUSED, BEHIND, UNVERIFIED, OWN = (
    "accepted", "refused", "behind", "unverified", "own",
)  # fmt: skip
MEANINGS = {
    ACCEPTED: "draft token the target accepted",
    REFUSED: "draft token it refused",
    BEHIND: "verified in vain, behind the refused one or a stop",
    UNVERIFIED: "drafted, not verified",
    OWN: "the target's own token",
}
"""States and what a legend says of them."""
STYLES = {
    ACCEPTED: "green",
    REFUSED: "red strike",
    BEHIND: "dim red",
    UNVERIFIED: "bright_black",
    OWN: "bold",
}
VISIBLE = {"\n": "⏎", "\t": "⇥", "\r": "␍"}
"""What stands for characters that would break a line of tokens."""


@dataclass(frozen=True)
class TokenView:
    """A token of a round.

    Attributes:
        text: What it reads as; line breaks and tabs as signs.
        token: Its id.
        state: One of `MEANINGS`.
        confidence: The drafter's; None where it gave none and for the target's own.
    """

    text: str
    token: int
    state: str
    confidence: float | None = None


def token_text(tokenizer: Any, token: int) -> str:
    """Return a token's text, line breaks visible; its name where it is no text of its own."""
    text = str(tokenizer.decode([token]))
    if not text or "\ufffd" in text:
        text = str(tokenizer.convert_ids_to_tokens(token))
    return "".join(VISIBLE.get(character, character) for character in text)


def round_tokens(trace: RoundTrace, tokenizer: Any) -> list[TokenView]:
    """Return the tokens of a round: all that was drafted, then the target's own, if any."""
    views = []
    for k, token in enumerate(trace.drafted):
        if k < trace.accepted:
            state = ACCEPTED
        elif k >= trace.verified:
            state = UNVERIFIED
        else:
            state = REFUSED if k == trace.accepted and not trace.is_cut else BEHIND
        confidence = trace.confidence[k] if k < len(trace.confidence) else None
        views.append(TokenView(token_text(tokenizer, token), token, state, confidence))
    if trace.own is not None:
        views.append(TokenView(token_text(tokenizer, trace.own), trace.own, OWN))
    return views


def print_trace(console: Console, rounds: Sequence[RoundTrace], tokenizer: Any) -> None:
    """Print a line per round, tokens coloured by what became of them, confidences behind them."""
    console.print(
        Text.assemble(*((f"{name}: {what}  ", STYLES[name]) for name, what in MEANINGS.items()))
    )
    several = len({trace.row_id for trace in rounds}) > 1
    for trace in rounds:
        where = f"{trace.row + 1}.{trace.index + 1}" if several else f"{trace.index + 1}"
        line = Text(f"{where:>6} {trace.accepted}/{trace.verified}/{len(trace.drafted)} ", "dim")
        for view in round_tokens(trace, tokenizer):
            line.append(f"|{view.text}", STYLES[view.state])
            if view.confidence is not None:
                line.append(f" {view.confidence:.2f}", "dim")
        console.print(line, soft_wrap=True)
