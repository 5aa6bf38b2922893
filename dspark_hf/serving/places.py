"""Places: which requests run, which wait, and how they change between the two.

Belongs to the engine's thread. Others append to `waiting`, and look; a request that changes between
the two lists is for a moment in both, never in neither.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from dspark_hf import compat
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

logger = logging.getLogger(__name__)

FIRST_POSITIONS = 256
"""Tokens per row that are allocated at first."""
LONE_PREFILL_TOKENS = 2048
"""Most prompt tokens of a step in which nothing decodes: a request that comes meanwhile waits."""


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
        self.dspark = model.dspark
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.order, self.lengths, self.size = Order(settings), Lengths(), BatchSize(settings)
        self.budget = KvBudget(model, settings.kv_budget)
        vocab_size = int(compat.text_config(model).vocab_size)
        self.guard = guard(self.dspark.drafter, settings, vocab_size)
        self.keeper = Keeper(model, settings)
        self.preemptions = 0
        self._decoder: Decoder | None = None
        self._begun: set[int] = set()
        self._most_rows: int | None = None

    @property
    def rows(self) -> list[Row]:
        """Rows that run and are not finished."""
        return [row for r in self.running if r.error is None for row in r.active_rows]

    @property
    def decoder(self) -> Decoder:
        """What rows are decoded with, made anew after a pause."""
        if self._decoder is None:
            handle = self.dspark
            # Each row is told by itself how it reads.
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

    def admit(self, now: float) -> Request | None:
        """Start or resume what should run next; return a request that must run alone, if any.

        Args:
            now: On the clock of time.monotonic().
        """
        # What is submitted from here on waits for the next step.
        waiting = list(self.waiting)
        tickets = {id(r): r.ticket(self.lengths) for r in [*waiting, *self.running]}

        def key(request: Request) -> Key:
            return self.order.key(tickets[id(request)], now, self.size.token_s)

        for request in sorted(waiting, key=key):
            # From the last in order on, so many as there must be.
            victims: list[Request] = []
            for running in sorted(self.running, key=key, reverse=True):
                if self._has_room(request, victims):
                    break
                if self._yields(tickets, request, running, now):
                    victims.append(running)
            if not self._has_room(request, victims):
                # Nothing may pass it, or it would wait for ever.
                return None
            if not request.rows:
                # The others keep their places, and wait.
                self.waiting.remove(request)
                return request
            for victim in victims:
                self.park(victim)
            self._resume(request)
        return None

    def park(self, request: Request) -> None:
        """Take a running request out, keeping its rows' caches."""
        # Drafter and schedule keep what they know of the rows.
        target, reading = self.decoder.target, request.prepared.reading
        for row in reversed(request.active_rows):
            if reading is not None and reading.policy.prefill and not row.num_new_tokens:
                # How its blocks read one another is not in the cache: it starts anew.
                request.sparse.pop(row.row_id, None)
                target.free(row.row_id)
                continue
            try:
                self.keeper.park(target, row)
            except Exception as error:  # noqa: BLE001 - no memory for a copy, say
                self._lose(row, error)
        request.handle.stats.preemptions += 1
        self.preemptions += 1
        request.handle.move_to(PARKED)
        self.waiting.append(request)
        self.running.remove(request)

    def make_room(self) -> None:
        """Park the last in order, as memory ran out; none comes in its place before one leaves."""
        self.park(self.last())
        self._most_rows = max(len(self.rows), 1)

    def release(self, request: Request) -> None:
        """Free what a request's rows hold, and forget it."""
        self._leave(request.rows)
        if request in self.running:
            self._most_rows = None
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)

    def release_finished(self) -> None:
        """Free what finished rows hold, unless their caches are wanted."""
        for request in self.running:
            if not request.keeps_caches:
                self._leave([row for row in request.rows if row.finished])

    def abandon(self) -> None:
        """Forget all requests; what they hold is freed by `clear`."""
        self.running.clear()
        self.waiting.clear()

    def clear(self, requests: Sequence[Request]) -> None:
        """Free what requests' rows hold in drafters and stores, whatever state they are in."""
        for row in [row for request in requests for row in request.rows]:
            self.guard.free(row.row_id)
            self.keeper.forget(row)
            if self._decoder is not None:
                self._decoder.schedule.free(row.row_id)
        self._begun.clear()
        self.rest()

    def share(self, rows: Sequence[Row]) -> None:
        """Keep the beginnings of prompts that have just been read, for others."""
        for row in rows:
            if not self.decoder.is_fed(row):
                continue
            try:
                self.keeper.share(self.decoder.target, row)
            except Exception as error:  # noqa: BLE001 - no memory for a copy, say
                logger.warning("The beginning of a prompt is not kept: %s", error)

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

    def due(self) -> tuple[list[Row], list[tuple[Row, int | None]]]:
        """Return the next step's rows: those that decode; those that are fed, and how much."""
        now, is_fed = time.monotonic(), self.decoder.is_fed
        decoding = [row for row in self.rows if is_fed(row)]
        most = self.settings.prefill_tokens if decoding else LONE_PREFILL_TOKENS
        # A short prompt need not wait for the end of a long one.
        requests = sorted(
            (r for r in self.running if r.error is None),
            key=lambda r: self.order.key(r.ticket(self.lengths), now, self.size.token_s),
        )
        unfed = [(r, row) for r in requests for row in r.active_rows if not is_fed(row)]
        # A step that feeds a request is not made longer for others of lower priority.
        starting = [row for r, row in unfed if r.priority >= unfed[0][0].priority]
        return decoding, self._parts(starting, most)

    def _parts(self, starting: list[Row], most: int | None) -> list[tuple[Row, int | None]]:
        """Share a step's prompt tokens out, first come first served.

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

    def _has_room(self, request: Request, victims: Sequence[Request] = ()) -> bool:
        """Tell whether a request's rows may join those that run; a lone one always may.

        Args:
            request: Which waits; one that runs alone counts as a row.
            victims: Running requests that would be parked.
        """
        staying = [r for r in self.running if r not in victims and r.error is None]
        rows = [row for r in staying for row in r.active_rows]
        if not rows:
            return True
        limit = self.size.limit
        if self._most_rows is not None:
            limit = min(limit, self._most_rows)
        if len(rows) + max(len(request.active_rows), 1) > limit:
            return False
        lengths = [len(row.ids) for row in rows]
        lengths += [
            min(len(row.ids) + HEADROOM_TOKENS, request.most_tokens(row))
            for row in request.active_rows
        ]
        return self.budget.fits(lengths)

    def _resume(self, request: Request) -> None:
        """Give a request's rows their places, with what is known of their tokens."""
        self.running.append(request)
        self.waiting.remove(request)
        request.begin()
        try:
            for row in request.active_rows:
                self._seat(request, row)
        except Exception as error:  # noqa: BLE001 - it fails alone
            request.error = error
        has_begun = any(row.num_new_tokens for row in request.rows)
        request.handle.move_to(RUNNING if has_begun else STARTING)

    def _seat(self, request: Request, row: Row) -> None:
        """Give a row its drafter, the cache of its first tokens, and its way of reading them."""
        target, reading = self.decoder.target, request.prepared.reading
        self.guard.assign(row.row_id, request.prepared.drafter)
        is_new = row.row_id not in self._begun
        self._begun.add(row.row_id)
        try:
            if not is_new:
                self.keeper.resume(target, row)
            elif reading is None or reading.policy.prefill is None:
                known = self.keeper.begin(target, row, self.guard.take)
                request.handle.stats.cached_tokens += known
        except Exception as error:  # noqa: BLE001 - no memory for its slot, say
            self._lose(row, error)
        if reading is not None:
            sparse = request.sparse.setdefault(row.row_id, reading.row())
            target.read_sparsely(row.row_id, sparse)

    def _lose(self, row: Row, error: Exception) -> None:
        """Let go of a row's cache: its tokens will be fed again."""
        logger.warning("A row is fed again, as its cache was lost: %s", error)
        self.decoder.target.free(row.row_id)
        self.keeper.forget(row)

    def _leave(self, rows: Sequence[Row]) -> None:
        """Free what rows hold, last slot first, each row once."""
        for row in reversed(rows):
            if row.row_id in self._begun:
                self._begun.discard(row.row_id)
                self.decoder.finish(row)
                self.keeper.forget(row)
