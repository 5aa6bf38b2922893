"""Engine: the thread that decodes a queue's requests, step by step.

A step is one target forward: a round of every running row, and a part of the prompts of rows that
start. Between steps requests are admitted, parked, cancelled and handed back.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dspark_hf.errors import QueueClosedError, RequestCancelledError
from dspark_hf.generation import export_rows, output_of
from dspark_hf.serving.handle import CANCELLED, DONE, FAILED, RUNNING, RequestResult
from dspark_hf.serving.memory import is_out_of_memory, refusal
from dspark_hf.serving.metrics import QueueMetrics, look
from dspark_hf.serving.order import expected_delay_s
from dspark_hf.serving.places import Places

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerBase

    from dspark_hf.metrics import SpeculationRecord
    from dspark_hf.queue_settings import QueueConfig
    from dspark_hf.rows import Row
    from dspark_hf.serving.handle import RequestHandle
    from dspark_hf.serving.request import Request

logger = logging.getLogger(__name__)

MOST_REFUSALS = 2
"""Times in a row that memory may run out under a request that runs alone, all else given back."""


class Engine:
    """Decodes requests in a thread of its own."""

    def __init__(
        self, model: Any, tokenizer: PreTrainedTokenizerBase | None, settings: QueueConfig
    ) -> None:
        """Prepare; `start` begins.

        Args:
            model: Wrapped.
            tokenizer: Of the model; None where only ids are submitted.
            settings: Of the queue.
        """
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.dspark = model.dspark
        self.places = Places(model, settings, self._note_failure)
        self.metrics = QueueMetrics(model, settings.max_rows)
        self.changed = threading.Condition()
        self.steps = 0
        self.is_closing = False
        self.fatal: BaseException | None = None
        self._cancelled: set[RequestHandle] = set()
        self._alone: Request | None = None
        self._thread = threading.Thread(target=self._run, name="dspark-queue", daemon=True)

    # Called from any thread.

    def start(self) -> None:
        """Begin to decode."""
        # A thread that still computes when Python ends takes the process down with it.
        atexit.register(self._stop)
        self._thread.start()

    def put(self, request: Request, *, blocks: bool) -> bool:
        """Add a request.

        Args:
            request: Prepared.
            blocks: Whether to wait while too many wait.

        Returns:
            bool: False if too many wait.

        Raises:
            QueueClosedError: If the queue has ended.
        """
        with self.changed:
            self.require_open()
            while not self.has_room:
                # The thread that makes room cannot wait for it: a streamer submits, say.
                if not blocks or threading.current_thread() is self._thread:
                    return False
                self.changed.wait()
                self.require_open()
            self.places.waiting.append(request)
            self.changed.notify_all()
        return True

    @property
    def has_room(self) -> bool:
        """Whether one more may wait."""
        return len(self.places.waiting) < self.settings.max_pending

    @property
    def is_open(self) -> bool:
        """Whether work is taken."""
        return self.fatal is None and not self.is_closing

    def require_open(self) -> None:
        """Refuse work once the queue has ended.

        Raises:
            QueueClosedError: Naming what ended it.
        """
        if self.fatal is not None:
            raise QueueClosedError(
                f"the queue ended: {type(self.fatal).__name__}: {self.fatal}. Make a new one."
            ) from self.fatal
        if self.is_closing:
            raise QueueClosedError("the queue is closed. Make a new one.")

    def expected_delay_s(self) -> float:
        """Return how long a request that is submitted now is expected to wait."""
        places = self.places
        with self.changed:
            tickets = [r.ticket(places.lengths) for r in [*places.running, *places.waiting]]
            remaining = [ticket.remaining for ticket in tickets]
            return expected_delay_s(remaining, places.size.limit, places.size.token_s)

    def snapshot(self) -> dict[str, Any]:
        """Return what `QueueMetrics` counts, and what runs and waits now."""
        with self.changed:
            return self.metrics.snapshot(self.places)

    def cancel(self, handle: RequestHandle) -> None:
        """End a request at once; what it holds is freed after the step that is running."""
        error = RequestCancelledError("the request was cancelled.")
        with self.changed:
            if handle.end(CANCELLED, error=error):
                self._cancelled.add(handle)
                self.changed.notify_all()

    def close(self, *, drains: bool, timeout: float | None) -> bool:
        """Take no more requests, and end; tell whether the thread has ended.

        Args:
            drains: Whether what was submitted is still decoded; otherwise it is cancelled.
            timeout: Most seconds to wait for the thread.
        """
        with self.changed:
            self.is_closing = True
            if not drains:
                for request in self._everyone():
                    error = RequestCancelledError("the queue was closed.")
                    request.handle.end(CANCELLED, error=error)
                    self._cancelled.add(request.handle)
            self.changed.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _stop(self) -> None:
        self.close(drains=False, timeout=None)

    # The thread.

    def _run(self) -> None:
        try:
            with torch.no_grad():
                while self._wait():
                    self._step()
        except BaseException as error:  # noqa: BLE001 - everyone who waits must hear of it
            self._die(error)
        finally:
            atexit.unregister(self._stop)
            self.places.rest()
            self.places.keeper.store.clear()

    def _wait(self) -> bool:
        """Wait for work; tell whether there is any, or the queue has ended."""
        places = self.places
        with self.changed:
            while not places.running:
                if places.waiting:
                    oldest = min(r.handle.stats.submitted for r in places.waiting)
                    waited = time.monotonic() - oldest
                    num_rows = sum(len(r.rows) or 1 for r in places.waiting)
                    delay = places.size.patience_s(num_rows, waited)
                    if not delay or self.is_closing:
                        return True
                    self.changed.wait(delay)
                elif self.is_closing:
                    return False
                else:
                    places.rest()
                    self.changed.wait()
        return True

    def _step(self) -> None:
        # The model comes before the queue's own lock: who generates may submit from a streamer.
        with self.dspark.lock:
            with self.changed:
                self._drop()
            self._alone = self.places.admit(time.monotonic())
            with self.changed:
                # There may be room for who waits to submit.
                self.changed.notify_all()
            if self._alone is not None:
                self._run_alone(self._alone)
                self._alone = None
            if self.places.running:
                self._round()
                self._hand_back()

    def _drop(self) -> None:
        """Let go of requests that were cancelled or whose deadline has passed."""
        gone, self._cancelled = self._cancelled, set()
        for request in [*self.places.waiting, *self.places.running]:
            if request.is_late() or request.handle in gone:
                self.places.release(request)

    def _round(self) -> None:
        """Run one step; when memory runs out, park a request and leave the rest to the next."""
        places = self.places
        decoding, starting = places.due()
        if not decoding and not starting:
            # All that run have failed already, or came with all their tokens.
            return
        made = [row.num_new_tokens for row in decoding]
        before, begin = look(decoding, starting, places.decoder.target), time.perf_counter()
        failure = None
        try:
            places.decoder.trace = self.dspark.tracer
            places.decoder.round(decoding, starting)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # Without its frames, which hold what the forward had allocated.
            failure = error.with_traceback(None)
        if failure is not None:
            self._make_room(failure)
            return
        seconds = time.perf_counter() - begin
        self.metrics.observe(before, seconds)
        places.share([row for row, _ in starting])
        self.steps += 1
        places.guard.step_s = seconds
        new = [row.num_new_tokens - old for row, old in zip(decoding, made, strict=True)]
        places.size.observe(seconds, new, len(places.waiting))
        for request in places.running:
            request.refusals = 0
            if any(row.num_new_tokens for row in request.rows):
                request.handle.move_to(RUNNING)
        places.release_finished()
        places.keep_to_budget()

    def _make_room(self, error: Exception) -> None:
        """After running out of memory: park a request; fail one that cannot run alone either."""
        running = self.places.running
        logger.warning("Out of memory with %d requests: %s", len(running), error)
        if len(running) > 1:
            self.places.make_room()
            return
        last = running[0]
        last.refusals += 1
        if last.refusals < MOST_REFUSALS:
            # It comes back to a cache that is made anew, no larger than it needs.
            self.places.park(last)
            self.places.rest()
            return
        with self.changed:
            self.places.release(last)
        last.handle.end(FAILED, error=refusal(error))

    def _note_failure(self, row: Row, error: Exception) -> None:
        """Remember what a row's own code raised."""
        for request in self.places.running:
            if any(own is row for own in request.rows):
                request.error = error

    def _hand_back(self) -> None:
        """End requests whose rows are all finished, or one of which failed."""
        for request in list(self.places.running):
            if request.error is None and request.active_rows:
                continue
            result = None
            if request.error is None:
                try:
                    result = self._result(request)
                except Exception as error:  # noqa: BLE001 - a streamer's end() may raise, say
                    request.error = error
            with self.changed:
                self.places.release(request)
            if result is None:
                request.handle.end(FAILED, error=request.error)
            else:
                request.handle.end(DONE, result=result)

    def _result(self, request: Request) -> RequestResult:
        """Return what a request's finished rows come to."""
        call, decoder = request.prepared.call, self.places.decoder
        cache = None
        wants_cache = call.generation_config.return_dict_in_generate
        if wants_cache and all(decoder.is_fed(row) for row in request.rows):
            cache = export_rows(self.model, call, request.rows, decoder)
        for row in request.rows:
            row.record.path = decoder.target.path
            self.places.lengths.add(row.num_new_tokens)
        self.dspark.metrics.add([row.record for row in request.rows])
        if call.streamer is not None:
            call.streamer.end()
        first = request.rows[0]
        output = output_of(call, request.rows, cache)
        records = [row.record for row in request.rows]
        return self._finish(request, output, first.ids[first.num_prompt_tokens :], records)

    def _finish(
        self, request: Request, output: Any, ids: list[int], records: list[SpeculationRecord]
    ) -> RequestResult:
        if request.pieces is not None:
            request.pieces.end()
        text = None
        if request.prepared.returns_text and self.tokenizer is not None:
            text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        stats = request.handle.stats
        stats.records = records
        return RequestResult(output, ids, text, stats)

    def _run_alone(self, request: Request) -> None:
        """Decode a request in the model's own loop, while the others wait."""
        request.begin()
        self.metrics.alone = request.handle
        request.handle.move_to(RUNNING)
        try:
            with self._broken_off(request):
                output = request.prepared.run()
            sequences = output if isinstance(output, torch.Tensor) else output["sequences"]
            records = list(self.dspark.metrics.last)
            begin = request.prepared.num_prompt_tokens
            # Behind its own end a row is padded.
            ids = sequences[0, begin : begin + records[0].new_tokens].tolist()
            result = self._finish(request, output, ids, records)
        except Exception as error:  # noqa: BLE001 - it fails alone
            is_memory = is_out_of_memory(error)
            request.handle.end(FAILED, error=refusal(error) if is_memory else error)
            return
        for piece in result.ids if result.text is None else [result.text]:
            request.handle.add(piece)
        request.handle.end(DONE, result=result)

    @contextmanager
    def _broken_off(self, request: Request) -> Iterator[None]:
        """Make forwards in the context fail once a request is cancelled or late."""
        thread = threading.current_thread()

        def check(*_: Any) -> None:
            is_ours = threading.current_thread() is thread
            if is_ours and (request.is_late() or request.handle.is_ended):
                raise RequestCancelledError("the request has ended.")

        hook = self.model.register_forward_pre_hook(check)
        try:
            yield
        finally:
            hook.remove()

    def _everyone(self) -> list[Request]:
        """Return all requests that have not been handed back."""
        alone = [] if self._alone is None else [self._alone]
        return [*self.places.waiting, *self.places.running, *alone]

    def _die(self, error: BaseException) -> None:
        """Fail everyone who waits: nothing will run any more."""
        logger.error("The queue ends: %s: %s", type(error).__name__, error)
        with self.changed:
            self.fatal = error
            everyone = self._everyone()
            self.places.abandon()
            self.changed.notify_all()
        for request in everyone:
            ended = QueueClosedError(f"the queue ended: {type(error).__name__}: {error}.")
            ended.__cause__ = error
            request.handle.end(FAILED, error=ended)
        # Not before: somebody may be generating, for long.
        with self.dspark.lock:
            self.places.clear(everyone)
