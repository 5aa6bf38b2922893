"""Windows of a text, of one length and spread over it, with a BOS token where the model needs it.

Models such as Gemma are lost without the BOS token that their tokenizers put before every prompt,
and a window is read as a prompt wherever in the text it lies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dspark_hf.errors import ConfigError
from dspark_hf.evaluation.corpus import read_documents
from dspark_hf.evaluation.perplexity import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BOS = ("auto", "every", "none")
"""Which windows begin with BOS: every one if the tokenizer puts it before prompts, every, none."""


def leading_bos(tokenizer: PreTrainedTokenizerBase, bos: str) -> list[int]:
    """Return what stands before a window's text: the BOS token, or nothing.

    Args:
        tokenizer: Whose; without a BOS token nothing stands there.
        bos: "auto", if the tokenizer puts it before texts by itself, "every" or "none".

    Raises:
        ConfigError: If `bos` is none of these.
    """
    if bos not in BOS:
        raise ConfigError(
            f"bos must be one of {list(BOS)} for windows spread over a text; got {bos!r}."
        )
    if bos == "none" or tokenizer.bos_token_id is None:
        return []
    lead = [int(tokenizer.bos_token_id)]
    # By what it does: settings that ought to tell are missing or wrong in many tokenizers.
    is_added = list(tokenizer("a", verbose=False)["input_ids"])[:1] == lead
    return lead if bos == "every" or is_added else []


def spread_windows(
    tokenizer: PreTrainedTokenizerBase, data: Any, context: int, count: int, bos: str = "auto"
) -> list[list[int]]:
    """Return windows of a text, spread evenly over it.

    Args:
        tokenizer: Encodes it.
        data: See `corpus.read_documents`.
        context: Tokens of a window, its BOS included.
        count: How many, at most: no more than lie side by side.
        bos: See `leading_bos`. One that the text brings is not doubled.

    Raises:
        ConfigError: If the text is shorter than a window, or `bos` is not allowed.
    """
    lead = leading_bos(tokenizer, bos)
    ids: list[int] = []
    for document in read_documents(data):
        ids.extend(encode(tokenizer, document))
    if lead and ids[:1] == lead:
        del ids[0]
    length = context - len(lead)
    if len(ids) < length:
        raise ConfigError(
            f"data must be at least one window of {context} tokens; got {len(ids) + len(lead)}. "
            "Lower context or give more text."
        )
    count = min(count, max(1, len(ids) // length)) if count > 1 else 1
    starts = [round(i * (len(ids) - length) / max(count - 1, 1)) for i in range(count)]
    if lead:
        # Behind a document that begins with its own, a window begins a token earlier.
        starts = [start - (start > 0 and ids[start] == lead[0]) for start in starts]
    return [[*lead, *ids[start : start + length]] for start in starts]
