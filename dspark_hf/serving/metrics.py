"""QueueMetrics: what a queue does; the engine feeds it, callers read it as a nested dict.

Round, drafted, verified, accepted, accepted length and hit rate are those of `dspark_hf.metrics`,
over all rows. The *window* is the steps of the last WINDOW_S seconds, at most WINDOW_STEPS. What
there is nothing to divide by for is None. The keys, with units in their names:

* `requests`, now: `waiting`, of which `parked`; `running`; `oldest_s`, the longest wait so far.
* `ended`, since the start: `done`, `failed`, `expired` (deadline), `cancelled`, `refused` (the
  queue was full). `alone`: how many of them ran in the model's own loop.
* `rows`, one entry per row that runs: `row`, `status`, `priority`, `prompt_tokens`, `new_tokens`,
  `accepted_length`, `age_s` since it was submitted.
* `batch`: `rows` that run, `max_rows`, the `limit` at present, and `utilisation`: rows in a round
  of max_rows, weighted by the seconds of the window's steps.
* `delay_s`, each as p50, p95 and p99: `queue` (submitted to begun) and `first_token` (submitted to
  first token) of the latest WINDOW_REQUESTS requests; `per_token` of the latest WINDOW_TOKENS
  tokens that were not a row's first: the time since the row's tokens before it, shared by the
  tokens that came together.
* `speed`, per second of the window's steps: `new_tokens_per_s`, `prompt_tokens_per_s` (fed).
* `speculation`, in the window: `accepted_length`, `hit_rate`, `verified_per_row` (draft tokens per
  row and round).
* `bandwidth`: `bytes_per_s`, what the window's target forwards read (`ForwardBytes`) per second of
  them; `weight_bytes`; `machine_bytes_per_s` of copying, None until it was measured; `share` of it.
* `kv`: `tokens` that running rows hold; `bytes` and `budget_bytes` by tier: device, host, disk;
  `use` of the device's budget as admission counts it: rows times longest row; `damaged_files`.
* `prefix`, since the start: prompt tokens `asked` for, those `found`, and the `hit_rate`.
* `preemptions`, since the start: times a request was parked.
* `breakers`: by drafter: closed, open or half-open.
* `total`, since the start: `steps`, `seconds` in them, `draft_s` and `verify_s` of those,
  `new_tokens`, `prompt_tokens`, `rounds`, `drafted`, `verified`, `accepted`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, fields
from math import ceil
from typing import TYPE_CHECKING, Any

from dspark_hf import compat
from dspark_hf.serving.bandwidth import ForwardBytes, copy_bandwidth
from dspark_hf.serving.handle import PARKED
from dspark_hf.serving.sums import OUTCOMES, REFUSED, TOTALS, outcome_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dspark_hf.rows import Row
    from dspark_hf.serving.handle import RequestHandle
    from dspark_hf.serving.places import Places
    from dspark_hf.targets.base import Target

WINDOW_S, WINDOW_STEPS = 60.0, 512
WINDOW_REQUESTS, WINDOW_TOKENS = 1024, 4096
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
REMEMBERED_ROWS = 4096
"""Rows whose newest tokens' time is kept: more than run, as parked ones come back."""


@dataclass(frozen=True)
class Work:
    """What was done in a step, or in several added together.

    Attributes:
        steps: Steps.
        seconds: In them, from the first draft to the last token's stops.
        row_seconds: Rows decoding times seconds.
        prompt_tokens: Tokens fed before rows could go on.
        first_tokens: Rows' first tokens.
        round_tokens: Tokens committed in rounds.
        rounds: Row rounds.
        drafted: Draft tokens proposed.
        verified: Draft tokens the target scored.
        accepted: Draft tokens committed.
        draft_s: Seconds in drafters.
        verify_s: Seconds in target forwards.
        read_bytes: Bytes these forwards read, as `ForwardBytes` counts.
    """

    steps: int = 0
    seconds: float = 0.0
    row_seconds: float = 0.0
    prompt_tokens: int = 0
    first_tokens: int = 0
    round_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    read_bytes: int = 0

    @property
    def new_tokens(self) -> int:
        """Tokens committed after prompts."""
        return self.first_tokens + self.round_tokens


@dataclass(frozen=True)
class Before:
    """A step's rows before it.

    Attributes:
        decoding: Rows with tokens, which get a round.
        starting: Rows that are fed first.
        counts: Of both, in order: new tokens, rounds, drafted, verified, accepted, draft and verify
            seconds.
        prompt_tokens: Tokens that starting rows are fed.
        contexts: Cached tokens of both, in order.
    """

    decoding: Sequence[Row]
    starting: Sequence[Row]
    counts: Sequence[tuple[float, ...]]
    prompt_tokens: int
    contexts: Sequence[int]


