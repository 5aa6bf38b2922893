"""One ragged forward: which cache slots its tokens go to and what each may see."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from dspark_kernels.ragged_attention.op import pack_mask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dspark_hf.attention.sparse import SparseRow

MAX_PADDING_RATIO = 2.0
"""Rows are attended together while the padded area is at most this many times the real one."""
FREE_PADDING = 4096
"""Padded area (queries x keys) that costs less than one more call, whatever the ratio: with rows of
SmolLM2 on two cores, sixteen uneven drafts take up to 7 % longer at 2048, and one long draft among
eight rows 8 % longer at 8192."""
MAX_PACKED_QUERIES = 64
"""Above this many new tokens a row is attended unpacked: its mask would be repeated per head."""


@dataclass(frozen=True)
class Segment:
    """A row's run of new tokens: `count` of them from `start` in the step, `past` cached before.

    `sparse` says how the row's context is read, None for all of it; `in_blocks` that the tokens
    are a prompt's, which it reads in blocks of queries.
    """

    slot: int
    past: int
    start: int
    count: int
    sparse: SparseRow | None = None
    in_blocks: bool = False

    @property
    def end(self) -> int:
        """Cached tokens of the row after the step."""
        return self.past + self.count


@dataclass
class Group:
    """Segments of neighbouring slots that are attended by one call.

    Attributes:
        segments: By slot.
        num_queries: Longest run of new tokens.
        end: Longest row after the step, in tokens.
        area: Queries times keys, summed over the rows.
    """

    segments: list[Segment]
    num_queries: int = 0
    end: int = 0
    area: int = 0
    _masks: dict[object, torch.Tensor | None] = field(default_factory=dict)
    _gathers: dict[torch.device, tuple[torch.Tensor, torch.Tensor] | None] = field(
        default_factory=dict
    )
    _fronts: dict[int, Group] = field(default_factory=dict)

    @property
    def is_prompt(self) -> bool:
        """Whether this is one run of several tokens with nothing cached before it."""
        first = self.segments[0]
        return len(self.segments) == 1 and first.past == 0 and first.count > 1

    def add(self, segment: Segment) -> None:
        """Take in the next slot's segment."""
        self.segments.append(segment)
        self.num_queries = max(self.num_queries, segment.count)
        self.end = max(self.end, segment.end)
        self.area += segment.count * segment.end

    def front(self, count: int) -> Group:
        """Return the first tokens of a single run as a group, built once per step."""
        if count not in self._fronts:
            group = Group([])
            group.add(replace(self.segments[0], count=count))
            self._fronts[count] = group
        return self._fronts[count]

    def key_range(self, window: int | None) -> tuple[int, int]:
        """Return the first and one-past-last cache position some query of the group sees."""
        if window is None:
            return 0, self.end
        return max(0, min(segment.past for segment in self.segments) + 1 - window), self.end

    def visible(
        self, window: int | None, device: torch.device, span: tuple[int, int]
    ) -> torch.Tensor | None:
        """Return which keys of `key_range` the queries of a span see, built once per step.

        Queries that pad a shorter row see what its last token sees, so none sees nothing.

        Args:
            window: Sliding window in tokens, or None.
            device: Where the mask is wanted.
            span: First and one-past-last query of each row.

        Returns:
            torch.Tensor | None: Bool of shape (B, T, S); None means all are seen.
        """
        key = (window, device, span)
        if key not in self._masks:
            self._masks[key] = self._visible(window, device, span)
        return self._masks[key]

    def _visible(
        self, window: int | None, device: torch.device, span: tuple[int, int]
    ) -> torch.Tensor | None:
        first, end = self.key_range(window)
        if all(segment.count == 1 and segment.end == end for segment in self.segments) and (
            window is None or len(self.segments) == 1
        ):
            return None
        past = torch.tensor([segment.past for segment in self.segments], device=device)
        last = torch.tensor([segment.count - 1 for segment in self.segments], device=device)
        query = torch.arange(*span, device=device)
        query = past[:, None] + torch.minimum(query[None], last[:, None])
        key = torch.arange(first, end, device=device)
        visible = key[None, None] <= query[:, :, None]
        if window is not None:
            visible &= key[None, None] > query[:, :, None] - window
        return visible

    def packed_mask(
        self,
        window: int | None,
        group: int,
        dtype: torch.dtype,
        device: torch.device,
        span: tuple[int, int],
    ) -> torch.Tensor | None:
        """Return `visible` as an additive mask, built once per step and shared by its layers."""
        key = (window, group, dtype, device, span)
        if key not in self._masks:
            visible = self._visible(window, device, span)
            self._masks[key] = None if visible is None else pack_mask(visible, group, dtype)
        return self._masks[key]

    def gather(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return indices that pad the group's tokens to (B * T) and that undo it; None if even."""
        if device not in self._gathers:
            counts = [segment.count for segment in self.segments]
            width = self.num_queries
            if min(counts) == width:
                self._gathers[device] = None
            else:
                base = self.segments[0].start
                pad = [
                    segment.start - base + min(i, segment.count - 1)
                    for segment in self.segments
                    for i in range(width)
                ]
                undo = [r * width + i for r, count in enumerate(counts) for i in range(count)]
                self._gathers[device] = (
                    torch.tensor(pad, device=device),
                    torch.tensor(undo, device=device),
                )
        return self._gathers[device]


@dataclass
class Step:
    """All segments of a forward, ordered by slot, and the groups they are attended in."""

    segments: list[Segment]
    groups: list[Group]
    _indices: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def scatter_indices(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return slot and position of every token of the step."""
        if device not in self._indices:
            slots = [s.slot for s in self.segments for _ in range(s.count)]
            positions = [s.past + i for s in self.segments for i in range(s.count)]
            self._indices[device] = (
                torch.tensor(slots, device=device),
                torch.tensor(positions, device=device),
            )
        return self._indices[device]


def plan_step(segments: Sequence[Segment], *, together: bool = True) -> Step:
    """Group segments so that one call serves rows of similar length in neighbouring slots.

    Args:
        segments: Ordered by slot, their starts following one another.
        together: Whether rows may share a call.

    Returns:
        Step: The plan.
    """
    groups: list[Group] = []
    for segment in segments:
        if not (groups and together and _fits(groups[-1], segment)):
            groups.append(Group([]))
        groups[-1].add(segment)
    return Step(list(segments), groups)


def _fits(group: Group, segment: Segment) -> bool:
    if segment.past == 0 and segment.count > 1:
        return False
    if segment.sparse is not None or group.segments[-1].sparse is not None:
        return False
    if group.is_prompt or segment.slot != group.segments[-1].slot + 1:
        return False
    width, end = max(group.num_queries, segment.count), max(group.end, segment.end)
    if width > MAX_PACKED_QUERIES:
        return False
    padded = (len(group.segments) + 1) * width * end
    real = group.area + segment.count * segment.end
    return padded <= MAX_PADDING_RATIO * real or padded - real <= FREE_PADDING
