"""Rounds of whole blocks: what a drafter said and what the target made of it, prompt by prompt.

Every figure of an evaluation is computed from these afterwards. Blocks are drafted and verified
whole (`schedule="fixed"`), so that no choice of lengths hides what would have become of a token.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import numpy as np
import torch

from dspark_hf import compat
from dspark_hf.benchmarks.prompts import encode
from dspark_hf.config import DSparkConfig
from dspark_hf.drafting.base import Drafter
from dspark_hf.errors import ConfigError
from dspark_hf.losslessness import end_ids
from dspark_hf.model import DSparkForCausalLM

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from numpy.typing import NDArray

    from dspark_hf.data import Prompt
    from dspark_hf.metrics import SpeculationRecord
    from dspark_hf.tracing import RoundTrace
    from dspark_hf.verification.scaling import Scalings

BATCH = 8
"""Prompts decoded together; a row's rounds do not depend on its neighbours."""
MOST_CERTAIN = 1 - 1e-7
"""A float32 confidence of 1 has no logit; beyond this it is held back."""


@runtime_checkable
class CalibratedDrafter(Drafter, Protocol):
    """A drafter whose confidences are scaled."""

    scalings: Scalings | None
    """Of its confidences; None for none."""
    block_size: int
    """Tokens it always drafts."""


@dataclass(frozen=True)
class Observed:
    """A round, as far as it is settled.

    Attributes:
        logits: Of the drafter's confidences, one per drafted token; empty without confidences.
        drafted: Draft tokens, all verified.
        known: Draft positions for which it is settled whether they could survive.
        accepted: Draft tokens committed.
    """

    logits: tuple[float, ...]
    drafted: int
    known: int
    accepted: int


@dataclass(frozen=True)
class PromptRounds:
    """What decoding one prompt gave.

    Attributes:
        prompt: Its id.
        group: Its group.
        temperature: 0 for greedy decoding.
        record: Counts of the row.
        rounds: In order.
    """

    prompt: str
    group: str
    temperature: float
    record: SpeculationRecord
    rounds: tuple[Observed, ...]


@dataclass(frozen=True)
class BlockRounds:
    """Rounds of several prompts as arrays; positions that were not drafted are NaN.

    Attributes:
        logits: Confidence logits of shape (R, N).
        known: Settled positions, int64 of shape (R,).
        accepted: Accepted tokens, int64 of shape (R,).
    """

    logits: NDArray[np.float64]
    known: NDArray[np.int64]
    accepted: NDArray[np.int64]

    @classmethod
    def of(cls, prompts: Sequence[PromptRounds], num_drafts: int) -> BlockRounds:
        """Stack the rounds of prompts, up to `num_drafts` positions each."""
        rounds = [entry for prompt in prompts for entry in prompt.rounds]
        logits = np.full((len(rounds), num_drafts), np.nan)
        for row, entry in zip(logits, rounds, strict=True):
            given = entry.logits[:num_drafts]
            row[: len(given)] = given
        known = np.array([min(e.known, num_drafts) for e in rounds], dtype=np.int64)
        accepted = np.array([min(e.accepted, num_drafts) for e in rounds], dtype=np.int64)
        return cls(logits, known, accepted)

    @classmethod
    def join(cls, parts: Sequence[BlockRounds]) -> BlockRounds:
        """Stack rounds of the same number of positions."""
        return cls(
            np.concatenate([part.logits for part in parts]),
            np.concatenate([part.known for part in parts]),
            np.concatenate([part.accepted for part in parts]),
        )

    def __len__(self) -> int:
        """Return the number of rounds."""
        return len(self.known)

    def whole(self) -> BlockRounds:
        """Return the rounds of which all positions are settled, nearly all but a text's last."""
        return self._of(self.known == self.logits.shape[1])

    def confident(self) -> BlockRounds:
        """Return the rounds that came with confidences: of several drafters, not all give them."""
        return self._of(~np.isnan(self.logits[:, 0]))

    def _of(self, found: NDArray[np.bool_]) -> BlockRounds:
        return BlockRounds(self.logits[found], self.known[found], self.accepted[found])


