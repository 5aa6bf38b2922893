"""What runs in a replica's process: a model of its own under a GenerationQueue, and a heartbeat."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import replace
from functools import partial
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

import torch

from dspark_hf import compat
from dspark_hf.config import DSparkConfig
from dspark_hf.errors import ConfigError
from dspark_hf.model import DSparkForCausalLM
from dspark_hf.queue_settings import QueueConfig
from dspark_hf.serving.handle import ENDS
from dspark_hf.serving.queue import GenerationQueue
from dspark_hf.serving.wire import (
    Accepted,
    Ask,
    Beat,
    Begin,
    Done,
    Drop,
    Failed,
    Failure,
    Leave,
    Moved,
    NotLoaded,
    Post,
    Ready,
    Refused,
    Token,
    Told,
    receive,
    unpack,
)

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from dspark_hf.serving.handle import RequestHandle
    from dspark_hf.serving.wire import Setup

UNLIMITED = 1 << 30
"""Requests that may wait here: those who send them keep the limit."""
LAST = -1000
"""Priority of what is done when all else is."""
CLOSE_S = 2.0
"""Seconds that the queue's thread gets to end the step it is in."""


def run(connection: Connection) -> None:
    """Serve until the other side says so, or is gone.

    Args:
        connection: To the front, which sends a `Setup` first.
    """
    # An interrupt from the keyboard reaches every process; the front decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    post = Post(connection)
    try:
        (setup, *more) = receive(connection)
    except (EOFError, OSError):
        return
    try:
        queue, config = _load(setup)
    except BaseException as error:  # noqa: BLE001 - whatever loading a model raises
        post.put(NotLoaded(Failure.of(error)))
        post.close(CLOSE_S)
        Finalize(None, _exit, exitpriority=LAST)
        return
    post.put(Ready(config))
    beats = threading.Thread(target=_beat, args=(post, queue, setup.heartbeat_s), daemon=True)
    beats.start()
    served = Served(queue, post)
    try:
        served.listen(connection, more)
    finally:
        queue.close(drain=False, timeout=CLOSE_S)
        post.close(CLOSE_S)
    # After what multiprocessing itself tidies up.
    Finalize(None, _exit, exitpriority=LAST)


def _exit() -> None:
    """End the process: taking PyTorch apart takes seconds, and would wait for a long forward."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class Served:
    """The requests of this replica."""

    def __init__(self, queue: GenerationQueue, post: Post) -> None:
        """Start without any.

        Args:
            queue: That decodes them.
            post: To the front.
        """
        self.queue, self.post = queue, post
        self._handles: dict[int, RequestHandle] = {}

    def listen(self, connection: Connection, messages: list[Any]) -> None:
        """Do what the front says until it says `Leave`, or is gone.

        Args:
            connection: To the front.
            messages: Received already.
        """
        while True:
            for message in messages:
                if isinstance(message, Leave):
                    return
                self._do(message)
            try:
                messages = receive(connection)
            except (EOFError, OSError):
                return

    def _do(self, message: Any) -> None:
        if isinstance(message, Begin):
            self._begin(message)
        elif isinstance(message, Drop):
            handle = self._handles.pop(message.run, None)
            if handle is not None:
                handle.cancel()
        elif isinstance(message, Ask):
            self.post.put(Told(self.queue.metrics()))

    def _begin(self, message: Begin) -> None:
        number = message.run
        try:
            ids, kwargs = _call_of(message.call)
            handle = self.queue.resume(
                ids,
                message.committed,
                priority=message.priority,
                deadline_s=message.deadline_s,
                on_token=partial(self._hear, number),
                **self._seeded(kwargs, message.seed),
            )
        except Exception as error:  # noqa: BLE001 - the submitter gets what preparing it raised
            self.post.put(Refused(number, Failure.of(error)))
            return
        self._handles[number] = handle
        self.post.put(Accepted(number))
        handle.follow(partial(self._move, number, handle))

    def _seeded(self, kwargs: dict[str, Any], seed: int) -> dict[str, Any]:
        """Return keywords that name a seed: replicas share one stream of them."""
        config = kwargs.get("dspark") or self.queue.model.dspark.config
        if isinstance(config, DSparkConfig) and config.seed is None:
            return {**kwargs, "dspark": replace(config, seed=seed)}
        return kwargs

    def _hear(self, number: int, place: int, token: int) -> None:
        self.post.put(Token(number, place, token))

    def _move(self, number: int, handle: RequestHandle, status: str) -> None:
        if status not in ENDS:
            self.post.put(Moved(number, status))
            # It is known to run before anything that it runs can end this process.
            self.post.flush()
            return
        self._handles.pop(number, None)
        try:
            result = handle.result()
        except BaseException as error:  # noqa: BLE001 - whatever ended it
            self.post.put(Failed(number, Failure.of(error)))
        else:
            self.post.put(Done(number, result))


def _load(setup: Setup) -> tuple[GenerationQueue, QueueConfig]:
    """Make the model and its queue; return it and the settings as the caller gave them."""
    torch.set_num_threads(setup.num_threads)
    torch.manual_seed(setup.seed)
    try:
        load = unpack(setup.load)
    except Exception as error:
        raise ConfigError(
            f"load must be known in a replica's process; reading it there failed: "
            f"{type(error).__name__}: {error}. Define it at the top level of a module."
        ) from error
    model = load()
    if not isinstance(model, DSparkForCausalLM):
        raise ConfigError(
            f"load must return a wrapped model; got {type(model).__name__}. Return "
            "DSparkForCausalLM.wrap(model, drafter=...)."
        )
    wrapped: Any = model
    config = setup.config or wrapped.dspark.config.queue or QueueConfig()
    device = compat.input_device(wrapped)
    share = own_share(config, device, setup.num_replicas)
    return GenerationQueue(model, unpack(setup.tokenizer), share), config


def own_share(config: QueueConfig, device: torch.device, num_replicas: int) -> QueueConfig:
    """Return the settings of one replica: shares of memory that all have in common are divided.

    Args:
        config: Of the whole.
        device: Of the replica's keys and values; a device of its own is not divided.
        num_replicas: On this machine.
    """
    shares = {"host_cache": config.host_cache}
    if device.type == "cpu":
        shares["kv_budget"] = config.kv_budget
    divided: dict[str, Any] = {
        name: size / num_replicas for name, size in shares.items() if size <= 1
    }
    return replace(config, max_pending=UNLIMITED, when_full="error", **divided)


def _call_of(packed: bytes) -> tuple[Any, dict[str, Any]]:
    try:
        ids, kwargs = unpack(packed)
    except Exception as error:
        raise ConfigError(
            f"the call must be known in a replica's process; reading it there failed: "
            f"{type(error).__name__}: {error}. Define its processors and criteria in a module."
        ) from error
    return ids, kwargs


def _beat(post: Post, queue: GenerationQueue, heartbeat_s: float) -> None:
    """Give signs of life. Takes no lock that a computation may hold."""
    pause = threading.Event()
    while not pause.wait(heartbeat_s):
        post.put(Beat(queue.token_s))
        post.flush()