def look(
    decoding: Sequence[Row], starting: Sequence[tuple[Row, int | None]], target: Target
) -> Before:
    """Note how rows stand before a step.

    Args:
        decoding: Rows that get a round.
        starting: Rows that are fed, and how many tokens at most; None for all.
        target: Knows what is cached.
    """
    fed, contexts = 0, [target.length(row.row_id) for row in decoding]
    for row, most in starting:
        cached = target.length(row.row_id)
        wanted = len(row.ids) - bool(row.num_new_tokens) - cached
        fed += wanted if most is None else min(most, wanted)
        contexts.append(cached)
    rows = [row for row, _ in starting]
    counts = [_counts(row) for row in [*decoding, *rows]]
    return Before(list(decoding), rows, counts, fed, contexts)


class QueueMetrics:
    """Counts and windows of a queue; any thread may read while the engine writes."""

    def __init__(
        self, model: Any, max_rows: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start at zero.

        Args:
            model: The target.
            max_rows: Most rows decoded together.
            clock: Seconds that only grow; the one of the requests' statistics.
        """
        self.max_rows, self.clock = max_rows, clock
        self.alone: RequestHandle | None = None
        self.machine_bytes_per_s: float | None = None
        self._device = compat.input_device(model)
        self._forward = ForwardBytes(model)
        self._lock = threading.Lock()
        self._total = Work()
        self._ended = dict.fromkeys(OUTCOMES, 0)
        self._steps: deque[tuple[float, Work]] = deque(maxlen=WINDOW_STEPS)
        self._token_s: deque[float] = deque(maxlen=WINDOW_TOKENS)
        self._queue_s: deque[float] = deque(maxlen=WINDOW_REQUESTS)
        self._first_s: deque[float] = deque(maxlen=WINDOW_REQUESTS)
        self._num_alone = 0
        self._newest: dict[int, float] = {}

    def observe(self, before: Before, seconds: float) -> None:
        """Count a step.

        Args:
            before: How its rows stood.
            seconds: What it took.
        """
        now, rows = self.clock(), [*before.decoding, *before.starting]
        gains = [
            [new - old for new, old in zip(_counts(row), counts, strict=True)]
            for row, counts in zip(rows, before.counts, strict=True)
        ]
        num_decoding = len(before.decoding)
        sums = [sum(column) for column in zip(*gains, strict=True)] or [0] * 7
        work = Work(
            steps=1,
            seconds=seconds,
            row_seconds=num_decoding * seconds,
            prompt_tokens=before.prompt_tokens,
            first_tokens=int(sum(gain[0] for gain in gains[num_decoding:])),
            round_tokens=int(sum(gain[0] for gain in gains[:num_decoding])),
            rounds=int(sums[1]),
            drafted=int(sums[2]),
            verified=int(sums[3]),
            accepted=int(sums[4]),
            draft_s=sums[5],
            verify_s=sums[6],
            read_bytes=self._forward.of(before.contexts),
        )
        with self._lock:
            for row, gain in zip(rows, gains, strict=True):
                self._note_tokens(row, int(gain[0]), now)
            self._steps.append((now, work))
            self._total = _sum([self._total, work])

    def end(self, handle: RequestHandle, status: str, error: BaseException | None) -> None:
        """Count a request that has ended.

        Args:
            handle: Of the request.
            status: DONE, FAILED or CANCELLED.
            error: Why it failed; None if it is done.
        """
        stats = handle.stats
        with self._lock:
            self._ended[outcome_of(status, error)] += 1
            self._num_alone += handle is self.alone
            if stats.started is not None:
                self._queue_s.append(stats.started)
            if stats.first_token is not None:
                self._first_s.append(stats.first_token)

    def refuse(self) -> None:
        """Count a request that found the queue full."""
        with self._lock:
            self._ended[REFUSED] += 1

    def measure_bandwidth(self) -> float:
        """Return how many bytes this machine copies per second, measured the first time."""
        if self.machine_bytes_per_s is None:
            self.machine_bytes_per_s = copy_bandwidth(self._device)
        return self.machine_bytes_per_s

    def snapshot(self, places: Places) -> dict[str, Any]:
        """Return everything, as the module says.

        Args:
            places: What runs and waits; the caller holds the engine's lock.
        """
        now, present = self.clock(), [*places.running, *places.waiting]
        stats = [request.handle.stats for request in present]
        with self._lock:
            window = _sum(work for at, work in self._steps if now - at <= WINDOW_S)
            delays = {
                "queue": percentiles([*self._queue_s, *_known(s.started for s in stats)]),
                "first_token": percentiles([*self._first_s, *_known(s.first_token for s in stats)]),
                "per_token": percentiles(self._token_s),
            }
            total, ended, num_alone = self._total, dict(self._ended), self._num_alone
        is_alone = self.alone is not None and not self.alone.is_ended
        waits = [now - request.handle.stats.submitted for request in places.waiting]
        return {
            "requests": {
                "waiting": len(places.waiting),
                "parked": sum(r.handle.status == PARKED for r in places.waiting),
                "running": len(places.running) + is_alone,
                "oldest_s": max(waits, default=0.0),
            },
            "ended": ended,
            "alone": num_alone,
            "rows": [_row(r, row, now) for r in places.running for row in r.active_rows],
            "batch": {
                "rows": len(places.rows),
                "max_rows": self.max_rows,
                "limit": places.size.limit,
                "utilisation": _ratio(window.row_seconds, window.seconds * self.max_rows),
            },
            "delay_s": delays,
            "speed": {
                "new_tokens_per_s": _ratio(window.new_tokens, window.seconds),
                "prompt_tokens_per_s": _ratio(window.prompt_tokens, window.seconds),
            },
            "speculation": {
                "accepted_length": _ratio(window.round_tokens, window.rounds),
                "hit_rate": _ratio(window.accepted, window.drafted),
                "verified_per_row": _ratio(window.verified, window.rounds),
            },
            "bandwidth": self._bandwidth(window),
            "kv": _kv(places),
            "prefix": _prefix(places),
            "preemptions": places.preemptions,
            "breakers": places.guard.states(),
            "total": {name: getattr(total, name) for name in TOTALS},
        }

    def _note_tokens(self, row: Row, num_tokens: int, now: float) -> None:
        """Remember when a row got tokens, and how long it had waited for them."""
        if not num_tokens:
            return
        before = self._newest.pop(row.row_id, None)
        if before is not None:
            self._token_s.extend([(now - before) / num_tokens] * num_tokens)
        if not row.finished:
            self._newest[row.row_id] = now
        if len(self._newest) > REMEMBERED_ROWS:
            # Cancelled rows are never finished: the one that was silent longest goes.
            del self._newest[next(iter(self._newest))]

    def _bandwidth(self, window: Work) -> dict[str, float | None]:
        achieved, machine = _ratio(window.read_bytes, window.verify_s), self.machine_bytes_per_s
        return {
            "bytes_per_s": achieved,
            "weight_bytes": self._forward.weights,
            "machine_bytes_per_s": machine,
            "share": None if achieved is None or machine is None else achieved / machine,
        }


def percentiles(values: Iterable[float]) -> dict[str, float | None]:
    """Return the p50, p95 and p99: the least value that so many per cent do not exceed."""
    ordered = sorted(values)
    if not ordered:
        return dict.fromkeys(QUANTILES)
    return {name: ordered[ceil(q * len(ordered)) - 1] for name, q in QUANTILES.items()}


def _counts(row: Row) -> tuple[float, ...]:
    record = row.record
    return (
        record.new_tokens, record.rounds, record.drafted, record.verified, record.accepted,
        record.draft_s, record.verify_s,
    )  # fmt: skip


def _sum(works: Iterable[Work]) -> Work:
    works = list(works)
    return Work(*(sum(getattr(work, field.name) for work in works) for field in fields(Work)))


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _row(request: Any, row: Row, now: float) -> dict[str, Any]:
    return {
        "row": row.row_id,
        "status": request.handle.status,
        "priority": request.priority,
        "prompt_tokens": row.num_prompt_tokens,
        "new_tokens": row.num_new_tokens,
        "accepted_length": row.record.accepted_length,
        "age_s": now - request.handle.stats.submitted,
    }


def _kv(places: Places) -> dict[str, Any]:
    budget, store = places.budget, places.keeper.store
    lengths, held = [len(row.ids) for row in places.rows], places.held_tokens()
    return {
        "tokens": held,
        "bytes": {
            "device": held * budget.token_bytes,
            "host": store.host.num_bytes,
            "disk": store.disk.num_bytes,
        },
        "budget_bytes": {
            "device": budget.num_bytes,
            "host": store.host_bytes,
            "disk": store.disk_bytes,
        },
        "use": _ratio(len(lengths) * max(lengths, default=0), budget.num_tokens),
        "damaged_files": store.disk.damaged,
    }


def _prefix(places: Places) -> dict[str, float | None]:
    prefix = places.keeper.prefix
    asked, found = (0, 0) if prefix is None else (prefix.tokens_asked, prefix.tokens_found)
    return {"asked": asked, "found": found, "hit_rate": _ratio(found, asked)}
