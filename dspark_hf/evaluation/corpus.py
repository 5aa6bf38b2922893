"""Texts to measure perplexity on: a string, documents, a file, a dataset, or Python's reference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_hf.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

COLUMNS = ("text", "content", "document")
"""Columns of a dataset that are taken as its text, in this order."""


def read_documents(data: Any = None) -> list[str]:
    """Return documents.

    Args:
        data: None for the text that ships with Python, its own language reference
            (`pydoc_data.topics`, about 113,000 tokens); a path to a text file; a text; a list of
            texts; a mapping per row as `datasets` gives them; a `Dataset`.

    Returns:
        list[str]: Without empty ones.

    Raises:
        ConfigError: If there is no text in it.
    """
    documents = [text for text in _documents(data) if text.strip()]
    if not documents:
        raise ConfigError(
            "data must hold text; got none. Pass a text, a list of texts, a path, or a dataset "
            f"with a column named one of {list(COLUMNS)}."
        )
    return documents


def _documents(data: Any) -> Iterable[str]:
    if data is None:
        from pydoc_data import topics

        return ["\n\n".join(text for _, text in sorted(topics.topics.items()))]
    if isinstance(data, Path) or (isinstance(data, str) and _is_file(data)):
        return [Path(data).read_text(encoding="utf-8")]
    if isinstance(data, str):
        return [data]
    return [_row_text(row) for row in data]


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        # Too long for a name, or with characters that none may have: a text.
        return False


def _row_text(row: Any) -> str:
    if isinstance(row, str):
        return row
    for column in COLUMNS:
        if isinstance(row, dict) and isinstance(row.get(column), str):
            return str(row[column])
    raise ConfigError(
        f"a row of data must be a text or have a column named one of {list(COLUMNS)}; got "
        f"{sorted(row) if isinstance(row, dict) else type(row).__name__}."
    )
