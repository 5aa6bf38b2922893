"""Places: which requests run, which wait, and how they change between the two.

Belongs to the engine's thread; whoever else looks at `waiting` holds the engine's lock.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from dspark_hf.drafting.block.taps import FeatureTaps
from dspark_hf.errors import CapacityError
from dspark_hf.serving.guard import GuardedFeatureDrafter, guard
from dspark_hf.serving.handle import PARKED, RUNNING, STARTING
from dspark_hf.serving.keeper import Keeper
from dspark_hf.serving.memory import HEADROOM_TOKENS, KvBudget
from dspark_hf.serving.order import BatchSize, Lengths, Order

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from dspark_hf.decode import Decoder
    from dspark_hf.queue_settings import QueueConfig
    from dspark_hf.rows import Row
    from dspark_hf.serving.order import Key, Ticket
    from dspark_hf.serving.request import Request

FIRST_POSITIONS = 256
"""Tokens per row that are allocated at first."""


class Places:
    """The running requests, whose rows the decoder holds, and the waiting ones."""

    def __init__(
        self, model: Any, settings: QueueConfig, on_failure: Callable[[Row, Exception], None]
    ) -> None:
        """Start with no requests.

        Args:
            model: Wrapped.
            settings: Of the queue.
            on_failure: Told of rows whose own code raises.
        """
        self.model, self.settings, self.on_failure = model, settings, on_failure
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.order, self.lengths, self.size = Order(settings), Lengths(), BatchSize(settings)
        self.budget = KvBudget(model, settings.kv_budget)
        self.guard = guard(model.dspark.drafter, settings)
        self.keeper = Keeper(model, settings)
        self.preemptions = 0
        self._decoder: Decoder | None = None
        self._begun: set[int] = set()

    @property
    def rows(self) -> list[Row]:
        """Rows that run and are not finished."""
        return [row for request in self.running for row in request.active_rows]

    @property
    def decoder(self) -> Decoder:
        """What rows are decoded with, made anew after a pause."""
        if self._decoder is None:
            handle = self.model.dspark
            decoder = handle.decoder(handle.drafter, handle.config, FIRST_POSITIONS)
            decoder.drafter, decoder.on_failure = self.guard, self.on_failure
            if isinstance(self.guard, GuardedFeatureDrafter):
                taps = FeatureTaps(self.model, self.guard.target_layers)
                decoder.target.listen(taps, self._take)
            self._decoder = decoder
        return self._decoder

    def held_tokens(self) -> int:
        """Return the tokens whose keys and values the running rows hold."""
        if self._decoder is None:
            return 0
        return sum(self._decoder.target.length(row.row_id) for row in self.rows)

    def rest(self) -> None:
        """Give the memory back; call it while nothing runs or waits."""
        self._decoder = None

    def require_fit(self, request: Request) -> None:
        """Refuse a request that could not run even alone.

        Raises:
            CapacityError: If its prompt and new tokens exceed the budget.
        """
        lengths = [
            request.most_tokens(row)
            if row.criteria.max_tokens is not None
            else len(row.ids) + HEADROOM_TOKENS
            for row in request.rows
        ]
        if not self.budget.fits(lengths):
            raise CapacityError(
                f"{len(lengths)} rows of up to {max(lengths)} tokens must fit the kv_budget of "
                f"{self.budget.num_tokens} tokens ({self.budget.num_bytes} bytes). Lower "
                "max_new_tokens, or raise kv_budget."
            )

    def admit(self) -> Request | None:
        """Start or resume what should run next; return a request that must run alone, if any."""
        now = time.monotonic()
        tickets = {id(r): r.ticket(self.lengths) for r in [*self.waiting, *self.running]}

        def key(request: Request) -> Key:
            return self.order.key(tickets[id(request)], now, self.size.token_s)

        for request in sorted(self.waiting, key=key):
            if not request.rows:
                self.waiting.remove(request)
                return request
            while not self._has_room(request):
                victims = [r for r in self.running if self._yields(tickets, request, r, now)]
                if not victims:
                    return None
                self.park(max(victims, key=key))
            self.waiting.remove(request)
            self._resume(request)
        return None

    def park(self, request: Request) -> None:
        """Take a running request out, keeping its rows' caches."""
        # Drafter and schedule keep what they know of the rows.
        for row in reversed(request.active_rows):
            self.keeper.park(self.decoder.target, row)
        request.handle.stats.preemptions += 1
        self.preemptions += 1
        request.handle.move_to(PARKED)
        self.running.remove(request)
        self.waiting.append(request)

    def release(self, request: Request) -> None:
        """Free what a request's rows hold, last slot first."""
        for row in reversed(request.rows):
            if self._decoder is not None:
                self._decoder.finish(row)
            self.keeper.forget(row)
            self._begun.discard(row.row_id)
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)

    def share(self, rows: Sequence[Row]) -> None:
        """Keep the beginnings of prompts that have just been read, for others."""
        for row in rows:
            if self.decoder.is_fed(row):
                self.keeper.share(self.decoder.target, row)

    def keep_to_budget(self) -> None:
        """Park the last in order while rows have outgrown the budget together."""
        while len(self.running) > 1 and not self.budget.fits([len(row.ids) for row in self.rows]):
            self.park(self.last())

    def last(self) -> Request:
        """Return the running request that would be parked first."""
        now = time.monotonic()
        return max(
            self.running,
            key=lambda r: self.order.key(r.ticket(self.lengths), now, self.size.token_s),
        )

    def parts(self, starting: list[Row], most: int | None) -> list[tuple[Row, int | None]]:
        """Share a step's prompt tokens out, in the order of admission.

        Args:
            starting: Rows that must be fed before they can go on.
            most: Prompt tokens of the step; None for all.
        """
        if most is None:
            return [(row, None) for row in starting]
        parts: list[tuple[Row, int | None]] = []
        for row in starting:
            wanted = len(row.ids) - bool(row.num_new_tokens)
            part = min(wanted - self.decoder.target.length(row.row_id), most)
            if part > 0:
                parts.append((row, part))
                most -= part
        return parts

    def _take(self, row_id: int, start: int, features: torch.Tensor) -> None:
        """Pass features on, to who drafts and to who keeps them."""
        self.guard.take(row_id, start, features)
        self.keeper.take(row_id, features)

    def _yields(
        self, tickets: dict[int, Ticket], waiting: Request, running: Request, now: float
    ) -> bool:
        pair = tickets[id(waiting)], tickets[id(running)]
        return self.order.may_replace(*pair, now, self.size.token_s)

    def _has_room(self, request: Request) -> bool:
        """Tell whether a request's rows may join those that run; a lone one always may."""
        rows = self.rows
        if not rows:
            return True
        if len(rows) + len(request.active_rows) > self.size.limit:
            return False
        lengths = [len(row.ids) for row in rows]
        lengths += [
            min(len(row.ids) + HEADROOM_TOKENS, request.most_tokens(row))
            for row in request.active_rows
        ]
        return self.budget.fits(lengths)

    def _resume(self, request: Request) -> None:
        """Give a request's rows their places, with the caches they were parked with."""
        self.running.append(request)
        request.begin()
        config = request.prepared.config
        reading = None if config is None else self.model.dspark.sparse_reading(config)
        for row in request.active_rows:
            self.guard.assign(row.row_id, request.prepared.drafter)
            if row.row_id in self._begun:
                self.keeper.resume(self.decoder.target, row)
            elif reading is None or reading.policy.prefill is None:
                known = self.keeper.begin(self.decoder.target, row, self.guard.take)
                request.handle.stats.cached_tokens += known
            self._begun.add(row.row_id)
            if reading is not None:
                self.decoder.target.read_sparsely(row.row_id, reading.row())
        has_begun = any(row.num_new_tokens for row in request.rows)
        request.handle.move_to(RUNNING if has_begun else STARTING)
