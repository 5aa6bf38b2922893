"""The HTTP face of a queue: OpenAI's completions, generate() itself, metrics and health.

Needs fastapi. Endpoints only read, call and write; a request's life is the queue's.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import fastapi
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from jinja2 import TemplateError
from starlette.background import BackgroundTask
from transformers import GenerationConfig

from dspark_hf.errors import ConfigError, DSparkError, InputError
from dspark_hf.losslessness import end_ids
from dspark_hf.serving.exposition import exposition
from dspark_hf.serving.protocol import (
    MOST_CHOICES,
    Answer,
    ChatBody,
    CompletionBody,
    Sampling,
    error_body,
    status_of,
)
from dspark_hf.serving.streaming import ClientGoneError, StopCutter, merged, unless_gone

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from dspark_hf.serving.handle import RequestHandle, RequestResult
    from dspark_hf.serving.queue import GenerationQueue
    from dspark_hf.serving.streaming import Receive

logger = logging.getLogger(__name__)

CLIENT_GONE = 499
"""Status of an answer that nobody reads; the number is nginx's."""
RETRY_S = 1
"""What a client is told to wait where the queue is full."""
PROMETHEUS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OWN = ("inputs", "stream", "priority", "deadline_s", "dspark")
"""Fields of /generate beside the keywords of generate()."""
DONE = "[DONE]"


def create_app(queue: GenerationQueue, name: str, max_new_tokens: int) -> fastapi.FastAPI:
    """Return the application that serves a queue.

    Args:
        queue: With a tokenizer; closed by whoever made it.
        name: The model's, as clients call it.
        max_new_tokens: Where a request does not say.
    """
    service = Service(queue, name, max_new_tokens)
    app = fastapi.FastAPI(title="dspark-hf", description=f"{name}, by dspark-hf serve")

    @app.exception_handler(RequestValidationError)
    async def refuse(_: fastapi.Request, error: RequestValidationError) -> fastapi.Response:
        field, message = validation_message(error)
        return JSONResponse(error_body(400, message, field), 400)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: fastapi.Request) -> fastapi.Response:
        return await service.complete(body, request.receive, is_chat=False)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: fastapi.Request) -> fastapi.Response:
        return await service.complete(body, request.receive, is_chat=True)

    @app.post("/generate")
    async def generate(body: dict[str, Any], request: fastapi.Request) -> fastapi.Response:
        return await service.generate(body, request.receive)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "local"}]}

    @app.get("/metrics")
    def metrics() -> fastapi.Response:
        return PlainTextResponse(exposition(queue.metrics()), media_type=PROMETHEUS_TYPE)

    @app.get("/health")
    def health() -> fastapi.Response:
        now = queue.metrics()["requests"]
        state = "ok" if queue.is_open else "closed"
        body = {
            "status": state,
            "model": name,
            "running": now["running"],
            "waiting": now["waiting"],
        }
        return JSONResponse(body, 200 if queue.is_open else 503)

    return app


