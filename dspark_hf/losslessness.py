"""Self-tests of losslessness: does a wrapped model say what the same model says unwrapped?

Greedy text is compared token by token, sampled text by a chi-square test against the exact
distribution. `dspark-hf verify` prints both for a user's own model, drafter and settings.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteria

from dspark_hf.errors import ConfigError, InputError
from dspark_hf.metrics import SpeculationRecord
from dspark_hf.model import DSparkForCausalLM

NEAR_TIE = 0.1
"""Margin in logit units below which a difference counts as rounding, in 16 bits."""
NEAR_TIE_FLOAT32 = 1e-3
"""The same in float32, where rounding of logits is about 1e-5."""
NEAR_TIE_SPACINGS = 2
"""In 16 bits also this many steps between neighbouring values count as rounding: in bfloat16 scores
from 16 to 32 are 0.125 apart, so that two that differ by one step differ by more than 0.1."""
MIN_EXPECTED = 5.0
"""Least expected count of a bin, the usual condition of the chi-square approximation."""
SIGNIFICANCE = 1e-4
"""p-value under which sampled tokens count as differently distributed."""
SAMPLED_TOKENS = 3
"""New tokens per sample: the prompt's own, the one a draft is verified for, and the bonus."""

Encoded = torch.Tensor | Sequence[int]
"""One prompt's token ids: a list, or int64 of shape (length,) or (1, length)."""


