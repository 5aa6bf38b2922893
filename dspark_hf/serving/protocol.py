"""OpenAI's request and answer forms, and what they mean to a queue; needs pydantic.

What a request does not say is as in generate(): the model's generation config decides.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dspark_hf.errors import (
    DeadlineError,
    DSparkError,
    QueueClosedError,
    QueueError,
    QueueFullError,
    RequestCancelledError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dspark_hf.config import DSparkConfig
    from dspark_hf.serving.handle import RequestResult

MOST_CHOICES = 16
"""Most texts of one request: prompts times `n`."""
STATUS = (
    (QueueFullError, 429),
    (QueueClosedError, 503),
    (RequestCancelledError, 503),
    (DeadlineError, 504),
    (QueueError, 500),
    (DSparkError, 400),
)
"""HTTP status by type of error, the first that fits; 500 for any other."""
KINDS = {
    400: "invalid_request_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
"""OpenAI's names for kinds of errors, by status; server_error for any other."""


class Strict(BaseModel):
    """A part of a request: unknown fields are errors, and no type stands for another."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    """What a stream brings beside text."""

    include_usage: bool = False


class Sampling(Strict):
    """What both kinds of requests may say; `priority` and `deadline_s` are ours."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    stop: str | list[str] | None = None
    seed: int | None = None
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = 0
    deadline_s: float | None = Field(None, gt=0)

    @property
    def inputs(self) -> list[Any]:
        """What is submitted, one entry per prompt."""
        raise NotImplementedError

    @property
    def stops(self) -> list[str]:
        """Texts that end an answer and are cut off it."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in stop if text]

    @property
    def most_tokens(self) -> int | None:
        """Most new tokens; None if it does not say."""
        return self.max_tokens

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def keywords(self, config: DSparkConfig, max_new_tokens: int, choice: int) -> dict[str, Any]:
        """Return the keywords of generate() for one of its choices.

        Args:
            config: The model's.
            max_new_tokens: Where the request does not say.
            choice: From 0; with a seed, choice k has the seed k higher.
        """
        found: dict[str, Any] = {"max_new_tokens": self.most_tokens or max_new_tokens}
        if self.temperature is not None:
            found["do_sample"] = self.temperature > 0
        if self.temperature:
            found["temperature"] = self.temperature
        if self.top_p is not None and self.temperature != 0:
            found.update(do_sample=True, top_p=self.top_p)
        if self.stops:
            found["stop_strings"] = self.stops
        if self.seed is not None:
            # Coupled draws do not follow neighbours or measured times.
            found["dspark"] = replace(config, seed=self.seed + choice, acceptance="coupled")
        return found


class CompletionBody(Sampling):
    """Body of /v1/completions."""

    prompt: str | list[str]

    @property
    def inputs(self) -> list[Any]:
        """The prompts."""
        return [self.prompt] if isinstance(self.prompt, str) else list(self.prompt)


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """A turn of a chat."""

    role: str
    content: str | list[TextPart]


class ChatBody(Sampling):
    """Body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    @property
    def inputs(self) -> list[Any]:
        """The one chat."""
        chat = []
        for message in self.messages:
            content = message.content
            if not isinstance(content, str):
                content = "".join(part.text for part in content)
            chat.append({"role": message.role, "content": content})
        return [chat]

    @property
    def most_tokens(self) -> int | None:
        """Most new tokens, by the newer name or the older."""
        return self.max_completion_tokens or self.max_tokens


class Answer:
    """Shapes of one request's answer, whole or in chunks."""

    def __init__(self, name: str, *, is_chat: bool) -> None:
        """Begin an answer.

        Args:
            name: Of the model.
            is_chat: Whether the request was one of /v1/chat/completions.
        """
        self.name, self.is_chat = name, is_chat
        self.id = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    def whole(
        self, texts: Sequence[str], reasons: Sequence[str], results: Sequence[RequestResult]
    ) -> dict[str, Any]:
        """Return the answer, one choice per text."""
        choices = []
        for index, (text, reason) in enumerate(zip(texts, reasons, strict=True)):
            said: dict[str, Any] = {"text": text}
            if self.is_chat:
                said = {"message": {"role": "assistant", "content": text}}
            choices.append({"index": index, **said, "logprobs": None, "finish_reason": reason})
        return {
            **self._head("chat.completion" if self.is_chat else "text_completion"),
            "choices": choices,
            "usage": usage(results),
        }

    def first(self, index: int) -> dict[str, Any] | None:
        """Return a choice's chunk before its text; None where there is none."""
        return self._chunk(index, {"role": "assistant", "content": ""}) if self.is_chat else None

    def piece(self, index: int, text: str) -> dict[str, Any]:
        """Return a chunk with new text of a choice."""
        return self._chunk(index, {"content": text} if self.is_chat else text)

    def last(self, index: int, reason: str) -> dict[str, Any]:
        """Return a choice's chunk behind its text."""
        return self._chunk(index, {} if self.is_chat else "", reason)

    def counts(self, results: Sequence[RequestResult]) -> dict[str, Any]:
        """Return the chunk that holds token counts and no choice."""
        return {**self._head(self._chunk_kind), "choices": [], "usage": usage(results)}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _chunk(self, index: int, said: Any, reason: str | None = None) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta" if self.is_chat else "text": said,
            "logprobs": None,
            "finish_reason": reason,
        }
        return {**self._head(self._chunk_kind), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.name}


def usage(results: Sequence[RequestResult]) -> dict[str, int]:
    """Return token counts; a prompt counts once for each of its answers."""
    prompt = sum(result.stats.num_prompt_tokens for result in results)
    new = sum(len(result.ids) for result in results)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def status_of(error: BaseException) -> int:
    """Return the HTTP status of an error."""
    return next((status for kind, status in STATUS if isinstance(error, kind)), 500)


def error_body(status: int, message: str, field: str | None = None) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it.

    Args:
        status: HTTP's.
        message: What is wrong and what to do.
        field: Which field is meant, if one is.
    """
    kind = KINDS.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": field, "code": None}}