def collect_rounds(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    num_drafts: int,
    max_new_tokens: int,
    temperature: float,
    seed: int = 0,
    observer: Callable[[int], None] | None = None,
) -> list[PromptRounds]:
    """Decode prompts with whole blocks and keep every round.

    Args:
        model: Wrapped, with a drafter.
        tokenizer: Its tokenizer; the chat template is applied if there is one.
        prompts: What to decode.
        num_drafts: Tokens drafted and verified per round.
        max_new_tokens: Tokens per prompt at most.
        temperature: 0 for greedy decoding; otherwise tokens are drawn at it, from all tokens.
        seed: Of the draws.
        observer: Told how many prompts a finished batch had.

    Returns:
        list[PromptRounds]: One per prompt, in order.

    Raises:
        ConfigError: If the model is not wrapped, has no drafter or cannot be decoded here.
    """
    if not isinstance(model, DSparkForCausalLM) or model.dspark.drafter is None:
        raise ConfigError(
            "model must be wrapped with a drafter to observe its rounds; got "
            f"{type(model).__name__} without. Use DSparkForCausalLM.wrap(model, drafter=...)."
        )
    config = DSparkConfig(
        schedule="fixed", max_draft_tokens=num_drafts, never_slower=False, seed=seed
    )
    options: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    ends = frozenset(end_ids(cast("Any", model), {}))
    found: list[PromptRounds] = []
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        inputs = _left_padded([encode(tokenizer, prompt.text) for prompt in batch], model)
        # No call of another thread may be recorded among these rows.
        with model.dspark.lock, model.dspark.trace() as traces:
            out = model.generate(
                **inputs,
                **options,
                max_new_tokens=max_new_tokens,
                pad_token_id=0,
                return_dict_in_generate=True,
                dspark=config,
            )
        found += _by_prompt(batch, out.speculation, traces, temperature, ends)
        if observer is not None:
            observer(len(batch))
    return found


@contextmanager
def drafting_with(model: Any, drafter: Drafter) -> Iterator[None]:
    """Let another drafter draft for a wrapped model; calls from other threads wait meanwhile."""
    handle = model.dspark
    with handle.lock:
        saved = handle.drafter
        handle.drafter = drafter
        try:
            yield
        finally:
            handle.drafter = saved


@contextmanager
def uncalibrated(drafter: Drafter) -> Iterator[None]:
    """Let a drafter state its raw confidences."""
    if not isinstance(drafter, CalibratedDrafter):
        yield
        return
    saved = drafter.scalings
    drafter.scalings = None
    try:
        yield
    finally:
        drafter.scalings = saved


def block_drafter(drafter: Drafter | None) -> CalibratedDrafter | None:
    """Return the drafter whose confidences are scaled: this one, or one it is made of."""
    members = getattr(drafter, "members", [drafter])
    return next((member for member in members if isinstance(member, CalibratedDrafter)), None)


def _left_padded(encoded: Sequence[dict[str, torch.Tensor]], model: Any) -> dict[str, torch.Tensor]:
    rows = [entry["input_ids"][0] for entry in encoded]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, ids.shape[1] - len(row) :] = row
        mask[index, ids.shape[1] - len(row) :] = 1
    device = compat.input_device(model)
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def _by_prompt(
    prompts: Sequence[Prompt],
    records: Sequence[SpeculationRecord],
    traces: Sequence[RoundTrace],
    temperature: float,
    ends: Collection[int],
) -> list[PromptRounds]:
    """Sort a batch's rounds by prompt."""
    if any(record.path == "transformers" for record in records):
        raise ConfigError(
            "the model must be decoded by this package to observe its rounds; the call ran in its "
            "own loop, and the log says why. `dspark-hf doctor` checks a model."
        )
    return [
        PromptRounds(
            prompt.id,
            prompt.group,
            temperature,
            record,
            tuple(_observed(trace, ends) for trace in traces if trace.row == place),
        )
        for place, (prompt, record) in enumerate(zip(prompts, records, strict=True))
    ]


def _observed(trace: RoundTrace, ends: Collection[int]) -> Observed:
    stated = np.clip(np.asarray(trace.confidence, dtype=np.float64), 1 - MOST_CERTAIN, MOST_CERTAIN)
    logits = tuple(float(x) for x in np.log(stated) - np.log1p(-stated))
    return Observed(logits, len(trace.drafted), trace.num_known(ends), trace.accepted)