@dataclass(frozen=True)
class Fork:
    """Where two greedy texts part.

    Attributes:
        index: First differing place among the new tokens, from 0.
        plain_token: The unwrapped model's token there; the padding id if its text had ended.
        token: The wrapped model's.
        margin: How much higher the unwrapped model scored its own token, in logit units after the
            processors; infinite if they ruled the other one out.
        margin_limit: Largest margin that rounding explains, in the same units.
    """

    index: int
    plain_token: int
    token: int
    margin: float
    margin_limit: float

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains the difference."""
        return abs(self.margin) <= self.margin_limit


@dataclass(frozen=True)
class GreedyResult:
    """One prompt's comparison.

    Attributes:
        plain_ids: New tokens of the unwrapped model, as generate() returns them.
        ids: New tokens of the wrapped model.
        fork: Where they part; None when they are equal.
        record: What speculation did for this prompt; its path tells whether it took part at all.
    """

    plain_ids: tuple[int, ...]
    ids: tuple[int, ...]
    fork: Fork | None
    record: SpeculationRecord

    @property
    def verdict(self) -> str:
        """Return "equal", "near-tie" (they part within rounding) or "different"."""
        if self.fork is None:
            return "equal"
        return "near-tie" if self.fork.is_near_tie else "different"


@dataclass(frozen=True)
class SamplingResult:
    """How well sampled tokens fit the exact distribution.

    Attributes:
        first_token: The commonest first token; only samples that begin with it are tested.
        num_samples: Samples drawn.
        num_tested: Samples that begin with `first_token`.
        verified: Draft tokens verified in those.
        accepted: Draft tokens accepted in those.
        statistic: Chi-square of the second token's counts.
        df: Its degrees of freedom.
        p_value: Probability of a statistic this large if nothing is wrong.
        path: Which target ran, as in `SpeculationRecord`.
    """

    first_token: int
    num_samples: int
    num_tested: int
    verified: int
    accepted: int
    statistic: float
    df: int
    p_value: float
    path: str

    @property
    def verdict(self) -> str:
        """Return "consistent", "different", or "inconclusive" where nothing was tested."""
        if self.verified == 0 or self.df == 0:
            return "inconclusive"
        return "different" if self.p_value < SIGNIFICANCE else "consistent"


@contextmanager
def unwrapped(model: Any) -> Iterator[Any]:
    """Give a wrapped model its own class back for a while; what it has learned is kept.

    Args:
        model: A wrapped model.

    Yields:
        Any: The same object, whose generate() is Transformers' own.

    Raises:
        ConfigError: If the model is not wrapped.
    """
    _check_wrapped(model)
    wrapped_class, handle = type(model), model.dspark
    DSparkForCausalLM.unwrap(model)
    try:
        yield model
    finally:
        model.__class__ = wrapped_class
        vars(model)["_dspark"] = handle


def margin_limit(dtype: torch.dtype, score: float) -> float:
    """Return the largest margin between two scores that rounding alone can turn around.

    Args:
        dtype: Type the model computes in.
        score: The better of the two scores.

    Returns:
        float: In logit units.
    """
    if dtype in (torch.float32, torch.float64):
        return NEAR_TIE_FLOAT32
    if not math.isfinite(score):
        return NEAR_TIE
    exponent = math.floor(math.log2(max(abs(score), 1.0)))
    return max(NEAR_TIE, NEAR_TIE_SPACINGS * torch.finfo(dtype).eps * 2.0**exponent)


def greedy_check(
    model: Any,
    inputs: Sequence[Encoded],
    max_new_tokens: int,
    *,
    batch_size: int = 1,
    **generate_kwargs: Any,
) -> list[GreedyResult]:
    """Compare a wrapped model's greedy text with that of the same object unwrapped.

    Both run the same batches with the same arguments, so that nothing but speculation differs.

    Args:
        model: A wrapped model.
        inputs: Encoded prompts.
        max_new_tokens: Most tokens generated per prompt, at least 1.
        batch_size: Prompts per call, left padded.
        **generate_kwargs: Further keywords of generate(), such as `repetition_penalty`.

    Returns:
        list[GreedyResult]: One per prompt, in order.

    Raises:
        ConfigError: If the model is not wrapped.
        InputError: If a prompt has no tokens.

    Cost: each prompt is generated twice; a batch with a difference a third time, up to it.
    """
    _check_wrapped(model)
    prompts = [_as_list(ids) for ids in inputs]
    kwargs: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "do_sample": False,
        "return_dict_in_generate": True,
        "pad_token_id": _pad_id(model),
        **generate_kwargs,
    }
    results = []
    for start in range(0, len(prompts), batch_size):
        batch = _left_padded(prompts[start : start + batch_size], kwargs["pad_token_id"], model)
        results += _compare_batch(model, batch, kwargs)
    return results


def find_forks(
    model: Any,
    batch: Mapping[str, torch.Tensor],
    plain: Sequence[Sequence[int]],
    ours: Sequence[Sequence[int]],
    kwargs: Mapping[str, Any],
) -> list[Fork | None]:
    """Return where greedy texts of a batch part, and how close a call it was there.

    Args:
        model: A wrapped model.
        batch: `input_ids` and `attention_mask` of the prompts, int64 of shape (B, longest).
        plain: New tokens of each row, from the unwrapped model.
        ours: The same from the wrapped one.
        kwargs: The call's other keywords; `pad_token_id` among them.

    Returns:
        list[Fork | None]: One per row; None where the texts are equal.

    Cost: nothing if all are equal; else the unwrapped model runs again, up to the last fork.
    """
    places = [_first_difference(one, other) for one, other in zip(plain, ours, strict=True)]
    last = max((place for place in places if place is not None), default=None)
    if last is None:
        return [None] * len(places)
    scores = _plain_scores(model, batch, kwargs, last + 1)
    forks: list[Fork | None] = []
    for row, place in enumerate(places):
        if place is None:
            forks.append(None)
            continue
        token, other = (
            ids[row][place] if place < len(ids[row]) else kwargs["pad_token_id"]
            for ids in (plain, ours)
        )
        best = float(scores[place][row, token])
        margin = best - float(scores[place][row, other])
        forks.append(Fork(place, token, other, margin, margin_limit(model.dtype, best)))
    return forks


def sampling_check(
    model: Any,
    input_ids: Encoded,
    num_samples: int = 400,
    seed: int = 0,
    *,
    batch_size: int = 50,
    **generate_kwargs: Any,
) -> SamplingResult:
    """Compare sampled second tokens with their exact probabilities by a chi-square test.

    The samples that begin with the commonest first token share one prefix, so the second token has
    one known distribution: that of the unwrapped model after this prefix, with the same processors.
    It is also the token a draft is verified for. Whatever schedule is set, every draft is verified
    here, as a draft that is not cannot show a fault.

    Args:
        model: A wrapped model with a drafter.
        input_ids: An encoded prompt; a short one, as every sample reads it anew.
        num_samples: Samples drawn.
        seed: Seed of the samples; torch's global generator is used only to ask the plain model.
        batch_size: Samples per call.
        **generate_kwargs: Further keywords of generate(), such as `temperature`; not those that
            count new tokens, as the exact probabilities are asked for one token later.

    Returns:
        SamplingResult: With verdict "inconclusive" if no draft was verified.

    Raises:
        ConfigError: If the model is not wrapped.
        InputError: If the prompt has no tokens.

    Cost: `num_samples` prompts and three tokens each.
    Source: Pearson's chi-square test; bins of small expectation are pooled.
    """
    _check_wrapped(model)
    prompt = _as_list(input_ids)
    kwargs = {"do_sample": True, "return_dict_in_generate": True, **generate_kwargs}
    kwargs.setdefault("pad_token_id", _pad_id(model))
    config = dataclasses.replace(model.dspark.config, schedule="fixed", never_slower=False)
    batch = _left_padded([prompt], kwargs["pad_token_id"], model)
    samples: list[tuple[tuple[int, ...], SpeculationRecord]] = []
    for start in range(0, num_samples, batch_size):
        output = model.generate(
            **batch,
            **kwargs,
            max_new_tokens=SAMPLED_TOKENS,
            num_return_sequences=min(batch_size, num_samples - start),
            dspark=dataclasses.replace(config, seed=seed * num_samples + start),
        )
        new = output.sequences[:, len(prompt) :].tolist()
        samples += zip(map(tuple, new), _records(output, len(new)), strict=True)
    ends = end_ids(model, kwargs)
    first_tokens = Counter(ids[0] for ids, _ in samples if ids[0] not in ends and len(ids) > 1)
    if not first_tokens:
        path = samples[0][1].path
        return SamplingResult(samples[0][0][0], num_samples, 0, 0, 0, 0.0, 0, 1.0, path)
    first = first_tokens.most_common(1)[0][0]
    tested = [(ids, record) for ids, record in samples if ids[0] == first]
    probs = _next_token_probs(model, [*prompt, first], kwargs)
    counts = torch.bincount(torch.tensor([ids[1] for ids, _ in tested]), minlength=len(probs))
    statistic, df = chi_square(counts, probs)
    p_value = float(torch.special.gammaincc(_double(max(df, 1) / 2), _double(statistic / 2)))
    return SamplingResult(
        first_token=first,
        num_samples=num_samples,
        num_tested=len(tested),
        verified=sum(record.verified for _, record in tested),
        accepted=sum(record.accepted for _, record in tested),
        statistic=statistic,
        df=df,
        p_value=p_value if df else 1.0,
        path=tested[0][1].path,
    )


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> tuple[float, int]:
    """Compare counts with probabilities, pooling what is expected too rarely to tell.

    Args:
        counts: How often each outcome was seen, of shape (V,).
        probs: Its exact probability, of shape (V,).

    Returns:
        tuple[float, int]: The statistic and its degrees of freedom, 0 when only one bin is left.
    """
    expected = probs.double() * counts.sum()
    common = expected >= MIN_EXPECTED
    bins = list(zip(counts[common].tolist(), expected[common].tolist(), strict=True))
    bins.sort(key=lambda bin_: -bin_[1])
    rest = (int(counts[~common].sum()), float(expected[~common].sum()))
    # A rest too small to stand alone joins the smallest bin, so that nothing seen is left out.
    if bins and rest[1] < MIN_EXPECTED:
        seen, hoped = bins.pop()
        rest = (seen + rest[0], hoped + rest[1])
    bins.append(rest)
    if len(bins) == 1:
        return 0.0, 0
    return sum((seen - hoped) ** 2 / hoped for seen, hoped in bins), len(bins) - 1


def end_ids(model: Any, kwargs: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end a text in a call with these keywords."""
    value = kwargs.get("eos_token_id", model.generation_config.eos_token_id)
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first index at which two texts differ, by an earlier end too; None if nowhere."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def _compare_batch(
    model: Any, batch: dict[str, torch.Tensor], kwargs: dict[str, Any]
) -> list[GreedyResult]:
    output = model.generate(**batch, **kwargs)
    with unwrapped(model):
        plain_output = model.generate(**batch, **kwargs)
    width = batch["input_ids"].shape[1]
    ours, plain = (out.sequences[:, width:].tolist() for out in (output, plain_output))
    forks = find_forks(model, batch, plain, ours, kwargs)
    return [
        GreedyResult(tuple(one), tuple(other), fork, record)
        for one, other, fork, record in zip(
            plain, ours, forks, _records(output, len(ours)), strict=True
        )
    ]


