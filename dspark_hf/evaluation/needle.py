"""A needle in a haystack: is a code hidden in a long text found again, dense and by each policy?"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from dspark_hf.errors import ConfigError
from dspark_hf.evaluation.corpus import read_documents
from dspark_hf.evaluation.perplexity import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from dspark_hf.attention.policy import SparsePolicy

DEPTHS = tuple((i + 0.5) / 10 for i in range(10))
"""Where the needle lies, as a share of the filler."""
NEEDLE = "\n\nThe secret code is {code}. Remember it.\n\n"
QUESTION = "\n\nQuestion: What is the secret code?\nAnswer: The secret code is"
DENSE = "dense"


@dataclass(frozen=True)
class NeedleResult:
    """One way of reading at one depth.

    Attributes:
        policy: Its name; "dense" for all of the context.
        depth: Share of the filler before the needle.
        code: What was hidden.
        answer: What was decoded, greedily.
        found: Whether the answer holds the code.
        calls: Attention calls that read selected pages; 0 when dense.
    """

    policy: str
    depth: float
    code: str
    answer: str
    found: bool
    calls: int

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Haystack:
    """A text of an exact number of tokens, with its code."""

    ids: list[int]
    code: str


def hide(
    tokenizer: PreTrainedTokenizerBase, filler: Sequence[int], context: int, depth: float, code: str
) -> Haystack:
    """Put a needle into filler and a question behind it.

    Args:
        tokenizer: Encodes needle and question.
        filler: Token ids of a text, long enough.
        context: Tokens in all, the BOS token included where there is one.
        depth: Share of the filler before the needle.
        code: What is hidden.

    Returns:
        Haystack: Of exactly `context` tokens.

    Raises:
        ConfigError: If the needle does not fit or the filler is too short.
    """
    lead = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    needle, question = encode(tokenizer, NEEDLE.format(code=code)), encode(tokenizer, QUESTION)
    room = context - len(lead) - len(needle) - len(question)
    if room < 1 or room > len(filler):
        raise ConfigError(
            f"context must leave room for needle and question, {context - room} tokens, and be "
            f"filled by the text's {len(filler)}; got {context}. Choose another context or text."
        )
    place = round(depth * room)
    return Haystack([*lead, *filler[:place], *needle, *filler[place:room], *question], code)


@torch.inference_mode()
def needle_check(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    policies: Mapping[str, SparsePolicy],
    data: Any = None,
    *,
    context: int = 8192,
    depths: Sequence[float] = DEPTHS,
    max_new_tokens: int = 16,
    seed: int = 0,
    observer: Callable[[int], None] | None = None,
) -> list[NeedleResult]:
    """Ask for a hidden code, densely and by each policy.

    Args:
        model: Wrapped, on the flat target.
        tokenizer: Its tokenizer.
        policies: By name. Their `min_context` is not applied.
        data: Filler, see `corpus.read_documents`.
        context: Tokens of a prompt.
        depths: Shares of the filler before the needle.
        max_new_tokens: Tokens decoded per answer.
        seed: Of the codes.
        observer: Told after every answer.

    Returns:
        list[NeedleResult]: By depth, dense first.

    Raises:
        ConfigError: If the context cannot be filled.
        NotImplementedError: If the model does not run on the flat target.
    """
    filler: list[int] = []
    for document in read_documents(data):
        filler.extend(encode(tokenizer, document))
    stream = random.Random(seed)  # noqa: S311 - no secret, and codes should repeat
    results = []
    for depth in depths:
        hay = hide(tokenizer, filler, context, depth, str(stream.randint(10_000, 99_999)))
        for name, policy in {DENSE: None, **policies}.items():
            results.append(_ask(model, tokenizer, hay, depth, name, policy, max_new_tokens))
            if observer is not None:
                observer(1)
    return results


def _ask(
    model: Any,
    tokenizer: Any,
    hay: Haystack,
    depth: float,
    name: str,
    policy: SparsePolicy | None,
    max_new_tokens: int,
) -> NeedleResult:
    ids = torch.tensor([hay.ids], device=model.device)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
    mask, calls = torch.ones_like(ids), 0
    if policy is None:
        out = model.generate(input_ids=ids, attention_mask=mask, **options)
    else:
        with model.dspark.sparse_attention(policy.replace(min_context=0)) as stats:
            out = model.generate(input_ids=ids, attention_mask=mask, **options)
        calls = stats.calls
    answer = str(tokenizer.decode(out[0, len(hay.ids) :], skip_special_tokens=True))
    return NeedleResult(name, depth, hay.code, answer, hay.code in answer, calls)
