"""Prompt lookup: propose what followed the last occurrence of the row's current ending."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dspark_hf.errors import ConfigError
from dspark_hf.values import DraftRequest, Proposal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_EMPTY = Proposal()


class LookupDrafter:
    """Drafts from the row's own text; needs no model and no training.

    Proposes what followed the longest earlier occurrence of the row's last tokens, the most
    recent one among equally long ones. Proposals are deterministic (`probs` None). Their signal
    is the matched length in tokens: 1 to 4 as is, 5 for 5-7, 6 for 8-15, 7 from 16 on.

    A match may lie next to the end of the text or overlap the ending; the text then repeats with
    a short period, and the proposal goes on with that period. A match may also span stop tokens,
    as in a chat template, but a proposal never contains one.

    Cost: at most 2 * `max_ngram` dictionary steps for each committed token, and the length of the
    proposal for each call; the history is never scanned.
    Source: after Saxena, "Prompt lookup decoding" (2023), with a longest-match index.
    """

    name = "lookup"

    def __init__(
        self, max_ngram: int = 16, min_ngram: int = 1, stop_ids: Iterable[int] = ()
    ) -> None:
        """Create a drafter without rows.

        Args:
            max_ngram: Longest ending compared, in tokens; longer matches count as this long.
            min_ngram: Shortest match worth a proposal, in tokens. One token is little evidence,
                but the signal keeps such proposals apart, so a schedule can learn their worth.
            stop_ids: Tokens that end a text; a proposal is cut before the first of them. None or
                several are fine.

        Raises:
            ConfigError: If a length is not an integer, 1 <= min_ngram <= max_ngram does not
                hold, or `stop_ids` is not a collection of integers.
        """
        for label, value in (("max_ngram", max_ngram), ("min_ngram", min_ngram)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{label} must be an integer of at least 1; got {value!r}.")
        if min_ngram > max_ngram:
            raise ConfigError(
                f"min_ngram must be at most max_ngram {max_ngram}; got {min_ngram}. "
                "Lower min_ngram or raise max_ngram."
            )
        try:
            self.stop_ids = frozenset(int(token) for token in stop_ids)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"stop_ids must be a collection of token ids; got {stop_ids!r}. "
                "Pass () when no token ends the text."
            ) from error
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram
        self._rows: dict[int, _SuffixIndex] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Propose up to `max_tokens` tokens for each row.

        Args:
            requests: One per row; the ids of a row are those of its last call, and more. A row
                that got shorter, or starts or ends otherwise than indexed, is indexed afresh.

        Returns:
            list[Proposal]: One per request, in order; empty where nothing matches.
        """
        return [self._propose_row(request) for request in requests]

    def free(self, row_id: int) -> None:
        """Forget a row; unknown rows are ignored."""
        self._rows.pop(row_id, None)

    def _propose_row(self, request: DraftRequest) -> Proposal:
        ids = request.ids
        index = self._rows.get(request.row_id)
        if index is None or not index.is_prefix_of(ids):
            index = self._rows[request.row_id] = _SuffixIndex(self.max_ngram)
        index.extend(ids)
        if index.match_length < self.min_ngram:
            return _EMPTY
        proposed = self._continue(ids, index.match_end, request.max_tokens)
        return Proposal(proposed, signal=length_signal(index.match_length)) if proposed else _EMPTY

    def _continue(self, ids: Sequence[int], match_end: int, max_tokens: int) -> list[int]:
        period = len(ids) - 1 - match_end
        proposed: list[int] = []
        for step in range(max_tokens):
            token = ids[match_end + 1 + step] if step < period else proposed[step - period]
            if token in self.stop_ids:
                break
            proposed.append(token)
        return proposed


def length_signal(match_length: int) -> int:
    """Bucket a matched length for acceptance statistics.

    Args:
        match_length: Matched tokens, at least 1.

    Returns:
        int: 1 to 4 as is, 5 for 5-7, 6 for 8-15, 7 from 16 on.
    """
    return match_length if match_length < 5 else min(match_length.bit_length() + 2, 7)


@dataclass
class _SuffixIndex:
    """Finds where the ending of a growing sequence occurred before.

    A trie of n-grams read backwards: the children of a node add one token on the left, and each
    node holds the most recent end of its n-gram. An n-gram is stored only when n is 1 or its last
    n - 1 tokens occur at least twice, so text that never repeats costs one node a token. Indexing
    a token walks down from the root along the ending, moving each node's end to the new position;
    the last node that was there before is the longest match, and its old end the most recent.

    Attributes:
        max_ngram: Depth of the trie.
        match_length: Length of the longest ending that occurred before, at most `max_ngram`.
        match_end: Position of the last token of its most recent earlier occurrence.
        num_steps: Nodes visited so far, at most 2 * `max_ngram` for each token.
    """

    max_ngram: int
    match_length: int = 0
    match_end: int = -1
    num_steps: int = 0
    _num_ids: int = 0
    _ends_of_text: tuple[int, int] | None = None
    _child: dict[tuple[int, int], int] = field(default_factory=dict)
    _last_end: list[int] = field(default_factory=lambda: [-1])

    @property
    def num_nodes(self) -> int:
        """Stored n-grams."""
        return len(self._child)

    def is_prefix_of(self, ids: Sequence[int]) -> bool:
        """Whether `ids` can be the indexed text and more, as far as its length and ends show."""
        if self._ends_of_text is None:
            return True
        if len(ids) < self._num_ids:
            return False
        return self._ends_of_text == (ids[0], ids[self._num_ids - 1])

    def extend(self, ids: Sequence[int]) -> None:
        """Index the tokens of `ids` that are new.

        Args:
            ids: The whole sequence; its first tokens are those indexed already.
        """
        for end in range(self._num_ids, len(ids)):
            self._append(ids, end)
        if ids:
            self._num_ids = len(ids)
            self._ends_of_text = (ids[0], ids[-1])

    def _append(self, ids: Sequence[int], end: int) -> None:
        self.match_length = 0
        node = 0
        for depth in range(min(self.max_ngram, end + 1)):
            node, earlier = self._visit(node, ids[end - depth], end)
            if earlier < 0:
                return
            self.match_length, self.match_end = depth + 1, earlier
            # This n-gram now occurs twice, so the longer one at its earlier end is stored too.
            if depth + 1 < self.max_ngram and earlier > depth:
                self._visit(node, ids[earlier - depth - 1], earlier)

    def _visit(self, parent: int, token: int, end: int) -> tuple[int, int]:
        self.num_steps += 1
        node = self._child.setdefault((parent, token), len(self._last_end))
        if node == len(self._last_end):
            self._last_end.append(end)
            return node, -1
        earlier, self._last_end[node] = self._last_end[node], end
        return node, earlier
