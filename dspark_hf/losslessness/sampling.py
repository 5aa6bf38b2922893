"""Sampled tokens, compared with their exact distribution."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dspark_hf.losslessness.sides import (
    Encoded,
    check_wrapped,
    end_ids,
    left_padded,
    pad_id,
    records_of,
    token_list,
    unwrapped,
)

if TYPE_CHECKING:
    from dspark_hf.metrics import SpeculationRecord

MIN_EXPECTED = 5.0
"""Least expected count of a bin, the usual condition of the chi-square approximation."""
SIGNIFICANCE = 1e-4
"""p-value under which sampled tokens count as differently distributed."""
SAMPLED_TOKENS = 3
"""New tokens per sample: the prompt's own, the one a draft is verified for, and the bonus."""


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
    check_wrapped(model)
    prompt = token_list(input_ids)
    kwargs = {"do_sample": True, "return_dict_in_generate": True, **generate_kwargs}
    kwargs.setdefault("pad_token_id", pad_id(model))
    config = dataclasses.replace(model.dspark.config, schedule="fixed", never_slower=False)
    batch = left_padded([prompt], kwargs["pad_token_id"], model)
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
        samples += zip(map(tuple, new), records_of(output, len(new)), strict=True)
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


def _next_token_probs(model: Any, prefix: list[int], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the unwrapped model's processed distribution after a prefix, float64 of (V,)."""
    batch = left_padded([prefix], kwargs["pad_token_id"], model)
    with unwrapped(model):
        output = model.generate(**batch, **kwargs, max_new_tokens=1, output_scores=True)
    return torch.softmax(output.scores[0][0].double(), dim=-1).cpu()


def _double(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)