class Service:
    """Answers requests by a queue."""

    def __init__(self, queue: GenerationQueue, name: str, max_new_tokens: int) -> None:
        """Prepare; see `create_app`."""
        self.queue, self.name, self.max_new_tokens = queue, name, max_new_tokens
        self.ends = frozenset(end_ids(queue.model, {}))

    async def complete(
        self, body: Sampling, receive: Receive, *, is_chat: bool
    ) -> fastapi.Response:
        """Answer a request in OpenAI's form.

        Args:
            body: Of the request.
            receive: Gives the client's messages.
            is_chat: Whether it is a chat.
        """
        if body.model not in (None, self.name):
            message = f"model must be {self.name!r}, or left out; got {body.model!r}."
            return JSONResponse(error_body(404, message, "model"), 404)
        answer, handles = Answer(self.name, is_chat=is_chat), []
        try:
            handles = await self._submit_choices(body)
            cutters = [StopCutter(body.stops) for _ in handles]
            if body.stream:
                chunks = self._chunks(answer, body, handles, cutters)
                return await _streamed(chunks, handles, receive)
            results = await unless_gone(receive, _all(handles))
            texts = [
                cutter.add(str(result)) + cutter.end()
                for cutter, result in zip(cutters, results, strict=True)
            ]
            reasons = [
                self._reason(body, cutter, result)
                for cutter, result in zip(cutters, results, strict=True)
            ]
            return JSONResponse(answer.whole(texts, reasons, results))
        except Exception as error:  # noqa: BLE001 - every error is an answer
            return _failed(error, handles)

    async def generate(self, body: dict[str, Any], receive: Receive) -> fastapi.Response:
        """Answer a request of /generate.

        Args:
            body: `inputs` as for `GenerationQueue.submit`; `stream`, `priority`, `deadline_s`;
                `dspark`, settings of this call by name; any field of GenerationConfig.
            receive: Gives the client's messages.
        """
        handles: list[RequestHandle] = []
        try:
            inputs, is_streamed, kwargs = self._native(body)
            handles.append(await self._submit(inputs, kwargs))
            if is_streamed:
                return await _streamed(self._pieces(handles[0]), handles, receive)
            (result,) = await unless_gone(receive, _all(handles))
            return JSONResponse(self._outcome(result))
        except Exception as error:  # noqa: BLE001 - as above
            return _failed(error, handles)

    async def _submit(self, inputs: Any, kwargs: dict[str, Any]) -> RequestHandle:
        """Submit in another thread: preparing takes a while, and a full queue may block."""
        kwargs = {"max_new_tokens": self.max_new_tokens, **kwargs}
        if "max_length" in kwargs:
            del kwargs["max_new_tokens"]
        try:
            return await run_in_threadpool(self.queue.submit, inputs, **kwargs)
        except DSparkError:
            raise
        except (ValueError, TypeError, NotImplementedError, TemplateError) as error:
            # By generate() on its keywords, or by the chat template on the messages.
            raise InputError(str(error)) from error

    async def _submit_choices(self, body: Sampling) -> list[RequestHandle]:
        """Submit every prompt `n` times; nothing stays behind if one is refused."""
        prompts, num_each = body.inputs, body.n or 1
        if not 0 < len(prompts) * num_each <= MOST_CHOICES:
            raise ConfigError(
                f"prompts times n must be from 1 to {MOST_CHOICES}; got {len(prompts)} times "
                f"{num_each}. Send several requests."
            )
        handles: list[RequestHandle] = []
        try:
            for prompt in prompts:
                for choice in range(num_each):
                    config = self.queue.model.dspark.config
                    kwargs = body.keywords(config, self.max_new_tokens, choice)
                    kwargs.update(priority=body.priority, deadline_s=body.deadline_s)
                    handles.append(await self._submit(prompt, kwargs))
        except BaseException:
            _cancel(handles)
            raise
        return handles

    def _native(self, body: dict[str, Any]) -> tuple[Any, bool, dict[str, Any]]:
        """Return what /generate submits, whether it streams, and the keywords."""
        known = {key for key in vars(GenerationConfig()) if not key.startswith("_")}
        # Objects that JSON cannot hold, and code to be loaded, are no fields of GenerationConfig.
        unknown = sorted(set(body) - known - set(OWN))
        if unknown:
            raise ConfigError(
                f"a field must be one of {list(OWN)} or of GenerationConfig; got {unknown[0]!r}."
            )
        if "inputs" not in body:
            raise ConfigError("inputs must be given: text, token ids or chat messages; got none.")
        if not isinstance(body.get("stream", False), bool):
            raise ConfigError(f"stream must be true or false; got {body['stream']!r}.")
        kwargs = {k: v for k, v in body.items() if k not in ("inputs", "stream", "dspark")}
        if body.get("dspark"):
            kwargs["dspark"] = self._config(body["dspark"])
        return body["inputs"], bool(body.get("stream")), kwargs

    def _config(self, values: Any) -> Any:
        """Return the model's settings with some replaced."""
        config = self.queue.model.dspark.config
        if not isinstance(values, dict) or not set(values) <= set(vars(config)):
            raise ConfigError(
                f"dspark must be an object with fields of {sorted(vars(config))}; got {values!r}."
            )
        return replace(config, **values)

    async def _chunks(
        self,
        answer: Answer,
        body: Sampling,
        handles: Sequence[RequestHandle],
        cutters: Sequence[StopCutter],
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield a streamed answer's chunks."""
        results: dict[int, RequestResult] = {}
        silent = set(range(len(handles)))
        async for index, piece in merged(handles):
            opening, cutter = answer.first(index), cutters[index]
            if index in silent and opening is not None:
                yield opening
            silent.discard(index)
            text = cutter.end() if piece is None else cutter.add(piece)
            if text:
                yield answer.piece(index, text)
            if piece is None:
                results[index] = handles[index].result(timeout=0)
                yield answer.last(index, self._reason(body, cutter, results[index]))
        if body.with_usage:
            yield answer.counts([results[index] for index in sorted(results)])

    async def _pieces(self, handle: RequestHandle) -> AsyncIterator[dict[str, Any]]:
        """Yield what /generate streams: new text or ids, then the outcome."""
        async for piece in handle:
            yield {"piece": piece}
        yield self._outcome(handle.result(timeout=0))

    def _reason(self, body: Sampling, cutter: StopCutter, result: RequestResult) -> str:
        """Return why an answer ended, in OpenAI's words."""
        if cutter.is_met or (result.ids and result.ids[-1] in self.ends):
            return "stop"
        return "length" if len(result.ids) >= (body.most_tokens or self.max_new_tokens) else "stop"

    def _outcome(self, result: RequestResult) -> dict[str, Any]:
        """Return what /generate answers with: the new text and ids of every row, and statistics."""
        stats = result.stats
        return {
            "rows": [self._row(result, place) for place in range(max(len(stats.records), 1))],
            "stats": {
                "prompt_tokens": stats.num_prompt_tokens,
                "cached_tokens": stats.cached_tokens,
                "queue_s": stats.started,
                "first_token_s": stats.first_token,
                "seconds": stats.ended,
                "preemptions": stats.preemptions,
            },
        }

    def _row(self, result: RequestResult, place: int) -> dict[str, Any]:
        records = result.stats.records
        if not records:
            # The model's own loop ran, and keeps no account of drafts.
            return {"text": result.text, "ids": result.ids}
        record, ids = records[place], result.ids
        if place:
            output = result.output
            sequences = output["sequences"] if isinstance(output, dict) else output
            ids = sequences[place, result.stats.num_prompt_tokens :].tolist()[: record.new_tokens]
        tokenizer: Any = self.queue.tokenizer
        is_text = result.text is not None
        return {
            "text": tokenizer.decode(ids, skip_special_tokens=True) if is_text else None,
            "ids": ids,
            "rounds": record.rounds,
            "drafted": record.drafted,
            "verified": record.verified,
            "accepted": record.accepted,
            "accepted_length": record.accepted_length,
        }


async def _all(handles: Sequence[RequestHandle]) -> list[RequestResult]:
    """Return every result; raise what the first failure raised, without awaiting the others."""
    async for _ in merged(handles):
        pass
    return [handle.result(timeout=0) for handle in handles]


async def _streamed(
    chunks: AsyncIterator[dict[str, Any]], handles: Sequence[RequestHandle], receive: Receive
) -> fastapi.Response:
    """Return a response of server-sent events, begun once there is something to send.

    So what fails before its first token still has a status of its own.
    """
    first = await unless_gone(receive, anext(chunks))

    async def events() -> AsyncIterator[str]:
        try:
            yield _event(first)
            async for chunk in chunks:
                yield _event(chunk)
            yield f"data: {DONE}\n\n"
        except Exception as error:  # noqa: BLE001 - the status is out; the client reads it here
            yield _event(error_body(_logged(error), str(error)))
        finally:
            _cancel(handles)

    # If the client leaves, events() is closed; the task behind it also runs if it never began.
    leaving = BackgroundTask(_cancel, handles)
    return StreamingResponse(events(), media_type="text/event-stream", background=leaving)


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"


def _failed(error: Exception, handles: Sequence[RequestHandle]) -> fastapi.Response:
    """Return an error as an answer; what else was submitted for it is cancelled."""
    _cancel(handles)
    if isinstance(error, ClientGoneError):
        return fastapi.Response(status_code=CLIENT_GONE)
    status = _logged(error)
    headers = {"Retry-After": str(RETRY_S)} if status == 429 else None
    return JSONResponse(error_body(status, str(error)), status, headers)


def _logged(error: Exception) -> int:
    """Return an error's status; one that nobody foresaw is logged whole."""
    status = status_of(error)
    if status == 500:
        logger.error("A request failed: %s", error, exc_info=error)
    return status


def _cancel(handles: Sequence[RequestHandle]) -> None:
    for handle in handles:
        handle.cancel()


def validation_message(error: RequestValidationError) -> tuple[str | None, str]:
    """Return the first field that pydantic refused, and a sentence on it."""
    found = error.errors()[0]
    place = [str(part) for part in found["loc"][1:]]
    if found["type"] == "json_invalid":
        return None, f"the body must be JSON; reading it failed: {found['ctx']['error']}."
    field = place[0] if place else None
    if isinstance(found["input"], bytes):
        return None, "the body must be JSON, with content-type application/json; got another type."
    if found["type"] == "extra_forbidden":
        return field, f"{'.'.join(place)} is no field that is known here. Leave it out."
    what = f"; got {found['input']!r}"[:120] if found["type"] != "missing" else ""
    return field, f"{'.'.join(place) or 'the body'}: {found['msg']}{what}."
