"""Many prompts through a queue, results in the order of the prompts."""

from __future__ import annotations

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
    handles: list[RequestHandle] = []
    source = iter(prompts)
    total = len(prompts) if isinstance(prompts, Sized) else None
    with tqdm(total=total, disable=not progress, unit="request") as bar:
        try:
            while True:
                while len(handles) < most:
                    try:
                        prompt = next(source)
                    except StopIteration:
                        break
                    handles.append(submit(prompt))
                if not handles:
                    return
                result = handles[0].result()
                handles.pop(0)
                bar.update()
                yield result
        finally:
            for handle in handles:
                handle.cancel()
