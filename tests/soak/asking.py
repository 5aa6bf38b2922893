"""The requests of a soak: each follows from its number, and is known with its run alone."""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from queues import Asked, greedy
from soak.subject import Subject
from unlike_requests import of_kind

LONGEST_PROMPT, LONGEST_BEGINNING, LONGEST_ANSWER, LONG_ANSWER = 60, 48, 40, 120
NUM_BEGINNINGS = 12
MOST_KNOWN = 1024
"""Requests whose runs alone are remembered: the soak's own memory must not grow."""
SHARE_ALONE = 0.1
"""Of the time that runs alone may take: between two of them known requests are asked again."""


@dataclass(frozen=True)
class Question:
    """A request and what it comes to alone.

    Attributes:
        number: It follows from.
        asked: What is submitted.
        rows: New tokens of every row alone, padding included, int32 of shape (B, W).
        text: Of the first row alone.
        runs_alone: Whether a queue runs it in the model's own loop.
    """

    number: int
    asked: Asked
    rows: torch.Tensor
    text: str
    runs_alone: bool


class Library:
    """Draws requests; mostly such as are known already."""

    def __init__(self, subject: Subject, seed: int) -> None:
        """Start knowing none.

        Args:
            subject: What is asked.
            seed: Of the numbers of requests.
        """
        self.subject = subject
        self.num_runs = 0
        self._next = seed * 10**6
        self._lock = threading.Lock()
        self._known: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._texts: dict[int, list[int]] = {}
        self._began, self._spent = time.monotonic(), 0.0

    def learn(self, num_requests: int) -> None:
        """Make the first requests' runs alone."""
        for _ in range(num_requests):
            self._learn()
        self._began, self._spent = time.monotonic(), 0.0

    def draw(self, stream: random.Random) -> Question:
        """Return a request, a new one if there is time for its run alone.

        Args:
            stream: Draws among the known ones.
        """
        with self._lock:
            elapsed = time.monotonic() - self._began
            if not self._known or self._spent < SHARE_ALONE * elapsed:
                return self._learn()
            number = stream.choice(list(self._known))
            return self._question(number, request_of(number, self.subject), self._known[number])

    def _learn(self) -> Question:
        begin, number = time.monotonic(), self._next
        self._next += 1
        asked = request_of(number, self.subject)
        self._known[number] = rows = rows_alone(self.subject, asked)
        if len(self._known) > MOST_KNOWN:
            gone, _ = self._known.popitem(last=False)
            self._texts.pop(gone, None)
        if asked.ids is None and len(rows) == 1:
            self._texts[number] = [*asked.inputs, *rows[0].tolist()]
            self.subject.learn(list(self._texts.values()))
        self.num_runs += 1
        self._spent += time.monotonic() - begin
        return self._question(number, asked, rows)

    def _question(self, number: int, asked: Asked, rows: torch.Tensor) -> Question:
        runs_alone = "num_beams" in asked.options()
        text = self.subject.tokenizer.decode(rows[0].tolist(), skip_special_tokens=True)
        return Question(number, asked, rows, text, runs_alone)


def request_of(number: int, subject: Subject) -> Asked:
    """Make the request of a number: greedy, a chat, or of an unlike kind.

    Args:
        number: Decides everything.
        subject: Gives words and tokenizer.
    """
    stream = random.Random(number)  # noqa: S311
    beginning = stream.randrange(NUM_BEGINNINGS)
    shared = subject.words(LONGEST_BEGINNING, beginning)[: 16 * (1 + beginning % 3)]
    own = subject.words(stream.randint(1, LONGEST_PROMPT), 1000 + number)
    ids = (shared + own)[:LONGEST_PROMPT] if stream.random() < 0.5 else own
    limit = 1 + int((LONGEST_ANSWER - 1) * stream.random() ** 2)
    kind = stream.random()
    if kind < 0.3:
        return greedy(ids, limit)
    if kind < 0.4:
        return greedy(ids, LONG_ANSWER)
    if kind < 0.5 and subject.tokenizer.chat_template:
        return _chat(ids, limit, subject.tokenizer)
    return of_kind(number, ids, limit, subject.tokenizer)


def _chat(ids: list[int], limit: int, tokenizer: Any) -> Asked:
    half = len(ids) // 2
    parts = [part for part in (ids[:half], ids[half:]) if part]
    messages = [{"role": "user", "content": tokenizer.decode(part)} for part in parts]
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    options = {"max_new_tokens": limit, "do_sample": False}
    return Asked(messages, lambda: dict(options), torch.tensor([encoded]))


@torch.no_grad()
def rows_alone(subject: Subject, asked: Asked) -> torch.Tensor:
    """Return new tokens of every row of a request alone, int32 of shape (B, W).

    By Transformers' own generate(); where a keyword is ours, by that of a model wrapped apart.

    Args:
        subject: What is asked.
        asked: The request.
    """
    options = asked.options()
    is_ours = "dspark" in options or "prompt_lookup_num_tokens" in options
    model = subject.twin if is_ours else subject.plain
    ids = torch.tensor([asked.inputs]) if asked.ids is None else asked.ids
    if len(ids) == 1:
        options["attention_mask"] = torch.ones_like(ids)
    return new_tokens(model.generate(ids, **options), ids.shape[1])


def new_tokens(output: Any, num_prompt_tokens: int) -> torch.Tensor:
    """Return the tokens that generate() added, int32 of shape (B, W)."""
    rows = output if isinstance(output, torch.Tensor) else output.sequences
    return rows[:, num_prompt_tokens:].to(torch.int32, copy=True)
