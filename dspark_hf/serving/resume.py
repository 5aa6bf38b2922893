"""Requests that were begun elsewhere go on from the tokens they have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from dspark_hf.errors import ConfigError, QueueError
from dspark_hf.inputs import check_inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dspark_hf.rows import Row

OnToken: TypeAlias = "Callable[[int, int], None]"
"""Told of the place of a row in its call, and of each new token of it."""


def restore(model: Any, rows: Sequence[Row], committed: Sequence[Sequence[int]]) -> None:
    """Give rows the tokens they had elsewhere; rows that cannot take them stay at their prompts.

    Args:
        model: The target.
        rows: Of a request, new.
        committed: Each row's tokens; rows that are left out have none.

    Raises:
        ConfigError: If there are more lists than rows.
        InputError: If the model has no such tokens.
    """
    if len(committed) > len(rows):
        raise ConfigError(
            f"committed must hold one list of tokens per row, {len(rows)}; got {len(committed)}."
        )
    for tokens in committed:
        if tokens:
            check_inputs(model, torch.tensor([list(tokens)]), {})
    if all(row.can_restore for row in rows):
        for row, tokens in zip(rows, committed, strict=False):
            row.restore(tokens)


def follow(row: Row, committed: Sequence[int], on_token: OnToken | None) -> None:
    """Tell of a row's new tokens, and of none that it had elsewhere.

    A row that had to start at its prompt again must come to the same tokens; the first other one
    raises, so that its request fails.

    Args:
        row: With whoever hears of its tokens already.
        committed: What it had elsewhere.
        on_token: Who else hears of new ones.
    """
    hears = row.on_token

    def heard(token: int) -> None:
        place = row.num_new_tokens - 1
        if place < len(committed):
            if token != committed[place]:
                raise QueueError(
                    f"the request cannot go on from its {len(committed)} tokens: decoded again, "
                    f"token {place} is {token} and was {committed[place]}. Its scores or the state "
                    "of its processors are needed for that, and its sampling does not repeat: "
                    'submit it again, or use acceptance="coupled".'
                )
            return
        if hears is not None:
            hears(token)
        if on_token is not None:
            on_token(row.place, token)

    row.on_token = heard
