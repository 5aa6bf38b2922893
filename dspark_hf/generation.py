"""From generate()'s prepared tensors to rows, through the decoder, and back to its outputs."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from dspark_hf import compat
from dspark_hf.eligibility import cached_tokens, left_padding
from dspark_hf.processing import RowCriteria, RowProcessors
from dspark_hf.rows import Row
from dspark_hf.targets.base import CachedRow
from dspark_hf.targets.select import position_limit
from dspark_hf.verification.acceptance import AcceptanceRule, Coupled, Greedy, Rejection

if TYPE_CHECKING:
    from collections.abc import MutableSequence, Sequence

    from transformers import GenerationConfig, PreTrainedModel
    from transformers.cache_utils import Cache

    from dspark_hf.config import DSparkConfig
    from dspark_hf.decode import Decoder
    from dspark_hf.metrics import SpeculationRecord

logger = logging.getLogger(__name__)
_row_ids = itertools.count()
"""Names rows for the process, so that a drafter may serve several models."""


@dataclass
class DSparkGenerateOutput(GenerateDecoderOnlyOutput):
    """Transformers' output with one `SpeculationRecord` per row.

    `scores` and `logits` hold one tensor of shape (B, V) per step; a row's entries behind its own
    end are zeros.

    Attributes:
        speculation: One record per row, in order.
    """

    speculation: list[SpeculationRecord] | None = None


@dataclass(frozen=True)
class Call:
    """A generate() call as Transformers prepared it.

    Attributes:
        input_ids: Expanded prompts, int64 of shape (B, length), left padded.
        processors: Logits processors, in order.
        criteria: Stopping criteria.
        generation_config: Settings of the call.
        streamer: Takes tokens as they are committed; None without one.
        model_kwargs: Keywords of the model's forward, mask and cache among them.
        synced_gpus: Whether ranks must run the same number of forwards.
    """

    input_ids: torch.Tensor
    processors: Sequence[Any]
    criteria: MutableSequence[Any]
    generation_config: GenerationConfig
    streamer: Any
    model_kwargs: dict[str, Any]
    synced_gpus: bool = False

    @property
    def cache(self) -> Cache | None:
        """The cache Transformers prepared or the caller handed in."""
        return compat.cache_of(self.model_kwargs)


def make_rows(model: PreTrainedModel, call: Call, config: DSparkConfig) -> list[Row]:
    """Turn a call's prompts into rows.

    Args:
        model: The target.
        call: The call, found eligible.
        config: Settings of the call.

    Returns:
        list[Row]: One per prompt, in order.
    """
    generation = call.generation_config
    num_rows = call.input_ids.shape[0]
    pads = left_padding(call.input_ids, call.model_kwargs.get("attention_mask"))
    prompts = call.input_ids.tolist()
    keys = _row_keys([p[pad:] for p, pad in zip(prompts, pads, strict=True)], config, generation)
    limit, is_hard = position_limit(model)
    wants = generation.return_dict_in_generate
    rows = []
    for i, (prompt, pad) in enumerate(zip(prompts, pads, strict=True)):
        generator = torch.Generator().manual_seed(keys[i])
        rows.append(
            Row(
                row_id=next(_row_ids),
                ids=prompt[pad:],
                pad=pad,
                pad_ids=prompt[:pad],
                rule=_rule(generation, config, generator, keys[i]),
                processors=RowProcessors.of(call.processors, i, num_rows),
                criteria=RowCriteria(call.criteria, pad),
                generator=generator,
                greedy=not generation.do_sample,
                device=call.input_ids.device,
                limit=limit if is_hard else None,
                max_draft_tokens=config.max_draft_tokens,
                place=i,
                on_token=_streaming(call.streamer),
                scores=[] if wants and generation.output_scores else None,
                logits=[] if wants and generation.output_logits else None,
            )
        )
    return rows


def decode(model: PreTrainedModel, call: Call, rows: Sequence[Row], decoder: Decoder) -> Any:
    """Run rows to their ends and return what generate() returns.

    Args:
        model: The target.
        call: The call.
        rows: From `make_rows`.
        decoder: What to decode with; its target is released here.

    Returns:
        Any: Token ids (B, length), or a `DSparkGenerateOutput` if the call asks for a dict.
    """
    is_callers = compat.is_user_cache(call.cache)
    wants_cache = call.generation_config.return_dict_in_generate or is_callers
    held, held_rows = cached_tokens(call.cache), list(rows)
    is_adopted = held > 0 or (is_callers and len(rows) == 1)
    try:
        if is_adopted:
            decoder.target.adopt(rows[0].row_id, cast("Cache", call.cache), rows[0].ids[:held])
        decoder.start(rows)
        while active := [row for row in held_rows if not row.finished]:
            if not wants_cache:
                held_rows = _release_finished(held_rows, decoder)
            decoder.round(active)
        cache = export_rows(model, call, rows, decoder) if wants_cache else None
    except BaseException:
        if is_adopted:
            _put_right(rows[0], call, decoder)
        raise
    finally:
        # Last slot first: freeing another one moves the last row into it.
        for row in reversed(held_rows):
            decoder.finish(row)
        for row in rows:
            row.record.path = decoder.target.path
    if call.streamer is not None:
        call.streamer.end()
    return output_of(call, rows, cache)


def _release_finished(rows: Sequence[Row], decoder: Decoder) -> list[Row]:
    """Let finished rows leave; return the others."""
    for row in reversed(rows):
        if row.finished:
            decoder.finish(row)
    return [row for row in rows if not row.finished]


def _rule(
    generation: GenerationConfig, config: DSparkConfig, generator: torch.Generator, key: int
) -> AcceptanceRule:
    if not generation.do_sample:
        return Greedy()
    return Coupled(key) if config.acceptance == "coupled" else Rejection(generator)


def _row_keys(
    prompts: Sequence[Sequence[int]], config: DSparkConfig, generation: GenerationConfig
) -> list[int]:
    """Name each row's random stream by seed, prompt and how often the prompt came before.

    So a row draws the same alone and in any batch, and equal prompts draw differently.
    """
    seed = config.seed
    if seed is None:
        seed = int(torch.randint(1 << 62, ())) if generation.do_sample else 0
    seen: Counter[bytes] = Counter()
    keys = []
    for prompt in prompts:
        text = repr((seed, list(prompt))).encode()
        digest = hashlib.blake2b(text + repr(seen[text]).encode(), digest_size=8).digest()
        seen[text] += 1
        keys.append(int.from_bytes(digest, "big") >> 1)
    return keys


def _streaming(streamer: Any) -> Any:
    if streamer is None:
        return None
    return lambda token: streamer.put(torch.tensor([token]))


def export_rows(model: PreTrainedModel, call: Call, rows: Sequence[Row], decoder: Decoder) -> Any:
    """Return the rows' cache as plain decoding leaves it: every token but the newest.

    Args:
        model: The target.
        call: The call; its own cache is filled if there is one.
        rows: Its rows, still held by the decoder's target.
        decoder: What decoded them.

    Returns:
        Any: A cache, or None where the target cannot give one; the log says why.
    """
    cache = call.cache if call.cache is not None else compat.new_cache(model)
    places = [CachedRow(row.row_id, len(row.ids) - 1, row.pad) for row in rows]
    width = max(place.offset + place.length for place in places)
    try:
        return decoder.target.export(places, width, cache)
    except NotImplementedError as error:
        logger.warning("No cache is returned: %s", error)
        return None


def _put_right(row: Row, call: Call, decoder: Decoder) -> None:
    """Take back what a broken-off round left in the caller's own cache: unverified drafts."""
    kept = min(decoder.target.length(row.row_id), len(row.ids) - 1)
    if kept <= 0 or decoder.target.path != "rowwise":
        # A flat target works on a copy: the caller's cache is as it was.
        return
    try:
        decoder.target.export([CachedRow(row.row_id, kept, 0)], kept, cast("Cache", call.cache))
    except Exception:
        logger.exception("The cache handed to this call could not be put right; start a new one.")


