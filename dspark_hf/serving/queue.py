"""GenerationQueue: submit requests from any thread, decode them together."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from dspark_hf.errors import ConfigError, QueueFullError
from dspark_hf.model import DSparkForCausalLM
from dspark_hf.queue_settings import QueueConfig
from dspark_hf.serving.engine import Engine
from dspark_hf.serving.handle import RequestHandle
from dspark_hf.serving.mapping import results_in_order
from dspark_hf.serving.prepare import prepare
from dspark_hf.serving.request import Request
from dspark_hf.serving.resume import follow
from dspark_hf.serving.views import MetricsViews

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import TracebackType

    from transformers import PreTrainedTokenizerBase

    from dspark_hf.serving.handle import RequestResult
    from dspark_hf.serving.resume import OnToken


class GenerationQueue(MetricsViews):
    """Decodes many callers' requests together, each to what generate() alone would have given.

    ```python
    with GenerationQueue(model, tokenizer) as queue:
        handle = queue.submit("Once upon a time", max_new_tokens=64)
        print(handle.result().text)
    ```

    Requests join and leave between steps. Texts and, with a schedule that does not follow measured
    times, acceptance do not depend on neighbours, order or parking: greedy and coupled texts are
    those of a call alone, rejection-sampled ones follow its distribution.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: QueueConfig | None = None,
    ) -> None:
        """Make a queue and start its thread.

        Args:
            model: Wrapped with `DSparkForCausalLM`; its drafter and settings serve all requests.
            tokenizer: Of the model; without one only token ids can be submitted.
            config: Settings; those of the model's `DSparkConfig.queue` when None.

        Raises:
            ConfigError: If the model is not wrapped, or an argument is not what it must be.
        """
        if not isinstance(model, DSparkForCausalLM):
            raise ConfigError(
                f"model must be wrapped; got {type(model).__name__}. Use "
                "DSparkForCausalLM.wrap(model, drafter=...)."
            )
        settings = config or model.dspark.config.queue or QueueConfig()
        if not isinstance(settings, QueueConfig):
            raise ConfigError(f"config must be a QueueConfig or None; got {settings!r}.")
        self.model: Any = model
        self.tokenizer = tokenizer
        self.config = settings
        self._engine = Engine(model, tokenizer, settings)
        self._engine.start()
        # A queue that nobody holds any more ends by itself, when its work is done.
        weakref.finalize(self, self._engine.close, drains=True, timeout=0)

    def submit(
        self,
        inputs: Any,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        **generation_kwargs: Any,
    ) -> RequestHandle:
        """Submit a request.

        Args:
            inputs: Text; token ids as a list of integers or a tensor of shape (T,) or (B, T); or
                chat messages, to which the tokenizer's template is applied.
            priority: Higher goes first.
            deadline_s: Seconds from now within which the result is wanted. It then goes earlier if
                it must, and fails with DeadlineError if it was not done in time.
            **generation_kwargs: Of generate(), `dspark=` included; checked here.

        Returns:
            RequestHandle: To wait for, read or cancel.

        Raises:
            QueueFullError: If `max_pending` requests wait and `when_full` is "error".
            QueueClosedError: If the queue has ended.
            InputError: If the inputs cannot be decoded.
            CapacityError: If they cannot fit the model or the memory for keys and values.
            ValueError: If a setting is wrong, as generate() says it.
        """
        check_order(priority, deadline_s)
        return self._submit(
            inputs, generation_kwargs, priority, deadline_s, blocks=self.config.when_full == "block"
        )

    def resume(
        self,
        inputs: Any,
        committed: Sequence[Sequence[int]],
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        on_token: OnToken | None = None,
        **generation_kwargs: Any,
    ) -> RequestHandle:
        """Submit a request that was begun elsewhere; it goes on from the tokens it has.

        Greedy and coupled texts are those of an unbroken call. Rejection sampling keeps its
        distribution, but not its random stream, which starts anew: the text is not the one that the
        unbroken call would have come to. Time limits start anew too. The handle gives the pieces
        that come now; result and statistics are of all tokens, rounds and acceptance of new ones.

        Where scores or logits are kept, or processors or criteria may keep state, tokens alone do
        not say how far the request is: it is decoded from its prompt again, and must come to the
        same tokens.

        Args:
            inputs: As for `submit`, and the same as elsewhere.
            committed: Each row's new tokens so far; rows that are left out have none.
            priority: As for `submit`.
            deadline_s: As for `submit`.
            on_token: Called with the place of a row in the call and each new token of it, in the
                queue's thread.
            **generation_kwargs: As for `submit`, and the same as elsewhere.

        Returns:
            RequestHandle: Which fails with QueueError where the same tokens do not come again.

        Raises:
            ConfigError: If `committed` does not fit the rows; else as `submit`.
        """
        check_order(priority, deadline_s)
        return self._submit(
            inputs,
            generation_kwargs,
            priority,
            deadline_s,
            blocks=self.config.when_full == "block",
            committed=committed,
            on_token=on_token,
        )

    def map(
        self, prompts: Iterable[Any], *, progress: bool = True, **generation_kwargs: Any
    ) -> Iterator[RequestResult]:
        """Decode many prompts; yield results in their order.

        Prompts may be a stream of any length: they are read ahead only so far as the queue takes
        them, and results that are ready come first. If the iteration ends early, what was submitted
        for it is cancelled.

        Args:
            prompts: As for `submit`.
            progress: Whether to show a bar.
            **generation_kwargs: As for `submit`, for all of them.

        Yields:
            RequestResult: One per prompt.

        Raises:
            Exception: What the first failed request raised, where its result would have come.
        """
        return results_in_order(
            lambda prompt: self._submit(prompt, dict(generation_kwargs), 0, None, blocks=True),
            prompts,
            most=self.config.max_pending + self.config.max_rows,
            progress=progress,
        )

    @property
    def kept_bytes(self) -> int:
        """Bytes of prompt beginnings and parked rows that are kept in host memory."""
        return self._engine.places.keeper.store.host.num_bytes

    def metrics(self) -> dict[str, Any]:
        """Return what the queue does and did: plain nested dicts, see `serving.metrics`."""
        return self._engine.snapshot()

    def measure_bandwidth(self) -> float:
        """Measure, between two steps, how many bytes per second this machine copies, once.

        `metrics()` compares with it what the target's forwards read.
        """
        with self.model.dspark.lock:
            return self._engine.metrics.measure_bandwidth()

    @property
    def token_s(self) -> float:
        """Seconds that a new token takes a row, averaged over the latest steps; 0 before any."""
        return self._engine.places.size.token_s

    @property
    def expected_delay_s(self) -> float:
        """Seconds that a request submitted now is expected to wait: 0 while a row is free."""
        return self._engine.expected_delay_s()

    @property
    def is_open(self) -> bool:
        """Whether requests are taken: it was not closed, and no fatal error ended it."""
        return self._engine.is_open

    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Take no more requests and end.

        Args:
            drain: Whether what was submitted is still decoded; otherwise it is cancelled.
            timeout: Most seconds to wait; None waits until it has ended.

        Returns:
            bool: Whether the queue's thread has ended.
        """
        return self._engine.close(drains=drain, timeout=timeout)

    def __enter__(self) -> GenerationQueue:
        """Return the queue."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close: after an error or an interrupt at once, else when everything is done."""
        try:
            self.close(drain=kind is None)
        except BaseException:
            # Interrupted while it drained.
            self.close(drain=False, timeout=0)
            raise

    def _submit(
        self,
        inputs: Any,
        kwargs: dict[str, Any],
        priority: int,
        deadline_s: float | None,
        *,
        blocks: bool,
        committed: Sequence[Sequence[int]] = (),
        on_token: OnToken | None = None,
    ) -> RequestHandle:
        self._engine.require_open()
        if not blocks and not self._engine.has_room:
            # Preparing takes time from those that are decoded: not for one that is refused.
            raise self._refusal()
        handle = RequestHandle(self._engine.cancel, self._engine.metrics.end)
        prepared = prepare(self.model, self.tokenizer, inputs, kwargs, committed)
        handle.stats.num_prompt_tokens = prepared.num_prompt_tokens
        deadline = None if deadline_s is None else handle.stats.submitted + deadline_s
        request = Request(prepared, handle, priority, deadline)
        self._engine.places.require_fit(request)
        request.listen(self.tokenizer, committed[0] if committed else ())
        if committed or on_token is not None:
            for row in request.rows:
                known = committed[row.place] if row.place < len(committed) else ()
                follow(row, known, on_token)
        if not self._engine.put(request, blocks=blocks):
            raise self._refusal()
        return handle

    def _refusal(self) -> QueueFullError:
        """Count a request that finds no room, and return what to raise."""
        self._engine.metrics.refuse()
        return QueueFullError(
            f"max_pending requests, {self.config.max_pending}, wait already. Submit later, or "
            'set when_full="block".'
        )


def check_order(priority: Any, deadline_s: Any) -> None:
    """Refuse what cannot say when a request goes.

    Raises:
        ConfigError: Naming the argument.
    """
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise ConfigError(f"priority must be an integer; got {priority!r}.")
    is_number = isinstance(deadline_s, int | float) and not isinstance(deadline_s, bool)
    if deadline_s is not None and not (is_number and deadline_s > 0):
        raise ConfigError(f"deadline_s must be above 0, in seconds; got {deadline_s!r}.")
