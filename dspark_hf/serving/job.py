"""Job: a request as the front of several replicas keeps it, so that any can go on with it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from dspark_hf.compat import CACHE_KEYS
from dspark_hf.errors import ConfigError
from dspark_hf.serving.handle import DONE, RequestResult
from dspark_hf.serving.order import PROMPT_WEIGHT
from dspark_hf.serving.request import TextPieces
from dspark_hf.serving.wire import Begin, pack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedTokenizerBase

    from dspark_hf.serving.handle import RequestHandle
    from dspark_hf.serving.replica import Replica

EXPECTED_TOKENS = 256
"""New tokens of a row that names no limit, until some have ended."""


class Job:
    """A submitted call and what is known of its answer.

    Attributes:
        handle: What the caller holds.
        committed: Each row's new tokens, as far as rows have any.
        is_accepted: Whether some replica has prepared it: its settings are right.
        replica: Who decodes it; None while nobody does.
        run: The number it was sent there under.
        has_started: Whether that replica has begun with it.
        has_advanced: Whether it got a token there.
        num_deaths: Replicas that died, one after another, before it got a token from them.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        kwargs: Mapping[str, Any],
        handle: RequestHandle,
        *,
        seed: int,
        priority: int = 0,
        deadline_s: float | None = None,
        text_by: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """Take a call.

        Args:
            ids: Prompts (B, T).
            kwargs: Of generate().
            handle: What the caller holds.
            seed: Of its random streams, where the settings name none.
            priority: As submitted.
            deadline_s: As submitted.
            text_by: Makes text of the answer; None if ids come back.

        Raises:
            ConfigError: If a keyword cannot be sent to another process.
        """
        self.call = packed_call(ids, kwargs)
        self.handle, self.seed, self.priority = handle, seed, priority
        self.deadline = None if deadline_s is None else handle.stats.submitted + deadline_s
        self.num_prompt_tokens, self.num_rows = ids.shape[1], ids.shape[0]
        self.num_rows *= _number(kwargs, "num_return_sequences", 1)
        self.most = _number(kwargs, "max_new_tokens", EXPECTED_TOKENS)
        self.committed: list[list[int]] = []
        self.is_accepted = False
        self.replica: Replica | None = None
        self.run = -1
        self.has_started = self.has_advanced = False
        self.num_deaths = 0
        self._tokenizer = text_by
        self._pieces = None if text_by is None else TextPieces(text_by, handle.add)

    def remaining(self, typical: float) -> float:
        """Return its expected remaining work, in new tokens.

        Args:
            typical: Expected new tokens of a row.
        """
        made = [len(tokens) for tokens in self.committed]
        made += [0] * (self.num_rows - len(made))
        work = sum(max(min(self.most, typical) - n, 1.0) for n in made)
        return work + PROMPT_WEIGHT * self.num_prompt_tokens * made.count(0)

    def send_to(self, replica: Replica, run: int) -> None:
        """Let a replica go on with it.

        Args:
            replica: That is ready.
            run: A number of its own for this.
        """
        self.replica, self.run = replica, run
        self.has_started = self.has_advanced = False
        replica.jobs[run] = self
        left = None if self.deadline is None else max(self.deadline - time.monotonic(), 1e-3)
        committed = [list(tokens) for tokens in self.committed]
        replica.post.put(Begin(run, self.call, committed, self.seed, self.priority, left))

    def add(self, place: int, token: int) -> None:
        """Take a new token of a row."""
        while len(self.committed) <= place:
            self.committed.append([])
        self.committed[place].append(token)
        self.has_advanced = True
        stats = self.handle.stats
        if place:
            return
        if stats.first_token is None:
            stats.first_token = stats.since_submitted()
        if self._pieces is None:
            self.handle.add(token)
        else:
            self._pieces.put(token)

    def start(self) -> None:
        """Note that its replica has begun with it."""
        self.has_started = True
        if self.handle.stats.started is None:
            self.handle.stats.started = self.handle.stats.since_submitted()

    def finish(self, found: RequestResult) -> None:
        """End it with what a replica came to.

        Args:
            found: With the ids, and statistics of the replica that ended it.
        """
        heard = len(self.committed[0]) if self.committed else 0
        # A call in the model's own loop gives all its tokens at its end.
        for token in found.ids[heard:]:
            self.add(0, token)
        text = None
        if self._pieces is not None and self._tokenizer is not None:
            self._pieces.end()
            text = str(self._tokenizer.decode(found.ids, skip_special_tokens=True))
        stats = self.handle.stats
        stats.records, stats.num_prompt_tokens = found.stats.records, found.stats.num_prompt_tokens
        stats.preemptions += found.stats.preemptions
        stats.cached_tokens += found.stats.cached_tokens
        self.handle.end(DONE, result=RequestResult(found.output, found.ids, text, stats))

    def outlives(self, most_deaths: int) -> bool:
        """Note that its replica died; tell whether it may go on in another one.

        Args:
            most_deaths: That may follow one another without a token in between.
        """
        if self.has_advanced:
            self.num_deaths = 0
        elif self.has_started:
            self.num_deaths += 1
        self.replica = None
        return self.num_deaths <= most_deaths


def packed_call(ids: torch.Tensor, kwargs: Mapping[str, Any]) -> bytes:
    """Pack a call for another process.

    Args:
        ids: Prompts (B, T).
        kwargs: Of generate().

    Raises:
        ConfigError: Naming the keyword that cannot be sent.
    """
    for name, value in kwargs.items():
        _check(name, value)
    try:
        return pack((ids, dict(kwargs)))
    except Exception as error:
        for name, value in kwargs.items():
            try:
                pack(value)
            except Exception as cause:
                raise ConfigError(
                    f"{name} must be picklable to reach a replica; got {value!r}: {cause}. Define "
                    "its class or function at the top level of a module."
                ) from cause
        raise ConfigError(f"the call must be picklable to reach a replica: {error}.") from error


def _check(name: str, value: Any) -> None:
    if name == "streamer" and value is not None:
        raise ConfigError(
            "streamer cannot be sent to a replica; got one. Iterate over the handle instead."
        )
    if isinstance(value, torch.nn.Module):
        raise ConfigError(
            f"{name} cannot be a model, which is not sent to a replica; got "
            f"{type(value).__name__}. Load it there, as the drafter of the model that load() makes."
        )
    if name in CACHE_KEYS and value is not None:
        raise ConfigError(
            f"{name} cannot be handed to a queue, which keeps its own; got one. Submit the whole "
            "prompt."
        )


def _number(kwargs: Mapping[str, Any], name: str, default: int) -> int:
    """Return a generation setting, from the keywords or their generation_config."""
    value = kwargs.get(name)
    if value is None:
        value = getattr(kwargs.get("generation_config"), name, None)
    return value if isinstance(value, int) and value > 0 else default
