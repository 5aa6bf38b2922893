"""Texts of a chat model's own making: it asks, by its own template, and it answers.

A drafter must guess what the target writes, so it learns from what the target writes. Many
conversations run as rows of one ragged target, a token each per forward; a row that ends makes
room for the next.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dspark_hf.errors import ConfigError
from dspark_hf.values import Feed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from transformers import PreTrainedTokenizerBase

    from dspark_hf.targets.base import Target

_SENTINEL = "\u241fquestion\u241f"


@dataclass(frozen=True)
class Template:
    """Where a chat template puts the user's words.

    Attributes:
        before: Ids before them.
        after: Ids behind them, up to where the answer begins.
        ends: Ids that end a turn.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    ends: frozenset[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, end_ids: Iterable[int]) -> Template:
        """Read a tokenizer's chat template.

        Args:
            tokenizer: With a chat template.
            end_ids: Ids at which the target stops.

        Returns:
            Template: Its two halves.

        Raises:
            ConfigError: If there is no template, or it does not show the user's words as they are.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "synthesising prompts needs a tokenizer with a chat template; this one has none. "
                "Pass prompts with --data."
            )
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": _SENTINEL}], tokenize=False, add_generation_prompt=True
        )
        parts = text.split(_SENTINEL)
        if len(parts) != 2:
            raise ConfigError(
                "the chat template must show the user's message exactly once; got "
                f"{len(parts) - 1} times. Pass prompts with --data."
            )
        before, after = (tokenizer(p, add_special_tokens=False)["input_ids"] for p in parts)
        return cls(tuple(before), tuple(after), frozenset(end_ids))


@dataclass(frozen=True)
class Conversation:
    """One prompt and the target's answer.

    Attributes:
        ids: All tokens.
        answer_start: Index of the answer's first token in `ids`.
        temperature: The answer was sampled at; 0 for greedy.
        domain: Label of the prompt, such as "code".
        index: Of its job.
    """

    ids: tuple[int, ...]
    answer_start: int
    temperature: float
    domain: str
    index: int = 0


@dataclass(frozen=True)
class Job:
    """A conversation to be written.

    Attributes:
        ids: What is given: a whole prompt, or the beginning of a question.
        asks: Whether the question is still to be finished.
        temperature: Of the answer.
        domain: Label.
        index: Name of the job; with `seed`, its samples depend on both and on nothing else.
        seed: None takes the samples from the generator that all such jobs share.
    """

    ids: tuple[int, ...]
    asks: bool
    temperature: float
    domain: str = ""
    index: int = 0
    seed: int | None = None


@dataclass(frozen=True)
class Lengths:
    """Most tokens sampled for a question and for an answer."""

    question: int = 64
    answer: int = 256


@dataclass
class _Draft:
    """A conversation being written."""

    job: Job
    ids: list[int]
    asks: bool
    generator: torch.Generator | None
    fed: int = 0
    left: int = 0
    answer_start: int = 0


QUESTION_TEMPERATURE = 0.8
"""Questions are sampled a little below 1: a small model's tail is noise."""


def converse(
    target: Target,
    template: Template,
    jobs: Iterable[Job],
    *,
    num_rows: int,
    lengths: Lengths = Lengths(),
    generator: torch.Generator | None = None,
) -> Iterator[Conversation]:
    """Write conversations, many at a time.

    Args:
        target: Empty; its rows are used and released.
        template: Of the target's tokenizer.
        jobs: What to write.
        num_rows: Conversations in flight.
        lengths: Where they are cut.
        generator: Of the samples of jobs without a seed.

    Yields:
        Conversation: In order of completion.
    """
    waiting = iter(jobs)
    rows: dict[int, _Draft] = {}
    names = itertools.count()
    free = deque(itertools.islice(names, num_rows))
    while True:
        while free and (job := next(waiting, None)) is not None:
            rows[free.popleft()] = _Draft(
                job,
                list(job.ids),
                job.asks,
                _generator_of(job, generator),
                left=lengths.question if job.asks else lengths.answer,
                answer_start=len(job.ids),
            )
        if not rows:
            return
        logits = target.forward(
            [Feed(row_id, draft.ids[draft.fed :], 1) for row_id, draft in rows.items()]
        )
        drafts = list(rows.values())
        chosen = sample(
            torch.cat(logits),
            [QUESTION_TEMPERATURE if d.asks else d.job.temperature for d in drafts],
            [d.generator for d in drafts],
        )
        done = []
        for (row_id, draft), token in zip(rows.items(), chosen, strict=True):
            if _advance(draft, token, template, lengths):
                done.append(row_id)
        # Last first: releasing another one would move the last row into its place.
        for row_id in reversed(done):
            draft = rows.pop(row_id)
            target.free(row_id)
            free.append(row_id)
            yield Conversation(
                tuple(draft.ids),
                draft.answer_start,
                draft.job.temperature,
                draft.job.domain,
                draft.job.index,
            )


def _generator_of(job: Job, shared: torch.Generator | None) -> torch.Generator | None:
    if job.seed is None:
        return shared
    return torch.Generator().manual_seed(job.seed * 1_000_003 + job.index)


def _advance(draft: _Draft, token: int, template: Template, lengths: Lengths) -> bool:
    """Take in a sampled token; tell whether the conversation is over."""
    draft.fed = len(draft.ids)
    draft.left -= 1
    ends = token in template.ends
    if draft.asks and (ends or not draft.left):
        draft.ids.extend(template.after if ends else (token, *template.after))
        draft.asks, draft.left, draft.answer_start = False, lengths.answer, len(draft.ids)
        return False
    draft.ids.append(token)
    return not draft.asks and (ends or not draft.left)


def sample(
    logits: torch.Tensor,
    temperatures: Sequence[float],
    generators: Sequence[torch.Generator | None] | None = None,
) -> list[int]:
    """Draw one token per row by inverting the cumulative distribution; greedy at temperature 0.

    Args:
        logits: Of shape (B, V).
        temperatures: One per row.
        generators: Sources of randomness, one per row; None for torch's own.

    Returns:
        list[int]: The tokens.
    """
    heat = torch.tensor(temperatures, device=logits.device)
    best = logits.argmax(dim=-1)
    probs = torch.softmax(logits / heat.clamp_min(1e-4)[:, None], dim=-1)
    total = probs.cumsum(dim=-1)
    sources = generators or [None] * len(temperatures)
    drawn = torch.stack([torch.rand(1, generator=source) for source in sources]).to(logits.device)
    ids = torch.searchsorted(total, drawn * total[:, -1:]).squeeze(-1)
    ids = ids.clamp_max(logits.shape[-1] - 1)
    return [int(i) for i in torch.where(heat == 0, best, ids).tolist()]
