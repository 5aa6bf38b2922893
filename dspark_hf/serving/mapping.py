"""Many prompts through a queue, results in the order of the prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sized
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dspark_hf.serving.handle import RequestHandle, RequestResult


def results_in_order(
    submit: Callable[[Any], RequestHandle], prompts: Iterable[Any], *, most: int, progress: bool
) -> Iterator[RequestResult]:
    """Submit prompts, as many at a time as may wait; yield results in their order.

    A result that is there comes before a further prompt is read.

    Args:
        submit: Submits one; may block.
        prompts: May be a stream of any length.
        most: Prompts that are submitted ahead of the one whose result is awaited.
        progress: Whether to show a bar.

    Yields:
        RequestResult: One per prompt. If the iteration ends early, the rest is cancelled.

    Raises:
        Exception: What the first failed request raised, where its result would have come.
    """
    handles: deque[RequestHandle] = deque()
    failure: Exception | None = None
    source = iter(prompts)
    total = len(prompts) if isinstance(prompts, Sized) else None
    with tqdm(total=total, disable=not progress, unit="request") as bar:
        try:
            while True:
                failure = failure or _read_ahead(submit, source, handles, most)
                if not handles:
                    break
                result = handles[0].result()
                handles.popleft()
                bar.update()
                yield result
        finally:
            for handle in handles:
                handle.cancel()
    if failure is not None:
        raise failure


def _read_ahead(
    submit: Callable[[Any], RequestHandle],
    source: Iterator[Any],
    handles: deque[RequestHandle],
    most: int,
) -> Exception | None:
    """Submit prompts until a result is due or enough wait; return what went wrong with one."""
    while len(handles) < most and not (handles and handles[0].is_ended):
        try:
            handles.append(submit(next(source)))
        except StopIteration:
            break
        except Exception as error:  # noqa: BLE001 - raised where its result would come
            return error
    return None
