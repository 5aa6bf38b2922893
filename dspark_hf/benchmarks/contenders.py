"""Contenders: ways to call generate() that share one set of weights."""

from __future__ import annotations

import copy
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from transformers import PreTrainedModel

from dspark_hf.config import DSparkConfig
from dspark_hf.errors import CheckpointError
from dspark_hf.model import DSparkForCausalLM

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

PLAIN = "plain"
"""Name of the baseline: Transformers' generate() on the model's own class."""
HF_LOOKUP_TOKENS = 10
"""Draft length of Transformers' prompt lookup, the value its documentation uses."""


@dataclass(frozen=True)
class Contender:
    """A model and the keywords it generates with.

    Attributes:
        name: As in tables: `plain`, `hf-...` for Transformers' own means, `dspark-...` for ours.
        model: Plain or wrapped.
        options: Keywords of every generate() call.
    """

    name: str
    model: PreTrainedModel
    options: Mapping[str, Any] = field(default_factory=dict)

    def generate(self, inputs: Mapping[str, torch.Tensor], **kwargs: Any) -> Any:
        """Decode, greedily unless the options say otherwise.

        Args:
            inputs: `input_ids` and `attention_mask`, both int64 of shape (B, length).
            **kwargs: Keywords of generate().

        Returns:
            Any: What generate() returns.
        """
        return self.model.generate(**inputs, **{"do_sample": False, **self.options, **kwargs})


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model's modules and configurations but none of its weights.

    Args:
        model: The model, not wrapped.

    Returns:
        PreTrainedModel: Another object over the same storage; no class swap, setting or attention
        choice of one is seen by the other.

    Raises:
        CheckpointError: If some weight was copied after all.
    """
    tensors = [*model.parameters(), *model.buffers()]
    # deepcopy returns what its memo holds instead of copying it.
    made = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    if not shares_weights(model, made):
        raise CheckpointError(
            f"contenders must share their weights; copying {type(model).__name__} made new ones. "
            "Benchmark a model whose parameters and buffers are all registered."
        )
    return made


def shares_weights(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    """Tell whether every parameter and buffer of two models lies in the same storage."""
    mine, theirs = _pointers(one), _pointers(other)
    return bool(mine) and mine == theirs


def _pointers(model: PreTrainedModel) -> dict[str, int]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.untyped_storage().data_ptr() for name, tensor in named}


def wrapped(
    model: PreTrainedModel,
    name: str,
    drafter: Any,
    config: DSparkConfig | None = None,
    tokenizer: Any = None,
) -> Contender:
    """Make a contender of this package, with a twin and thus measurements of its own.

    Step costs start from the machine's stored profile, which is measured here if there is none.

    Args:
        model: The plain model.
        name: The contender's name.
        drafter: As in `DSparkForCausalLM.wrap`.
        config: Settings; defaults when None.
        tokenizer: The target's.

    Returns:
        Contender: Ready to warm up.
    """
    wrapped_model = DSparkForCausalLM.wrap(twin(model), drafter, config, tokenizer=tokenizer)
    if drafter is not None:
        cast("Any", wrapped_model).dspark.ensure_profile()
    return Contender(name, wrapped_model)


def prompt_contenders(
    model: PreTrainedModel, drafter: str | None = None, tokenizer: Any = None
) -> list[Contender]:
    """Return everyone who can decode a single prompt, the baseline first.

    Args:
        model: The plain model.
        drafter: Path or hub id of a drafter to measure as well.
        tokenizer: The target's.

    Returns:
        list[Contender]: `hf-assisted` is among them if the drafter is a model Transformers can use.
    """
    own = batch_contenders(model, drafter, tokenizer)
    transformers = [Contender("hf-lookup", model, {"prompt_lookup_num_tokens": HF_LOOKUP_TOKENS})]
    if drafter is not None:
        drafting_model = getattr(cast("Any", own[-1].model).dspark.drafter, "model", None)
        if isinstance(drafting_model, PreTrainedModel) and drafting_model.can_generate():
            options = {"assistant_model": twin(drafting_model)}
            transformers.append(Contender("hf-assisted", model, options))
    return [own[0], *transformers, *own[1:]]


def batch_contenders(
    model: PreTrainedModel, drafter: str | None = None, tokenizer: Any = None
) -> list[Contender]:
    """Return everyone who can decode a batch: Transformers speculates on single prompts only.

    Args:
        model: The plain model.
        drafter: Path or hub id of a drafter to measure as well.
        tokenizer: The target's.

    Returns:
        list[Contender]: The baseline first, the drafter's last.
    """
    contenders = [*context_contenders(model), wrapped(model, "dspark-lookup", "lookup")]
    if drafter is not None:
        name = f"dspark:{Path(drafter).name}"
        contenders.append(wrapped(model, name, drafter, tokenizer=tokenizer))
    return contenders


def context_contenders(model: PreTrainedModel) -> list[Contender]:
    """Return the baseline and the wrapper without a drafter."""
    return [Contender(PLAIN, model), wrapped(model, "dspark-none", None)]


def recheck_contenders(model: PreTrainedModel) -> list[Contender]:
    """Return the baseline, the wrapper alone, and lookup without and with rechecks.

    Without a drafter nothing is verified in blocks: its forks come from the packed attention.
    """
    recheck = DSparkConfig(exactness="recheck")
    return [
        *context_contenders(model),
        wrapped(model, "dspark-lookup", "lookup"),
        wrapped(model, "dspark-lookup-recheck", "lookup", recheck),
    ]


@contextmanager
def endless(contenders: Sequence[Contender]) -> Iterator[None]:
    """Let no text end before its length limit, for every contender in the same way."""
    with ExitStack() as stack:
        for config in {id(c.model): c.model.generation_config for c in contenders}.values():
            stack.callback(setattr, config, "eos_token_id", config.eos_token_id)
            config.eos_token_id = None
        yield
