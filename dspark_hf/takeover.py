"""Decodes a prepared call here, or sends it to the model's own loop with one line saying why."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from dspark_hf import generation
from dspark_hf.eligibility import inputs_refusal, settings_refusal
from dspark_hf.handle import FIRST_POSITIONS
from dspark_hf.inputs import check_room
from dspark_hf.metrics import SpeculationRecord
from dspark_hf.processing import RowProcessors, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dspark_hf.config import DSparkConfig
    from dspark_hf.drafting.base import Drafter
    from dspark_hf.handle import DSparkHandle

_capturing: ContextVar[bool] = ContextVar("dspark_capturing", default=False)


class PreparedCall(BaseException):
    """A call that generate() has prepared and not begun, for `capturing`.

    Attributes:
        handle: The wrapped model's state.
        config: Settings of the call.
        call: As generate() prepared it.
        drafter: Who drafts.
        run_alone: Runs it in the model's own loop and returns what generate() returns; None if it
            can be decoded here, among other rows.
    """

    def __init__(
        self,
        handle: DSparkHandle,
        config: DSparkConfig,
        call: generation.Call,
        *,
        drafter: Drafter | None = None,
        run_alone: Callable[[], Any] | None = None,
    ) -> None:
        """Hold a call; see the attributes."""
        super().__init__()
        self.handle, self.config, self.call = handle, config, call
        self.drafter, self.run_alone = drafter, run_alone


@contextmanager
def capturing() -> Iterator[None]:
    """Make generate() raise `PreparedCall` where it would begin to decode, in this context."""
    token = _capturing.set(True)
    try:
        yield
    finally:
        _capturing.reset(token)


def decode_call(
    handle: DSparkHandle,
    config: DSparkConfig,
    call: generation.Call,
    drafter: Drafter | None,
    own: Callable[[], Any],
) -> Any:
    """Decode a call.

    Args:
        handle: The wrapped model's state.
        config: Settings of the call.
        call: What Transformers prepared.
        drafter: Who drafts; None decodes plainly.
        own: Runs the model's own loop on the same call.

    Returns:
        Any: What generate() returns.

    Raises:
        CapacityError: If the call may outgrow learned positions.
    """
    if getattr(call.generation_config, "is_assistant", False):
        # This model drafts for another one inside Transformers' assisted loop.
        return own()
    check_room(handle.model, call.input_ids, call.model_kwargs, call.generation_config)
    reason = _refusal(handle, config, call)
    if reason is None and _capturing.get():
        raise PreparedCall(handle, config, call, drafter=drafter)
    if reason is not None:
        return run_own_loop(handle, config, reason, call, own)
    with handle.lock:
        decoder = handle.decoder(
            drafter,
            config,
            _first_positions(call),
            prefill_tokens=call.generation_config.prefill_chunk_size,
            reading=handle.sparse_reading(config),
        )
        decoder.ends_together = True
        rows = generation.make_rows(handle.model, call, config)
        output = generation.decode(handle.model, call, rows, decoder)
        handle.metrics.add([row.record for row in rows])
    return output


def _first_positions(call: generation.Call) -> int:
    """Return how many tokens per row to make room for: the prompt and a little more."""
    wanted = call.input_ids.shape[1] + FIRST_POSITIONS
    limit = call.generation_config.max_length
    return wanted if limit is None else min(wanted, limit)


def run_own_loop(
    handle: DSparkHandle,
    config: DSparkConfig,
    reason: str,
    call: generation.Call,
    own: Callable[[], Any],
) -> Any:
    """Run the model's own loop, say so once, and count the tokens it made.

    Args:
        handle: The wrapped model's state.
        config: Settings of the call.
        reason: Why, for the log line and `metrics.fallback_reasons`.
        call: The call.
        own: Runs the loop on it.

    Returns:
        Any: What it returns; a dict output gets one record per row as `speculation`.
    """
    if _capturing.get():
        again = functools.partial(run_own_loop, handle, config, reason, call, own)
        raise PreparedCall(handle, config, call, run_alone=again)
    handle.metrics.count_fallback(reason)
    handle.warn_once(f"This call runs in the model's own loop: {reason}.")
    if handle.is_read_sparsely(config):
        handle.warn_once(
            "Sparse attention does not act in the model's own loop: calls there read all of their "
            "context."
        )
    output = own()
    is_dict = not isinstance(output, torch.Tensor)
    new = (output["sequences"] if is_dict else output)[:, call.input_ids.shape[1] :]
    ends = call.generation_config._eos_token_tensor  # noqa: SLF001 - generate()'s prepared value
    handle.metrics.last = [
        SpeculationRecord(path="transformers", new_tokens=_own_length(row, ends)) for row in new
    ]
    if is_dict:
        output.speculation = handle.metrics.last
    return output


def _own_length(row: torch.Tensor, ends: torch.Tensor | None) -> int:
    """Return a row's tokens up to its first end token."""
    if ends is None:
        return len(row)
    stops = torch.isin(row, ends.to(row.device)).nonzero().flatten().tolist()
    return stops[0] + 1 if stops else len(row)


def _refusal(handle: DSparkHandle, config: DSparkConfig, call: generation.Call) -> str | None:
    """Say why a call cannot be decoded here exactly and without loss of speed; None if it can."""
    model, batch_size = handle.model, call.input_ids.shape[0]
    max_length = call.generation_config.max_length
    return (
        settings_refusal(model, call)
        or refusal(call.processors, call.criteria, batch_size)
        or inputs_refusal(model, call.input_ids, call.model_kwargs, max_length)
        or _target_refusal(handle, config, call)
    )


def _target_refusal(
    handle: DSparkHandle, config: DSparkConfig, call: generation.Call
) -> str | None:
    choice = handle.target_choice()
    if choice.path is None:
        return f"drafts cannot be verified exactly ({choice.reason})"
    if choice.path == "rowwise" and call.input_ids.shape[0] > 1 and config.never_slower:
        return (
            "several rows of this architecture would run one by one, slower than in one batch; "
            "never_slower=False speculates all the same"
        )
    recheck = config.exactness == "recheck" and not call.generation_config.do_sample
    if recheck and not RowProcessors.of(call.processors, 0, 1).is_stateless:
        return 'exactness="recheck" asks processors twice, and one of them may keep state'
    return None