def _plain_scores(
    model: Any, batch: Mapping[str, torch.Tensor], kwargs: Mapping[str, Any], num_steps: int
) -> Sequence[torch.Tensor]:
    """Run the unwrapped model's own steps again and return what it chose by, each of (B, V)."""
    stop = _StopAfter(batch["input_ids"].shape[1] + num_steps)
    criteria = [*(kwargs.get("stopping_criteria") or ()), stop]
    with unwrapped(model):
        output = model.generate(
            **batch,
            **{
                **kwargs,
                "return_dict_in_generate": True,
                "output_scores": True,
                "stopping_criteria": criteria,
            },
        )
    scores: Sequence[torch.Tensor] = output.scores
    return scores


class _StopAfter(StoppingCriteria):
    """Stops at a length and leaves `max_length`, which processors may read, alone."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        is_met = input_ids.shape[1] >= self.length
        return torch.full((input_ids.shape[0],), is_met, device=input_ids.device)


def _next_token_probs(model: Any, prefix: list[int], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the unwrapped model's processed distribution after a prefix, float64 of (V,)."""
    batch = _left_padded([prefix], kwargs["pad_token_id"], model)
    with unwrapped(model):
        output = model.generate(**batch, **kwargs, max_new_tokens=1, output_scores=True)
    return torch.softmax(output.scores[0][0].double(), dim=-1).cpu()


def _check_wrapped(model: Any) -> None:
    if not isinstance(model, DSparkForCausalLM):
        raise ConfigError(
            f"model must be wrapped; got a plain {type(model).__name__}. Pass it to "
            "DSparkForCausalLM.wrap first."
        )


def _records(output: Any, num_rows: int) -> list[SpeculationRecord]:
    """Return a record per row; searches that Transformers runs itself leave none."""
    records: list[SpeculationRecord] | None = getattr(output, "speculation", None)
    return records or [SpeculationRecord(path="transformers") for _ in range(num_rows)]


def _as_list(ids: Encoded) -> list[int]:
    row = torch.as_tensor(ids).flatten().tolist()
    if not row:
        raise InputError("a prompt must hold at least one token; got none. Remove it.")
    return [int(token) for token in row]


def _left_padded(prompts: Sequence[Sequence[int]], pad_id: int, model: Any) -> dict[str, Any]:
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), pad_id)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, longest - len(prompt) :] = torch.tensor(prompt)
        mask[i, longest - len(prompt) :] = 1
    return {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}


def _pad_id(model: Any) -> int:
    pad = model.generation_config.pad_token_id
    return int(pad if pad is not None else next(iter(end_ids(model, {})), 0))


def _double(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)
