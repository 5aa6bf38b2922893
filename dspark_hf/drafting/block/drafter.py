"""BlockDrafter: drafts a block per row and round from the target's own features."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's own abbreviation

from dspark_hf import compat
from dspark_hf.drafting.block.context import DraftContext
from dspark_hf.drafting.block.model import block_ids
from dspark_hf.errors import CheckpointError
from dspark_hf.values import Proposal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from transformers import PreTrainedModel

    from dspark_hf.drafting.block.model import BlockModel
    from dspark_hf.drafting.block.vocabulary import Vocabulary
    from dspark_hf.values import DraftRequest, Warp
    from dspark_hf.verification.scaling import Scalings


class BlockDrafter:
    """DSpark's drafter over any published checkpoint, all rows in one ragged pass.

    A row is drafted for when the features of all its committed tokens but the newest are known;
    the target delivers them through `take` while it verifies.
    """

    draft_cost_grows = True
    """The backbone runs over the whole block; tokens are then chosen one by one."""

    def __init__(
        self,
        model: BlockModel,
        vocabulary: Vocabulary,
        target: PreTrainedModel,
        *,
        scalings: Scalings | None = None,
        name: str = "block",
    ) -> None:
        """Prepare a drafter.

        Args:
            model: Its parameters, of the target's dtype and on its device.
            vocabulary: Embedding and output head.
            target: The model it drafts for.
            scalings: Of the confidences, from calibration; None leaves them as they are.
            name: Name in logs and statistics.

        Raises:
            CheckpointError: If there are scalings, but not for as many positions as drafts.
        """
        self.model, self.vocabulary, self.target = model, vocabulary, target
        self.name = name
        self.scalings = scalings
        spec = model.spec
        self.target_layers = spec.target_layers
        self.block_size = spec.num_drafts
        if scalings is not None and scalings.num_positions != spec.num_drafts:
            raise CheckpointError(
                f"calibration must be for {spec.num_drafts} draft tokens; got one for "
                f"{scalings.num_positions}. Calibrate the drafter again."
            )
        self._context: DraftContext | None = None

    @property
    def context(self) -> DraftContext:
        """Rows' context; nothing is kept between calls."""
        if self._context is None:
            self._follow_target()
            self._context = DraftContext(self.model)
        return self._context

    @torch.no_grad()
    def take(self, row_id: int, start: int, features: torch.Tensor) -> None:
        """Take in the target's features of a row's tokens.

        Args:
            row_id: The row.
            start: Position of the first token.
            features: Of shape (T, m * d).
        """
        context = self.context
        with self._own_type():
            context.take(row_id, start, features)

    @torch.no_grad()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Draft a block for every row whose context is known, as the Drafter protocol says."""
        proposals = [Proposal() for _ in requests]
        places = [i for i, request in enumerate(requests) if self._is_ready(request)]
        if not places:
            return proposals
        with self._own_type():
            drafted = self._propose([requests[i] for i in places])
        for i, proposal in zip(places, drafted, strict=True):
            proposals[i] = proposal
        return proposals

    def _propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        rows = [request.row_id for request in requests]
        self.context.project(rows)
        order, positions = self.context.open_blocks(rows)
        asked = [requests[i] for i in order]
        device = self.model.device
        anchors = torch.tensor([request.ids[-1] for request in asked], device=device)
        embeds = self.vocabulary.embed(block_ids(anchors, self.model.spec), self.model.dtype)
        read = self._skipped + max(self._wanted(request) for request in asked)
        embeds, rotary = embeds.flatten(0, 1)[None], self.model.rotary(positions)
        hidden = self.model(embeds, rotary, self.context, read)
        hidden = hidden[0].unflatten(0, (len(rows), -1))  # [R, read, d]
        proposals = [Proposal() for _ in requests]
        for i, proposal in zip(order, self._draft(asked, hidden, anchors), strict=True):
            proposals[i] = proposal
        return proposals

    def _wanted(self, request: DraftRequest) -> int:
        return min(request.max_tokens, self.model.spec.num_drafts)

    @property
    def _skipped(self) -> int:
        """Positions of a block before the first that drafts.

        The anchor's, where it is not read, still starts a recurrent head's state.
        """
        return 0 if self.model.spec.reads_anchor else 1

    def free(self, row_id: int) -> None:
        """Forget a row."""
        if self._context is not None:
            self._context.free(row_id)
            if self._context.is_empty:
                self._context = None

    def _own_type(self) -> AbstractContextManager[object]:
        """Compute in the drafter's own type, under autocast too."""
        if compat.is_autocast(self.target):
            return torch.autocast(self.model.device.type, enabled=False)
        return nullcontext()

    def _follow_target(self) -> None:
        """Go where the target is and take its type: it may have been moved or cast since."""
        device, dtype = compat.input_device(self.target), self.target.dtype
        if (self.model.device, self.model.dtype) != (device, dtype):
            self.model.to(device, dtype)
            self.vocabulary.to(device, dtype)

    def _is_ready(self, request: DraftRequest) -> bool:
        """Roll the row's context back to what is committed; tell whether it is all there."""
        spec, known = self.model.spec, len(request.ids) - 1
        if spec.max_positions is not None and known + spec.block_size > spec.max_positions:
            return False
        # The target may have grown ids since that the drafter has no embedding for.
        if self.context.length(request.row_id) < known or request.ids[-1] >= spec.vocab_size:
            return False
        self.context.truncate(request.row_id, known)
        return True

    def _draft(
        self, requests: Sequence[DraftRequest], hidden: torch.Tensor, anchors: torch.Tensor
    ) -> list[Proposal]:
        """Choose the tokens of every row's block, left to right.

        Args:
            requests: One per row.
            hidden: Of what is read of their blocks, (R, N, d).
            anchors: Newest committed tokens, (R,).
        """
        markov, skipped = self.model.markov_head, self._skipped
        wanted = [self._wanted(request) for request in requests]
        read = hidden[:, skipped:]
        # As a matrix: the product over a slice of three axes is five times slower in bf16 on a CPU.
        base = self.vocabulary.logits(read.reshape(-1, read.shape[-1])).float()
        base = base.unflatten(0, read.shape[:2])
        previous, state = anchors, None
        chosen: list[torch.Tensor] = []
        tokens: list[torch.Tensor] = []
        probs: list[list[torch.Tensor]] = [[] for _ in requests]
        for k in range(-skipped, max(wanted)):
            logits = base[:, max(k, 0)]
            if markov is not None:
                tokens.append(markov.markov_w1(previous))
                state = markov.start(tokens[-1]) if state is None else state
                code, state = markov.step(state, tokens[-1], hidden[:, k + skipped])
                if k >= 0:
                    logits = logits + markov.markov_w2(code)
            if k >= 0:
                drawing = [i for i, row in enumerate(requests) if row.warp and k < wanted[i]]
                previous = self._choose(requests, drawing, logits, probs)
                chosen.append(previous)
        ids = torch.stack(chosen, dim=1).tolist()
        drawn = [request.warp is not None for request in requests]
        told = self._confidence(hidden[:, skipped:], tokens[skipped:], drawn)
        return [
            Proposal(
                ids[i][:count],
                self._over_target(probs[i]),
                confidence=told[i][:count] if told else (),
            )
            for i, count in enumerate(wanted)
        ]

    def _choose(
        self,
        requests: Sequence[DraftRequest],
        drawing: Sequence[int],
        logits: torch.Tensor,
        probs: list[list[torch.Tensor]],
    ) -> torch.Tensor:
        """Choose one token per row: the best, or a drawn one whose distribution is noted.

        Args:
            requests: One per row.
            drawing: Rows that draw. One that has all it wants draws no more: what a row draws may
                not depend on its neighbours.
            logits: Of shape (R, V_draft).
            probs: Gets the distribution over the draft ids of each drawing row.

        Returns:
            torch.Tensor: The target's ids, (R,).
        """
        chosen = logits.argmax(dim=-1)
        for i in drawing:
            request = requests[i]
            row = cast("Warp", request.warp)(logits[i : i + 1])[0]
            total = row.double().cumsum(dim=0)
            drawn = torch.rand(1, generator=request.generator, dtype=torch.float64)
            if total[-1] > 0:
                place = torch.searchsorted(total, drawn.to(total.device) * total[-1], right=True)
                chosen[i] = place.clamp_max(row.nonzero()[-1])[0]
            else:
                # No number to draw by: a one-point distribution stays exact.
                row = F.one_hot(chosen[i], len(row)).to(row.dtype)
            probs[i].append(row)
        return self.vocabulary.to_target(chosen)

    def _over_target(self, probs: list[torch.Tensor]) -> torch.Tensor | None:
        """Return a row's distributions over the target's ids, spread all at once; None for none."""
        if not probs:
            return None
        vocab_size = int(compat.text_config(self.target).vocab_size)
        return self.vocabulary.scatter(torch.stack(probs), vocab_size).cpu()

    def _confidence(
        self, hidden: torch.Tensor, tokens: list[torch.Tensor], drawn: Sequence[bool]
    ) -> list[list[float]]:
        """Return each row's calibrated confidences; none where there is no head.

        Args:
            hidden: Of the drafted positions, (R, N, d).
            tokens: W1 rows (R, r) of the token before each; none without a sequential head.
            drawn: Whether each row's text is sampled.
        """
        head = self.model.confidence_head
        if head is None:
            return []
        logits = head(hidden, torch.stack(tokens, dim=1) if tokens else None).float()
        if self.scalings is not None:
            rows = [self.scalings.of(is_drawn=is_drawn) for is_drawn in drawn]
            length = logits.shape[1]
            logits = logits / logits.new_tensor([row.temperatures[:length] for row in rows])
            logits = logits + logits.new_tensor([row.shifts[:length] for row in rows])
        # Where there is no number there is no confidence.
        return cast("list[list[float]]", torch.sigmoid(logits).nan_to_num(0.0).tolist())
