"""How the commands show text, accepted draft tokens and numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from rich.console import Console

    from dspark_hf.losslessness import Fork
    from dspark_hf.metrics import SpeculationRecord

ACCEPTED_STYLE = "green"
"""Colour of text whose tokens were all accepted draft tokens."""
NOTE_STYLE = "dim"


@dataclass(frozen=True)
class Piece:
    """A stretch of text and whether it consists of accepted draft tokens alone."""

    text: str
    accepted: bool


def pieces_of(tokenizer: Any, ids: Sequence[int], accepted_mask: Sequence[bool]) -> list[Piece]:
    """Cut a text at its tokens, so that each piece can be coloured.

    A token whose text is not yet a prefix of the whole, such as the first bytes of a character,
    joins the tokens after it.

    Args:
        tokenizer: Decodes; special tokens are left out.
        ids: New tokens of one row.
        accepted_mask: One flag per token; missing ones count as False.

    Returns:
        list[Piece]: Joined, exactly the decoded text.

    Cost: one decode per token, of all tokens before it.
    """
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    mask = [*accepted_mask, *[False] * len(ids)][: len(ids)]
    pieces: list[Piece] = []
    start, held = 0, []
    for count, accepted in enumerate(mask, start=1):
        held.append(accepted)
        text = tokenizer.decode(ids[:count], skip_special_tokens=True)
        end = len(whole) if count == len(mask) else len(text)
        if end > start and (count == len(mask) or whole.startswith(text)):
            pieces.append(Piece(whole[start:end], all(held)))
            start, held = end, []
    return pieces


def print_exactly(console: Console, pieces: Sequence[Piece]) -> None:
    """Print pieces as they are: no wrapping, no markup, tabs kept; then one newline."""
    green = console.get_style(ACCEPTED_STYLE)
    # Segments go out untouched; a Text would expand tabs and drop control characters.
    segments = [Segment(piece.text, green if piece.accepted else None) for piece in pieces]
    console.print(Segments([*segments, Segment("\n")]), soft_wrap=True, end="")


def as_text(pieces: Sequence[Piece]) -> Text:
    """Return pieces as one coloured text for a panel."""
    text = Text()
    for piece in pieces:
        text.append(piece.text, ACCEPTED_STYLE if piece.accepted else None)
    return text


def legend(console: Console) -> Text:
    """Return one line that explains the colours, or that there are none."""
    if console.color_system is None:
        return Text("(On a terminal, accepted draft tokens are green.)")
    rest = ": draft tokens the model accepted; the others are its own"
    return Text.assemble(("green", ACCEPTED_STYLE), (rest, NOTE_STYLE))


def speculation_table(records: Sequence[SpeculationRecord]) -> Table:
    """Return a table with one line of statistics per row."""
    table = plain_table("row", "tokens", "rounds", "drafted", "verified", "accepted",
                        "accepted length", "path")  # fmt: skip
    for number, record in enumerate(records, start=1):
        counts = (
            record.new_tokens,
            record.rounds,
            record.drafted,
            record.verified,
            record.accepted,
        )
        table.add_row(
            str(number), *map(str, counts), f"{record.accepted_length:.2f}", path_name(record.path)
        )
    return table


def plain_table(*header: str, left: Sequence[str] = (), title: str | None = None) -> Table:
    """Return an empty table: numbers on the right, columns named in `left` on the left."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for name in header:
        table.add_column(name, justify="left" if name in left else "right")
    return table


def path_name(path: str) -> str:
    """Return how a record's path is shown."""
    return "own loop" if path == "transformers" else path


def mean_accepted_length(records: Sequence[SpeculationRecord]) -> float:
    """Return the accepted length over all rows, as `LifetimeMetrics` defines it."""
    from dspark_hf.metrics import LifetimeMetrics

    metrics = LifetimeMetrics()
    metrics.add(list(records))
    return metrics.accepted_length


def identical_text(fork: Fork | None, dtype: torch.dtype) -> Text:
    """Say whether two greedy texts are identical, and if not how close a call it was.

    Args:
        fork: Where they part; None where nowhere.
        dtype: Type the model computes in.

    Returns:
        Text: One or two lines.
    """
    if fork is None:
        return Text.assemble("identical: ", ("yes", "bold green"))
    text = Text.assemble("identical: ", ("no", "bold yellow" if fork.is_near_tie else "bold red"))
    kind = str(dtype).removeprefix("torch.")
    text.append(f"; they part at token {fork.index + 1}, ")
    if fork.is_near_tie:
        text.append(f"a near-tie in {kind}: plain scored the two {fork.margin:.3g} apart")
    else:
        text.append(f"where plain scored the two {fork.margin:.3g} apart: no {kind} rounding")
    return text
