"""ReplicaQueue: several replicas of a model, each in a process of its own, behind one queue."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer

from dspark_hf.errors import ConfigError, QueueFullError
from dspark_hf.model import DSparkForCausalLM
from dspark_hf.queue_settings import QueueConfig
from dspark_hf.serving.dispatch import Dispatcher
from dspark_hf.serving.handle import RequestHandle
from dspark_hf.serving.job import Job
from dspark_hf.serving.mapping import results_in_order
from dspark_hf.serving.prepare import encode
from dspark_hf.serving.queue import check_order
from dspark_hf.serving.replica import Starter
from dspark_hf.serving.replica_settings import ReplicaConfig
from dspark_hf.serving.sums import CounterSums, Outcomes
from dspark_hf.serving.views import MetricsViews
from dspark_hf.serving.wire import pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import TracebackType

    from transformers import PreTrainedTokenizerBase

    from dspark_hf.config import DSparkConfig
    from dspark_hf.serving.handle import RequestResult

    Load = Callable[[], Any]

DEFAULT_REPLICAS = 2
READY, LOADING, DEAD = "ready", "loading", "dead"
ANSWER_S = 2.0
"""Seconds that replicas get to tell their metrics: a step may hold the lock they need."""


@dataclass(frozen=True)
class ReplicaState:
    """A replica as it is now.

    Attributes:
        place: Its number.
        state: "ready", "loading" or "dead" for good.
        pid: Of its process; None if it is dead.
        num_requests: That it decodes or lets wait.
        restarts: Times it was started again.
    """

    place: int
    state: str
    pid: int | None
    num_requests: int
    restarts: int


class ReplicaQueue(MetricsViews):
    """Shares requests out among replicas; a request outlives the replica that decodes it.

    ```python
    def load():
        return DSparkForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")

    if __name__ == "__main__":
        with ReplicaQueue(load, replicas=2, tokenizer=tokenizer) as queue:
            print(queue.submit("Once upon a time", max_new_tokens=64).result().text)
    ```

    Each replica is a process that runs a `GenerationQueue` over a model of its own. What is
    submitted goes to the replica with the least expected work, and its tokens come back as they are
    committed. When a replica dies, its requests go on in others from these tokens, to the greedy or
    coupled text of an unbroken call; rejection sampling keeps its distribution. A replica that died
    is started again. Pieces are neither lost nor repeated.
    """

    _pictures_per_s = 2.0

    def __init__(
        self,
        load: Load | Sequence[Load],
        replicas: int | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: QueueConfig | None = None,
        replica_config: ReplicaConfig | None = None,
    ) -> None:
        """Start the processes and wait until each has loaded its model.

        Args:
            load: Called in each process; returns a wrapped model. Must be picklable: a function or
                class at the top level of a module, or a functools.partial of one. Or a list of
                them, one per replica: on devices of their own, say.
            replicas: How many; 2 for one `load`, else as many as the list holds.
            tokenizer: Of the model; without one only token ids can be submitted.
            config: Settings of the queue; those of the model's `DSparkConfig.queue` when None.
                `max_rows` is of each replica, `max_pending` of all together. Shares of memory
                that replicas have in common are divided among them, bytes are not.
            replica_config: How replicas are watched; defaults when None.

        Raises:
            ConfigError: If an argument is not what it must be.
            QueueClosedError: If a replica died before it had loaded its model.
            Exception: What `load` raised.
        """
        loads = _loads(load, replicas)
        if config is not None and not isinstance(config, QueueConfig):
            raise ConfigError(f"config must be a QueueConfig or None; got {config!r}.")
        watched = replica_config or ReplicaConfig()
        if not isinstance(watched, ReplicaConfig):
            raise ConfigError(f"replica_config must be a ReplicaConfig or None; got {watched!r}.")
        self.tokenizer = tokenizer
        packed = [_packed("load", one) for one in loads]
        start = Starter(packed, _packed("tokenizer", tokenizer), config, watched)
        self._outcomes, self._sums = Outcomes(), CounterSums()
        self._dispatcher = Dispatcher(start, len(loads), config, watched)
        self._dispatcher.start()
        self.config: QueueConfig = self._dispatcher.config
        # A queue that nobody holds any more ends by itself, when its work is done.
        weakref.finalize(self, self._dispatcher.close, drains=True, timeout=0)

    @classmethod
    def from_pretrained(
        cls,
        target: str,
        *,
        devices: Sequence[Any] = ("cpu", "cpu"),
        drafter: Any = "lookup",
        model_config: DSparkConfig | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: QueueConfig | None = None,
        replica_config: ReplicaConfig | None = None,
        **hf_kwargs: Any,
    ) -> ReplicaQueue:
        """Make replicas of a checkpoint.

        Args:
            target: Path or hub id.
            devices: One per replica: a device, or a device map of its own.
            drafter: As for `DSparkForCausalLM.from_pretrained`.
            model_config: Settings of the models.
            tokenizer: Loaded from `target` when None.
            config: Settings of the queue.
            replica_config: How replicas are watched.
            **hf_kwargs: Keywords of AutoModelForCausalLM.from_pretrained.

        Returns:
            ReplicaQueue: With every model loaded.
        """
        options = {"drafter": drafter, "config": model_config, **hf_kwargs}
        loads = [
            partial(DSparkForCausalLM.from_pretrained, target, device_map=device, **options)
            for device in devices
        ]
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(target)
        return cls(loads, tokenizer=tokenizer, config=config, replica_config=replica_config)

    def submit(
        self,
        inputs: Any,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        **generation_kwargs: Any,
    ) -> RequestHandle:
        """Submit a request; it is prepared in a replica before this returns.

        Args:
            inputs: As for `GenerationQueue.submit`.
            priority: Higher goes first, within a replica.
            deadline_s: As for `GenerationQueue.submit`.
            **generation_kwargs: Of generate(). They are pickled: processors and criteria work on
                copies of their own; a streamer, a model or a cache is refused.

        Returns:
            RequestHandle: To wait for, read or cancel. Tensors of its result are on the CPU, and a
            dict output has no cache, which stays in the replica.

        Raises:
            QueueFullError: If `max_pending` requests wait and `when_full` is "error".
            QueueClosedError: If the queue has ended.
            ConfigError: If a keyword cannot be sent to another process.
            Exception: Whatever preparing it raises, as `GenerationQueue.submit` says.
        """
        check_order(priority, deadline_s)
        return self._submit(
            inputs, generation_kwargs, priority, deadline_s, blocks=self.config.when_full == "block"
        )

    def map(
        self, prompts: Iterable[Any], *, progress: bool = True, **generation_kwargs: Any
    ) -> Iterator[RequestResult]:
        """Decode many prompts; yield results in their order, as `GenerationQueue.map` does.

        Args:
            prompts: As for `submit`.
            progress: Whether to show a bar.
            **generation_kwargs: As for `submit`, for all of them.

        Yields:
            RequestResult: One per prompt.
        """
        return results_in_order(
            lambda prompt: self._submit(prompt, dict(generation_kwargs), 0, None, blocks=True),
            prompts,
            most=self._dispatcher.most_jobs,
            progress=progress,
        )

    @property
    def replicas(self) -> list[ReplicaState]:
        """The replicas as they are now."""
        crew = self._dispatcher.crew
        with self._dispatcher.changed:
            states = []
            for place, replica in enumerate(crew.members):
                restarts = crew.limits[place].total
                if replica is None:
                    states.append(ReplicaState(place, DEAD, None, 0, restarts))
                    continue
                state = READY if replica.is_ready else LOADING
                num_requests = len(replica.jobs)
                states.append(ReplicaState(place, state, replica.pid, num_requests, restarts))
            return states

    @property
    def is_open(self) -> bool:
        """Whether requests are taken: it was not closed, and some replica lives."""
        return self._dispatcher.is_open

    @property
    def expected_delay_s(self) -> float:
        """Seconds that a request submitted now is expected to wait; infinite if none is ready."""
        return self._dispatcher.expected_delay_s()

    def metrics(self) -> dict[str, Any]:
        """Return what replicas do and did.

        Returns:
            dict: `requests` that are there; `moves` from one replica to another; `ended`, requests
            by outcome, each once; `replicas`, each with the fields of `ReplicaState` and its
            queue's own metrics as `queue`, None where there was no answer in time; and `alone`,
            `preemptions`, `prefix`, `kv` and `total`: what they count in all, as far as they have
            told, those that died included.
        """
        before, told = self.replicas, self._dispatcher.ask(ANSWER_S)
        states = []
        for earlier, state, metrics in zip(before, self.replicas, told, strict=True):
            states.append({**vars(state), "queue": metrics})
            # Of one that was started again meanwhile nobody knows which process told.
            if metrics is not None and earlier.restarts == state.restarts:
                self._sums.note(state.place, state.restarts, metrics)
        return {
            "requests": len(self._dispatcher.jobs),
            "moves": self._dispatcher.moves,
            "ended": self._outcomes.counts(),
            "replicas": states,
            **self._sums.totals(),
        }

    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Take no more requests and end the processes.

        Args:
            drain: Whether what was submitted is still decoded; otherwise it is cancelled.
            timeout: Most seconds to wait; None waits until everything has ended.

        Returns:
            bool: Whether everything has ended.
        """
        return self._dispatcher.close(drains=drain, timeout=timeout)

    def __enter__(self) -> ReplicaQueue:
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
    ) -> RequestHandle:
        dispatcher = self._dispatcher
        dispatcher.require_open()
        ids, returns_text = encode(self.tokenizer, inputs)

        def on_end(handle: RequestHandle, status: str, error: BaseException | None) -> None:
            # What submit() raises is no request that ended.
            if job.is_accepted:
                self._outcomes.end(handle, status, error)

        handle = RequestHandle(lambda _: dispatcher.cancel(job), on_end)
        job = Job(
            ids,
            kwargs,
            handle,
            seed=dispatcher.draw_seed(),
            priority=priority,
            deadline_s=deadline_s,
            text_by=self.tokenizer if returns_text else None,
        )
        if not dispatcher.put(job, blocks=blocks):
            self._outcomes.refuse()
            raise QueueFullError(
                f"max_pending requests, {self.config.max_pending}, wait already. Submit later, or "
                'set when_full="block".'
            )
        return handle


def _loads(load: Any, replicas: int | None) -> list[Any]:
    """Return one callable per replica."""
    if replicas is not None and (
        not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 1
    ):
        raise ConfigError(f"replicas must be an integer of at least 1; got {replicas!r}.")
    is_list = isinstance(load, list | tuple)
    loads = list(load) if is_list else [load] * (replicas or DEFAULT_REPLICAS)
    if not loads or not all(callable(one) for one in loads):
        raise ConfigError(
            f"load must be a function that returns a wrapped model, or a list of them; got "
            f"{load!r}."
        )
    if is_list and replicas not in (None, len(loads)):
        raise ConfigError(
            f"replicas must be as many as load lists, {len(loads)}; got {replicas}. Leave it out."
        )
    return loads


def _packed(name: str, value: Any) -> bytes:
    try:
        return pack(value)
    except Exception as error:
        raise ConfigError(
            f"{name} must be picklable to reach a replica's process; got {value!r}: {error}. "
            "Define it at the top level of a module; functools.partial gives it arguments."
        ) from error
