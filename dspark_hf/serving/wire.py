"""What passes between a replica queue and its processes, and how.

Both sides send from a thread of their own (`Post`), so that a reader that is held up never holds up
the sender. Tensors travel as buffers beside the pickled rest, always to the CPU: pickling gigabytes
of scores would keep Python's interpreter lock, and with it the heartbeat.
"""

from __future__ import annotations

import io
import pickle
import threading
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache

from dspark_hf.errors import QueueError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from dspark_hf.queue_settings import QueueConfig
    from dspark_hf.serving.handle import RequestResult

HEAD_BYTES = 4
"""Bytes before a pickle that say how many buffers follow."""


# To a replica.


@dataclass(frozen=True)
class Setup:
    """The first message: what to load and how to run it.

    Attributes:
        load: Packed; makes the model.
        tokenizer: Packed; None without one.
        config: Settings of the queue; None for the model's.
        seed: Of the process's random numbers.
        num_replicas: That share this machine.
        num_threads: PyTorch threads.
        heartbeat_s: Seconds between beats.
    """

    load: bytes
    tokenizer: bytes
    config: QueueConfig | None
    seed: int
    num_replicas: int
    num_threads: int
    heartbeat_s: float


@dataclass(frozen=True)
class Begin:
    """Decode a request.

    Attributes:
        run: Number of this sending of it: it may come back after it went elsewhere.
        call: Packed ids and generation keywords.
        committed: Tokens that each row has.
        seed: Of its random streams, where the settings name none.
        priority: As submitted.
        deadline_s: Seconds left.
    """

    run: int
    call: bytes
    committed: list[list[int]]
    seed: int
    priority: int
    deadline_s: float | None


@dataclass(frozen=True)
class Drop:
    """Cancel a request."""

    run: int


@dataclass(frozen=True)
class Ask:
    """Tell the metrics."""


@dataclass(frozen=True)
class Leave:
    """Drop everything and end."""


# From a replica.


@dataclass(frozen=True)
class Ready:
    """The model is loaded; settings as they are in force."""

    config: QueueConfig


@dataclass(frozen=True)
class NotLoaded:
    """The model could not be loaded."""

    failure: Failure


@dataclass(frozen=True)
class Beat:
    """A sign of life, with the seconds that a token takes a row."""

    token_s: float


@dataclass(frozen=True)
class Told:
    """Answer to `Ask`."""

    metrics: dict[str, Any]


@dataclass(frozen=True)
class Accepted:
    """A request was prepared and waits."""

    run: int


@dataclass(frozen=True)
class Refused:
    """A request could not be prepared."""

    run: int
    failure: Failure


@dataclass(frozen=True)
class Token:
    """A row of a request has a new token."""

    run: int
    place: int
    token: int


@dataclass(frozen=True)
class Moved:
    """A request is starting, running or parked."""

    run: int
    status: str


@dataclass(frozen=True)
class Done:
    """A request is done."""

    run: int
    result: RequestResult


@dataclass(frozen=True)
class Failed:
    """A request failed."""

    run: int
    failure: Failure


class ReplicaTraceback(Exception):  # noqa: N818 - a cause to be read, not an error to be caught
    """Where an error came from in the replica."""

    def __str__(self) -> str:
        """Return the traceback as it was printed there."""
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class Failure:
    """An error on its way to another process, which may not know its type.

    Attributes:
        packed: The error; empty if it cannot be sent.
        description: Its type and message.
        trace: Where it came from.
    """

    packed: bytes
    description: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Wrap an error."""
        try:
            packed = pack(error)
            unpack(packed)
        except Exception:  # noqa: BLE001 - an error's own code runs here
            packed = b""
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(packed, f"{type(error).__name__}: {error}", trace)

    def error(self) -> BaseException:
        """Return the error, of its own type if this process has it."""
        found: Any = None
        if self.packed:
            try:
                found = unpack(self.packed)
            except Exception:  # noqa: BLE001 - as above
                found = None
        if not isinstance(found, BaseException):
            found = QueueError(f"in a replica, {self.description}")
        error: BaseException = found
        error.__cause__ = ReplicaTraceback(self.trace)
        return error


class _Pickler(pickle.Pickler):
    """Takes tensors apart into bytes; leaves caches behind."""

    def reducer_override(self, item: Any) -> Any:
        """Say how a tensor or a cache is put together again."""
        if isinstance(item, torch.Tensor):
            flat: Any = item.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            return _tensor, (pickle.PickleBuffer(flat), item.dtype, tuple(item.shape))
        if isinstance(item, Cache):
            return _nothing, ()
        return NotImplemented


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)


def _nothing() -> None:
    return None


def pack(value: Any) -> bytes:
    """Pickle a value, tensors included.

    Raises:
        Exception: Whatever pickling it raises.
    """
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(value)
    return stream.getvalue()


def unpack(packed: bytes) -> Any:
    """Return what was packed."""
    return pickle.loads(packed)  # noqa: S301 - from this program's own processes


def send(connection: Connection, messages: Sequence[Any]) -> None:
    """Send messages together.

    Raises:
        OSError: If nobody is there to receive them.
    """
    stream, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    stream.write(bytes(HEAD_BYTES))
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(list(messages))
    head = stream.getbuffer()
    head[:HEAD_BYTES] = len(buffers).to_bytes(HEAD_BYTES, "little")
    connection.send_bytes(head)
    for buffer in buffers:
        connection.send_bytes(buffer.raw())


def receive(connection: Connection) -> list[Any]:
    """Wait for messages.

    Raises:
        EOFError: If the other side has ended.
        OSError: If it ended in the middle of a message.
    """
    head = connection.recv_bytes()
    count = int.from_bytes(head[:HEAD_BYTES], "little")
    buffers = [connection.recv_bytes() for _ in range(count)]
    messages: list[Any] = pickle.loads(memoryview(head)[HEAD_BYTES:], buffers=buffers)  # noqa: S301 - as above
    return messages


class Post:
    """Sends messages in order, from a thread of its own."""

    def __init__(self, connection: Connection) -> None:
        """Start.

        Args:
            connection: Nobody else may send on it.
        """
        self._connection = connection
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._waiting: list[Any] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="dspark-post", daemon=True)
        self._thread.start()

    def put(self, message: Any) -> None:
        """Send a message soon; after `close`, or once nobody reads, it is dropped."""
        with self._changed:
            if not self._is_closed:
                self._waiting.append(message)
                self._changed.notify()

    def flush(self) -> None:
        """Send what waits, now, in this thread."""
        with self._sending:
            with self._changed:
                messages, self._waiting = self._waiting, []
            if not messages:
                return
            try:
                self._send(messages)
            except OSError:
                with self._changed:
                    self._is_closed = True

    def close(self, timeout: float | None = None) -> None:
        """Send what waits and end.

        Args:
            timeout: Most seconds to wait for that.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _send(self, messages: Sequence[Any]) -> None:
        """Send messages; of one that cannot be pickled, say that its request failed."""
        try:
            send(self._connection, messages)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever pickling a caller's objects raises
            if len(messages) > 1:
                for message in messages:
                    self._send([message])
            elif hasattr(messages[0], "run"):
                send(self._connection, [Failed(messages[0].run, Failure.of(error))])

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                is_last = self._is_closed
            self.flush()
            if is_last:
                return
