"""Router: sends requests to named groups, each a queue of its own."""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from dspark_hf.errors import (
    ConfigError,
    DeadlineError,
    DSparkError,
    InputError,
    QueueClosedError,
    QueueFullError,
)
from dspark_hf.serving.guard import Breaker
from dspark_hf.serving.handle import DONE, FAILED
from dspark_hf.serving.mapping import results_in_order
from dspark_hf.serving.prepare import encode
from dspark_hf.serving.routing import Asked, Routes
from dspark_hf.serving.views import MetricsViews

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import TracebackType

    from dspark_hf.queue_settings import QueueConfig
    from dspark_hf.serving.handle import RequestHandle, RequestResult
    from dspark_hf.serving.routing import Decision, LoadLimit

ROOM_S = 0.02
"""Seconds until `map` looks for room again: the groups have no sign of it in common."""
CALLERS_FAULT = (ConfigError, InputError, DeadlineError)
"""Ends of requests that say nothing of their group."""


class Group(Protocol):
    """What a router asks of a queue: GenerationQueue and ReplicaQueue have it."""

    tokenizer: Any
    config: QueueConfig

    @property
    def is_open(self) -> bool:
        """Whether requests are taken."""

    @property
    def expected_delay_s(self) -> float:
        """Seconds that a request submitted now is expected to wait."""

    def submit(
        self, inputs: Any, *, priority: int, deadline_s: float | None, **generation_kwargs: Any
    ) -> RequestHandle:
        """Submit a request."""

    def metrics(self) -> dict[str, Any]:
        """Return what the queue does and did."""

    def close(self, *, drain: bool, timeout: float | None) -> bool:
        """Take no more requests and end."""


