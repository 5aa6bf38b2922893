"""Routing: which group a request goes to. Decisions only: no queues, no clocks, no models.

The group that is wanted is the one the caller names, else the one the first rule that holds names,
else the default. A wanted group that nobody named is left while it is overloaded, and every group
while it is unavailable: its fallback takes its place, or that one's fallback, and so on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dspark_hf.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

Predicate = Callable[[int, "int | None", int], bool]
"""Takes prompt tokens, most new tokens (None where the call names none) and priority."""
NAMED, BY_CLASS, BY_RULE, BY_DEFAULT = "named", "class", "rule", "default"
FOR_LOAD, FOR_FAILURE = "load", "unavailable"


@dataclass(frozen=True)
class Asked:
    """What is known of a request before it is decoded.

    Attributes:
        num_prompt_tokens: Of its longest row.
        max_new_tokens: As the call says; None where it says nothing.
        priority: As submitted.
        group: That the caller names; None if it does not.
        request_class: That the caller names; None if it does not.
    """

    num_prompt_tokens: int
    max_new_tokens: int | None = None
    priority: int = 0
    group: str | None = None
    request_class: str | None = None


@dataclass(frozen=True)
class Decision:
    """Where a request goes.

    Attributes:
        group: That takes it.
        wanted: That would have taken it, were it fit.
        reason: Why `wanted` was wanted: "named", "class", "rule" or "default"; or why it did not
            get the request: "load" or "unavailable".
    """

    group: str
    wanted: str
    reason: str


@dataclass(frozen=True)
class LoadLimit:
    """When a group is overloaded.

    Attributes:
        high: Expected delay, in seconds, beyond which it is left.
        low: Expected delay below which it is returned to; from 0 up to `high`.
    """

    high: float
    low: float

    def __post_init__(self) -> None:
        """Refuse limits that do not belong together."""
        if not _is_number(self.high) or self.high <= 0:
            raise ConfigError(f"high must be seconds above 0; got {self.high!r}.")
        if not _is_number(self.low) or not 0 <= self.low <= self.high:
            raise ConfigError(
                f"low must be seconds from 0 to high, {self.high}; got {self.low!r}. Lower it."
            )


class Routes:
    """Decides, and counts its decisions.

    Attributes:
        groups: Names, the default first.
        decisions: How often each group was chosen for each reason.
    """

    def __init__(
        self,
        groups: Sequence[str],
        *,
        rules: Mapping[Any, str] | None = None,
        default: str | None = None,
        fallback: Mapping[str, str] | str | None = None,
        limits: Mapping[str, LoadLimit] | LoadLimit | None = None,
    ) -> None:
        """Check that every name is one of the groups.

        Args:
            groups: Names.
            rules: Request classes (texts) or predicates, and the group of each; predicates are
                asked in order.
            default: Of requests that no rule is for; the first group when None.
            fallback: A group for each group that has one; or one for all others.
            limits: When a group is overloaded; or one limit for all. None: never.

        Raises:
            ConfigError: If a name or a rule is not what it must be.
        """
        self.groups = list(groups)
        if not self.groups:
            raise ConfigError("groups must hold at least one queue; got none.")
        self.default = self.groups[0] if default is None else default
        self._require("default", self.default)
        self._classes: dict[str, str] = {}
        self._predicates: list[tuple[Predicate, str]] = []
        for key, group in (rules or {}).items():
            self._require("the group of a rule", group)
            if isinstance(key, str):
                self._classes[key] = group
            elif callable(key):
                self._predicates.append((key, group))
            else:
                raise ConfigError(
                    "a rule must be a request class, as text, or a function of (num_prompt_tokens, "
                    f"max_new_tokens, priority); got {key!r}."
                )
        if isinstance(fallback, str):
            fallback = {group: fallback for group in self.groups if group != fallback}
        self._fallback = dict(fallback or {})
        for group, other in self._fallback.items():
            self._require("fallback", group)
            self._require("the fallback of a group", other)
        if isinstance(limits, LoadLimit):
            limits = dict.fromkeys(self.groups, limits)
        self._limits = dict(limits or {})
        for group, limit in self._limits.items():
            self._require("limits", group)
            if not isinstance(limit, LoadLimit):
                raise ConfigError(f"limits must hold LoadLimit(high, low); got {limit!r}.")
        self._left: set[str] = set()
        self.decisions: Counter[tuple[str, str]] = Counter()

    @property
    def has_predicates(self) -> bool:
        """Whether a rule looks at requests themselves."""
        return bool(self._predicates)

    @property
    def left(self) -> list[str]:
        """Groups that are left at present, as they are overloaded."""
        return sorted(self._left)

    def wanted(self, asked: Asked) -> tuple[str, str]:
        """Return the group a request is meant for, and why.

        Raises:
            ConfigError: If it names a group or class that there is none of.
        """
        if asked.group is not None:
            self._require("group", asked.group)
            return asked.group, NAMED
        if asked.request_class is not None:
            if asked.request_class not in self._classes:
                raise ConfigError(
                    f"request_class must be one of {sorted(self._classes)}; got "
                    f"{asked.request_class!r}. Add a rule for it."
                )
            return self._classes[asked.request_class], BY_CLASS
        seen = asked.num_prompt_tokens, asked.max_new_tokens, asked.priority
        for predicate, group in self._predicates:
            if predicate(*seen):
                return group, BY_RULE
        return self.default, BY_DEFAULT

    def watch(self, delays: Mapping[str, float]) -> None:
        """Leave groups whose expected delay is too long; return to those that have caught up.

        Args:
            delays: Expected seconds until a new request of a group has its turn.
        """
        for group, limit in self._limits.items():
            if delays[group] > limit.high:
                self._left.add(group)
            elif delays[group] < limit.low or delays[group] == 0:
                self._left.discard(group)

    def choose(
        self, asked: Asked, delays: Mapping[str, float], unavailable: Sequence[str] = ()
    ) -> Decision | None:
        """Decide.

        Args:
            asked: The request.
            delays: Each group's expected delay, in seconds.
            unavailable: Groups that are full, closed or failing.

        Returns:
            Decision: None if the wanted group and all that stand in for it are unavailable.
        """
        self.watch(delays)
        wanted, reason = self.wanted(asked)
        chain = self._chain(wanted)
        present = [group for group in chain if group not in unavailable]
        # Where everything is overloaded, nothing is gained by going elsewhere.
        fit = [group for group in present if group not in self._left]
        if not present:
            return None
        chosen = present[0] if reason == NAMED or not fit else fit[0]
        if chosen != wanted:
            reason = FOR_FAILURE if wanted in unavailable else FOR_LOAD
        return Decision(chosen, wanted, reason)

    def count(self, decision: Decision) -> None:
        """Count a decision that was carried out."""
        self.decisions[decision.group, decision.reason] += 1

    def _chain(self, group: str) -> list[str]:
        """Return a group and those that stand in for it, each once."""
        chain = [group]
        while (group := self._fallback.get(group, chain[0])) not in chain:
            chain.append(group)
        return chain

    def _require(self, what: str, group: str) -> None:
        if group not in self.groups:
            raise ConfigError(f"{what} must be one of {self.groups}; got {group!r}.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
