"""Tables as markdown, and documents that show them between markers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dspark_hf.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Table:
    """A table of text, before it becomes markdown or a terminal's.

    Attributes:
        title: What it shows.
        header: Column titles.
        rows: Cells.
        note: Conditions of the measurement; belongs below the table.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        """Return the table in markdown, numbers to the right, the note below."""
        if not self.header:
            return f"{self.note}\n"
        num_left = 2 if len(self.header) > 1 else 1
        rule = ["---" if i < num_left else "---:" for i in range(len(self.header))]
        lines = [_line(self.header), _line(rule), *(_line(row) for row in self.rows)]
        return "\n".join([*lines, *(["", self.note] if self.note else [])]) + "\n"


def update_markers(
    text: str, tables: Mapping[str, Sequence[Table]], *, kind: str = "bench"
) -> tuple[str, list[str]]:
    """Replace what a document shows between markers.

    Args:
        text: A document with `<!-- KIND:NAME -->` and `<!-- /KIND -->` around each place.
        tables: By name.
        kind: Whose places are filled; those of another kind are left alone.

    Returns:
        tuple[str, list[str]]: The document, and the names of the places filled.

    Raises:
        ConfigError: If there is no place, one is not closed, or its name is not known.
    """
    marker = re.compile(
        rf"(?P<open><!-- {kind}:(?P<name>[\w-]+) -->\n?)(?P<body>.*?)(?P<close><!-- /{kind} -->)",
        re.DOTALL,
    )
    opened = re.findall(rf"<!-- {kind}:([\w-]+) -->", text)
    found = [match["name"] for match in marker.finditer(text)]
    if not opened:
        raise ConfigError(
            f"the document must hold `<!-- {kind}:NAME -->` and `<!-- /{kind} -->`; got neither. "
            f"Add them where a table belongs; names are {sorted(tables)}."
        )
    if opened != found:
        raise ConfigError(
            f"every `<!-- {kind}:NAME -->` must be closed by `<!-- /{kind} -->`; got {opened} "
            f"opened and {found} closed."
        )
    for name in found:
        if name not in tables:
            raise ConfigError(
                f"a marker must name a table of the result file, one of {sorted(tables)}; got "
                f"{name!r}. Correct the marker, or measure that section first."
            )

    def filled(match: re.Match[str]) -> str:
        return (
            f"<!-- {kind}:{match['name']} -->\n{as_markdown(tables[match['name']])}{match['close']}"
        )

    return marker.sub(filled, text), found


def as_markdown(tables: Sequence[Table], *, titles: bool | None = None) -> str:
    """Return tables below each other.

    Args:
        tables: In order.
        titles: Whether each gets its title; None if there are several.

    Returns:
        str: Markdown, ending in a line break.
    """
    wants = len(tables) > 1 if titles is None else titles
    return "\n".join(
        f"**{table.title}**\n\n{table.markdown()}" if wants else table.markdown()
        for table in tables
    )


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