class Router(MetricsViews):
    """Sends each request to one of several queues.

    ```python
    router = Router(
        {"flash": quick, "pro": big},
        rules={"chat": "flash", lambda prompt, new, priority: prompt > 4000: "pro"},
        limits={"flash": LoadLimit(high=2.0, low=0.5)},
        fallback={"flash": "pro"},
    )
    router.submit("Once upon a time", request_class="chat", max_new_tokens=64)
    ```

    The group is the one that the caller names; else that of its request class; else that of the
    first rule that holds; else the default. A group that nobody named is left when its expected
    delay exceeds `high`, and returned to below `low`. A group that is full, closed or failing is
    stood in for by its fallback, even if it was named: models in its place answer differently, so
    give a fallback only where that is right. `handle.stats.group` says who took a request.
    """

    _pictures_per_s = 2.0

    def __init__(
        self,
        groups: Mapping[str, Group],
        rules: Mapping[Any, str] | None = None,
        *,
        default: str | None = None,
        fallback: Mapping[str, str] | str | None = None,
        limits: Mapping[str, LoadLimit] | LoadLimit | None = None,
        max_failures: int = 3,
        retry_s: float = 10.0,
    ) -> None:
        """Take queues, which the router closes when it is closed.

        Args:
            groups: Queues by name.
            rules: Request classes (texts) or predicates over (num_prompt_tokens, max_new_tokens,
                priority), and the group of each; predicates are asked in order.
            default: Group of requests that no rule is for; the first one when None.
            fallback: A group for each group that has one; or one for all others.
            limits: When a group is overloaded; or one limit for all. None: never.
            max_failures: Requests of a group that fail in a row, not by their own settings, after
                which it is unavailable for a while.
            retry_s: Seconds until it is tried again.

        Raises:
            ConfigError: If a name is none of the groups, or a value is not what it must be.
        """
        for name, queue in groups.items():
            if not isinstance(name, str) or not callable(getattr(queue, "submit", None)):
                raise ConfigError(f"groups must map names to queues; got {name!r}: {queue!r}.")
        if not isinstance(max_failures, int) or max_failures < 1:
            raise ConfigError(f"max_failures must be an integer above 0; got {max_failures!r}.")
        self.groups = dict(groups)
        self.routes = Routes(
            list(groups), rules=rules, default=default, fallback=fallback, limits=limits
        )
        self._breakers = {name: Breaker(max_failures, retry_s) for name in self.groups}
        self._lock = threading.Lock()

    def submit(
        self,
        inputs: Any,
        *,
        group: str | None = None,
        request_class: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        **generation_kwargs: Any,
    ) -> RequestHandle:
        """Submit a request.

        Args:
            inputs: As for `GenerationQueue.submit`.
            group: That should take it.
            request_class: A class that has a rule.
            priority: As for `GenerationQueue.submit`.
            deadline_s: As for `GenerationQueue.submit`.
            **generation_kwargs: As for `GenerationQueue.submit`.

        Returns:
            RequestHandle: Of the queue that took it.

        Raises:
            ConfigError: If there is no such group or class.
            QueueFullError: If no group that may take it has room.
            QueueClosedError: If no group that may take it is there.
            Exception: What the queue's submit() raises.
        """
        asked = Asked(
            self._num_tokens(inputs, group or request_class),
            _most_new(generation_kwargs),
            priority,
            group,
            request_class,
        )
        delays, unavailable = self._look()
        failure: Exception | None = None
        while True:
            with self._lock:
                decision = self.routes.choose(asked, delays, unavailable)
            if decision is None:
                raise failure or QueueClosedError(
                    f"no group can take the request: {unavailable} are closed or failing. Give "
                    "them a fallback, or try again later."
                )
            try:
                handle = self.groups[decision.group].submit(
                    inputs, priority=priority, deadline_s=deadline_s, **generation_kwargs
                )
            except (QueueFullError, QueueClosedError) as error:
                failure = error
            except (DSparkError, ValueError, TypeError):
                # The call is wrong, and would be elsewhere.
                raise
            except Exception as error:  # noqa: BLE001 - the group is not well
                failure = error
                with self._lock:
                    self._breakers[decision.group].fail()
            else:
                return self._taken(handle, decision)
            unavailable.append(decision.group)

    def map(
        self,
        prompts: Iterable[Any],
        *,
        group: str | None = None,
        request_class: str | None = None,
        progress: bool = True,
        **generation_kwargs: Any,
    ) -> Iterator[RequestResult]:
        """Decode many prompts, each in the group that is right for it; yield results in order.

        Args:
            prompts: As for `submit`; may be a stream of any length.
            group: As for `submit`, for all of them.
            request_class: As for `submit`, for all of them.
            progress: Whether to show a bar.
            **generation_kwargs: As for `submit`, for all of them.

        Yields:
            RequestResult: One per prompt.
        """

        def submit(prompt: Any) -> RequestHandle:
            while True:
                try:
                    return self.submit(
                        prompt, group=group, request_class=request_class, **generation_kwargs
                    )
                except QueueFullError:
                    time.sleep(ROOM_S)

        configs = [queue.config for queue in self.groups.values()]
        most = sum(config.max_pending + config.max_rows for config in configs)
        return results_in_order(submit, prompts, most=most, progress=progress)

    @property
    def is_open(self) -> bool:
        """Whether some group takes requests."""
        return any(queue.is_open for queue in self.groups.values())

    @property
    def expected_delay_s(self) -> float:
        """Seconds that a request submitted now is expected to wait in the quickest group."""
        return min(queue.expected_delay_s for queue in self.groups.values())

    def metrics(self) -> dict[str, Any]:
        """Return what was decided, and what the queues do and did.

        Returns:
            dict: `decisions`, by group and reason, of requests that were taken; `left`, groups that
            are overloaded; by group: `breakers`, whether it is `open`, its `expected_delay_s`; and
            `groups`, each queue's own metrics.
        """
        decisions: dict[str, dict[str, int]] = defaultdict(dict)
        with self._lock:
            for (group, reason), count in self.routes.decisions.items():
                decisions[group][reason] = count
            left = self.routes.left
            breakers = {name: breaker.state for name, breaker in self._breakers.items()}
        return {
            "decisions": dict(decisions),
            "left": left,
            "breakers": breakers,
            "open": {name: queue.is_open for name, queue in self.groups.items()},
            "expected_delay_s": {n: queue.expected_delay_s for n, queue in self.groups.items()},
            "groups": {name: queue.metrics() for name, queue in self.groups.items()},
        }

    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Close every queue, all at the same time.

        Args:
            drain: Whether what was submitted is still decoded; otherwise it is cancelled.
            timeout: Most seconds to wait; None waits until all have ended.

        Returns:
            bool: Whether all have ended.
        """
        for queue in self.groups.values():
            queue.close(drain=drain, timeout=0)
        until = None if timeout is None else time.monotonic() + timeout
        have_ended = True
        for queue in self.groups.values():
            left = None if until is None else max(until - time.monotonic(), 0.0)
            have_ended &= queue.close(drain=drain, timeout=left)
        return have_ended

    def __enter__(self) -> Router:
        """Return the router."""
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

    def _look(self) -> tuple[dict[str, float], list[str]]:
        """Return the groups' expected delays, and which of them are unavailable."""
        delays = {name: queue.expected_delay_s for name, queue in self.groups.items()}
        with self._lock:
            allowed = {name for name, breaker in self._breakers.items() if breaker.allows()}
        unavailable = [
            name
            for name, queue in self.groups.items()
            if name not in allowed or not queue.is_open or math.isinf(delays[name])
        ]
        return delays, unavailable

    def _num_tokens(self, inputs: Any, named: str | None) -> int:
        """Return the prompt's tokens where a rule asks for them, else 0."""
        if named is not None or not self.routes.has_predicates:
            return 0
        ids, _ = encode(self.groups[self.routes.default].tokenizer, inputs)
        return ids.shape[1]

    def _taken(self, handle: RequestHandle, decision: Decision) -> RequestHandle:
        """Count a decision, and learn from how its request ends."""
        handle.stats.group = decision.group
        with self._lock:
            self.routes.count(decision)
        handle.follow(partial(self._learn, handle, decision.group))
        return handle

    def _learn(self, handle: RequestHandle, group: str, status: str) -> None:
        if status == DONE:
            with self._lock:
                self._breakers[group].succeed()
        elif status == FAILED:
            try:
                handle.result()
            except CALLERS_FAULT:
                return
            except BaseException:  # noqa: BLE001 - whatever it failed with
                with self._lock:
                    self._breakers[group].fail()


def _most_new(kwargs: Mapping[str, Any]) -> int | None:
    """Return the most new tokens that a call names."""
    config = kwargs.get("generation_config")
    value = kwargs.get("max_new_tokens", getattr(config, "max_new_tokens", None))
    return value if isinstance(value, int) else None
