"""Options that several commands have alike."""

from __future__ import annotations

from typing import Annotated

import typer

Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Prompts per group at most. Default: all.")]
Target = Annotated[str, typer.Argument(help="Path or hub id of the target.")]
Temperatures = Annotated[
    list[float] | None,
    typer.Option(min=0, help="Decode at this, 0 for greedy; may be repeated. Default: 0, 1."),
]
DraftedTokens = Annotated[int, typer.Option(min=2, help="Tokens per prompt.")]
"""At least two, as the first one comes with the prompt, without a draft."""
