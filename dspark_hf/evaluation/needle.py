"""A needle in a haystack: is a code hidden in a long text found again, dense and by each policy?"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from dspark_hf.attention.sparse import SparseRow, SparseStats
from dspark_hf.errors import ConfigError
from dspark_hf.evaluation.corpus import read_documents
from dspark_hf.evaluation.perplexity import encode
from dspark_hf.evaluation.windows import leading_bos
from dspark_hf.losslessness import end_ids
from dspark_hf.targets.flat import FlatTarget, read_prompt
from dspark_hf.targets.select import choose_target
from dspark_hf.values import Feed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from dspark_hf.attention.policy import SparsePolicy

DEPTHS = tuple((i + 0.5) / 10 for i in range(10))
"""Where the needle lies, as a share of the filler."""
NEEDLE = "\n\nThe secret code is {code}. Remember it.\n\n"
QUESTION = "\n\nQuestion: What is the secret code?\nAnswer: The secret code is"
DENSE = "dense"
_UNREAD = object()


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
        context: Tokens in all, with the BOS token where the tokenizer begins texts with it.
        depth: Share of the filler before the needle.
        code: What is hidden.

    Returns:
        Haystack: Of exactly `context` tokens.

    Raises:
        ConfigError: If the needle does not fit or the filler is too short.
    """
    lead = leading_bos(tokenizer, "auto")
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
        model: A causal LM that runs on the flat target, wrapped or not.
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
        ConfigError: If the context cannot be filled, or a budget has factors for another number of
            layers.
        CheckpointError: If a predictor was trained for a model of another shape.
        NotImplementedError: If the model does not run on the flat target.
    """
    filler: list[int] = []
    for document in read_documents(data):
        filler.extend(encode(tokenizer, document))
    choose_target(model).require_sparse(model, "No policy can be checked.")
    for policy in policies.values():
        policy.require_fit(model)
    stream = random.Random(seed)  # noqa: S311 - no secret, and codes should repeat
    results = []
    for depth in depths:
        hay = hide(tokenizer, filler, context, depth, str(stream.randint(10_000, 99_999)))
        target = FlatTarget(model, context + max_new_tokens)
        read_by: object = _UNREAD
        for name, chosen in {DENSE: None, **policies}.items():
            reader = chosen if chosen is not None and chosen.prefill is not None else None
            stats = SparseStats()
            row = None if chosen is None else SparseRow(chosen, stats, 0)
            target.read_sparsely(0, row)
            # What has read a prompt alike need not read it again.
            if read_by is not reader:
                if read_by is not _UNREAD:
                    target.rollback(0, 0)
                read_prompt(target, hay.ids[:-1])
                read_by = reader
            answer = _answer(model, tokenizer, target, hay.ids, max_new_tokens)
            calls = stats.calls + stats.prefill_calls
            results.append(NeedleResult(name, depth, hay.code, answer, hay.code in answer, calls))
            if observer is not None:
                observer(1)
    return results


def _answer(
    model: Any, tokenizer: Any, target: FlatTarget, ids: Sequence[int], max_new_tokens: int
) -> str:
    """Decode greedily behind a prompt whose last token was not read yet; go back to there."""
    ends, token = end_ids(model, {}), ids[-1]
    answer: list[int] = []
    while len(answer) < max_new_tokens and token not in ends:
        token = int(target.forward([Feed(0, [token], 1)])[0][-1].argmax())
        answer.append(token)
    target.rollback(0, len(ids) - 1)
    return str(tokenizer.decode(answer, skip_special_tokens=True))