def output_of(call: Call, rows: Sequence[Row], cache: Cache | None) -> Any:
    """Return what generate() returns for finished rows.

    Args:
        call: The call.
        rows: Its rows.
        cache: From `export_rows`, for a dict output.
    """
    device, generation = call.input_ids.device, call.generation_config
    num_steps = max(row.num_new_tokens for row in rows)
    pad = generation._pad_token_tensor  # noqa: SLF001 - where generate() keeps the prepared value
    fill = 0 if pad is None else int(pad)
    new = torch.full((len(rows), num_steps), fill, dtype=torch.long, device=device)
    for i, row in enumerate(rows):
        new[i, : row.num_new_tokens] = torch.tensor(row.ids[row.num_prompt_tokens :], device=device)
    sequences = torch.cat([call.input_ids, new], dim=-1)
    if not generation.return_dict_in_generate:
        return sequences
    return DSparkGenerateOutput(
        sequences=sequences,
        scores=_per_step([row.scores for row in rows], num_steps),
        logits=_per_step([row.logits for row in rows], num_steps),
        speculation=[row.record for row in rows],
        **{compat.OUTPUT_CACHE_NAME: cache},
    )


def _per_step(
    by_row: Sequence[list[torch.Tensor] | None], num_steps: int
) -> tuple[torch.Tensor, ...] | None:
    lists = [entries for entries in by_row if entries is not None]
    if not lists:
        return None
    blank = torch.zeros_like(lists[0][0])
    return tuple(
        torch.stack([entries[t] if t < len(entries) else blank for entries in lists])
        for t in range(num_steps)
    )
