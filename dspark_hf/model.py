"""DSparkForCausalLM: takes over a Transformers model's generate() by swapping its class."""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMode

from dspark_hf import generation
from dspark_hf.assist import assistant_drafter, can_assist, unsafe_for_assisting
from dspark_hf.config import DSparkConfig
from dspark_hf.drafting.resolve import resolve_drafter
from dspark_hf.eligibility import inputs_refusal, settings_refusal
from dspark_hf.errors import ConfigError
from dspark_hf.handle import DSparkHandle
from dspark_hf.inputs import check_inputs
from dspark_hf.metrics import SpeculationRecord
from dspark_hf.processing import RowProcessors, refusal

if TYPE_CHECKING:
    from dspark_hf.drafting.base import Drafter

_call_config: ContextVar[DSparkConfig | None] = ContextVar("dspark_call_config", default=None)


class DSparkForCausalLM:
    """Mixin put before a model's own class: same weights, same generate(), sooner.

    Never instantiated itself: `from_pretrained` loads a model and `wrap` takes one, both by
    class swap, so `isinstance` holds for this class and for the model's own.
    """

    @classmethod
    def from_pretrained(
        cls,
        target: str,
        *args: Any,
        drafter: Any = "lookup",
        config: DSparkConfig | None = None,
        tokenizer: Any = None,
        drafter_tokenizer: Any = None,
        **hf_kwargs: Any,
    ) -> Any:
        """Load a causal LM and wrap it.

        Args:
            target: Path or hub id, as for AutoModelForCausalLM.
            *args: Positional arguments of AutoModelForCausalLM.from_pretrained.
            drafter: None, "lookup", a path or hub id, a model, or a Drafter object.
            config: Settings; defaults when None. (A Transformers configuration goes to
                `hf_config`.)
            tokenizer: The target's tokenizer, to compare with a drafting model's.
            drafter_tokenizer: The drafting model's.
            **hf_kwargs: Keywords of AutoModelForCausalLM.from_pretrained.

        Returns:
            Any: The model, an instance of its own class and of this one.

        Raises:
            ConfigError: If `config` or `drafter` is not what it must be.
            CheckpointError: If the drafter does not fit the target.
        """
        if cls is not DSparkForCausalLM:
            # Transformers calls type(model).from_pretrained; that means the model's own class.
            return cls.__mro__[2].from_pretrained(target, *args, config=config, **hf_kwargs)  # type: ignore[attr-defined]
        if isinstance(config, PreTrainedConfig):
            raise ConfigError(
                f"config must be a DSparkConfig; got {type(config).__name__}. Pass a Transformers "
                "configuration as hf_config=."
            )
        if "hf_config" in hf_kwargs:
            hf_kwargs["config"] = hf_kwargs.pop("hf_config")
        model = AutoModelForCausalLM.from_pretrained(target, *args, **hf_kwargs)
        return cls.wrap(
            model,
            drafter=drafter,
            config=config,
            tokenizer=tokenizer,
            drafter_tokenizer=drafter_tokenizer,
        )

    @staticmethod
    def wrap(
        model: Any,
        drafter: Any = "lookup",
        config: DSparkConfig | None = None,
        *,
        tokenizer: Any = None,
        drafter_tokenizer: Any = None,
    ) -> Any:
        """Take over a loaded model's generate(), in place.

        Args:
            model: A causal LM; wrapping it again replaces drafter and settings.
            drafter: As in `from_pretrained`.
            config: Settings; defaults when None.
            tokenizer: The target's tokenizer, to compare with a drafting model's.
            drafter_tokenizer: The drafting model's.

        Returns:
            Any: The same object.

        Raises:
            ConfigError: If an argument is not what it must be.
            CheckpointError: If the drafter does not fit the target.
        """
        if not isinstance(model, PreTrainedModel) or not model.can_generate():
            raise ConfigError(
                f"model must be a Transformers causal LM; got {type(model).__name__}. Load it with "
                "AutoModelForCausalLM, or wrap the model inside an adapter."
            )
        settings = DSparkConfig() if config is None else config
        if not isinstance(settings, DSparkConfig):
            raise ConfigError(f"config must be a DSparkConfig or None; got {settings!r}.")
        ready = resolve_drafter(drafter, model, tokenizer, drafter_tokenizer)
        if not isinstance(model, DSparkForCausalLM):
            model.__class__ = _swapped(cast("Any", type(model)))
        vars(model)["_dspark"] = DSparkHandle(model, settings, ready)
        return model

    @staticmethod
    def unwrap(model: Any) -> Any:
        """Give a wrapped model its own class back.

        Args:
            model: A wrapped model; any other is returned as it is.

        Returns:
            Any: The same object, as it was before `wrap`.
        """
        if isinstance(model, DSparkForCausalLM):
            vars(model).pop("_dspark", None)
            model.__class__ = type(model).__mro__[2]
        return model

    @property
    def dspark(self) -> DSparkHandle:
        """Settings, drafter, measurements and statistics of this model."""
        if "_dspark" not in vars(self):
            model = cast("PreTrainedModel", self)
            vars(self)["_dspark"] = DSparkHandle(model, DSparkConfig(), None)
        return cast("DSparkHandle", vars(self)["_dspark"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as the model's own class, swapped again on arrival."""
        return _rebuild, (type(self).__mro__[2],), vars(self)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move the model, and a drafting model with it."""
        moved = super().to(*args, **kwargs)  # type: ignore[misc]
        drafting_model = getattr(self.dspark.drafter, "model", None)
        if isinstance(drafting_model, PreTrainedModel):
            drafting_model.to(*args, **kwargs)
        return moved

    def generate(self, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Generate as the model's own class does; `dspark=` overrides the settings of this call.

        Args:
            inputs: Prompts, int64 of shape (B, length), left padded.
            *args: Positional arguments of Transformers' generate().
            **kwargs: Its keywords, and `dspark`, a DSparkConfig.

        Returns:
            Any: What generate() returns; a dict output also has `speculation`, one record a row.

        Raises:
            ConfigError: If `dspark` is not a DSparkConfig.
            InputError: If a prompt is empty or holds an id the model does not know.
            CapacityError: If a prompt or its continuation cannot fit the model's positions.
        """
        settings = kwargs.pop("dspark", None)
        if settings is not None and not isinstance(settings, DSparkConfig):
            raise ConfigError(f"dspark must be a DSparkConfig; got {settings!r}.")
        check_inputs(cast("PreTrainedModel", self), inputs, kwargs)
        token = _call_config.set(settings or _call_config.get())
        try:
            return super().generate(inputs, *args, **kwargs)  # type: ignore[misc]
        finally:
            _call_config.reset(token)

    def _validate_generation_mode(self, mode: Any, config: Any, mode_kwargs: Any) -> None:
        if mode == GenerationMode.ASSISTED_GENERATION and can_assist(self, config, mode_kwargs):
            return
        super()._validate_generation_mode(mode, config, mode_kwargs)  # type: ignore[misc]

    def _sample(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        own = functools.partial(
            super()._sample,  # type: ignore[misc]
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            synced_gpus,
            streamer,
            **model_kwargs,
        )
        call = generation.Call(
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            streamer,
            model_kwargs,
        )
        return self._decode_call(call, self.dspark.drafter, own, synced_gpus=synced_gpus)

    def _assisted_decoding(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        inputs_tensor: Any = None,
        assistant_model: Any = None,
        assistant_tokenizer: Any = None,
        tokenizer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        prepared = (
            input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer
        )  # fmt: skip
        assist = {"assistant_model": assistant_model, "assistant_tokenizer": assistant_tokenizer}
        drafter = assistant_drafter(self, generation_config, tokenizer=tokenizer, **assist)
        call = generation.Call(
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            streamer,
            model_kwargs,
        )
        if drafter is None:
            problem = unsafe_for_assisting(call)
            if problem is None:
                self.dspark.warn_once(
                    "Only Transformers' own loop knows how this call is assisted; it runs there."
                )
                return super()._assisted_decoding(  # type: ignore[misc]
                    *prepared, inputs_tensor, tokenizer=tokenizer, **assist, **model_kwargs
                )
            self.dspark.warn_once(
                f"The assistant of this call is ignored: Transformers' assisted loop is not exact "
                f"with {problem}."
            )
            drafter = self.dspark.drafter
        own = functools.partial(super()._sample, *prepared, **model_kwargs)  # type: ignore[misc]
        return self._decode_call(call, drafter, own, synced_gpus=synced_gpus)

    def _decode_call(
        self, call: generation.Call, drafter: Drafter | None, own: Any, *, synced_gpus: bool
    ) -> Any:
        """Decode a prepared call here, or in the model's own loop with one line saying why."""
        handle, model = self.dspark, cast("PreTrainedModel", self)
        config = _call_config.get() or handle.config
        batch_size, max_length = call.input_ids.shape[0], call.generation_config.max_length
        with handle.lock:
            reason = (
                settings_refusal(
                    model,
                    call.generation_config,
                    batch_size,
                    synced_gpus=synced_gpus,
                    streamer=call.streamer,
                )
                or refusal(call.processors, call.criteria, batch_size)
                or inputs_refusal(model, call.input_ids, call.model_kwargs, max_length)
                or _target_refusal(handle, config, call)
            )
            if reason is not None:
                handle.metrics.count_fallback(reason)
                handle.warn_once(f"This call runs in the model's own loop: {reason}.")
                return _with_records(own(), call.input_ids)
            decoder = handle.decoder(
                drafter,
                config,
                max_length or call.input_ids.shape[1],
                prefill_tokens=call.generation_config.prefill_chunk_size,
            )
            rows = generation.make_rows(model, call, config)
            output = generation.decode(model, call, rows, decoder)
            handle.metrics.add([row.record for row in rows])
        return output


@functools.cache
def _swapped(base: Any) -> Any:
    """Return the wrapped form of a model class, under the same name and module."""
    return type(base.__name__, (DSparkForCausalLM, base), {"__module__": base.__module__})


def _rebuild(base: Any) -> Any:
    cls = _swapped(base)
    return cls.__new__(cls)


def _target_refusal(
    handle: DSparkHandle, config: DSparkConfig, call: generation.Call
) -> str | None:
    choice = handle.target_choice()
    if choice.path is None:
        return f"drafts cannot be verified exactly ({choice.reason})"
    if choice.path == "rowwise" and call.input_ids.shape[0] > 1 and config.never_slower:
        return (
            "several rows of this architecture would run one by one, slower than in one batch; "
            "never_slower=False speculates all the same"
        )
    recheck = config.exactness == "recheck" and not call.generation_config.do_sample
    if recheck and not RowProcessors.of(call.processors, 0, 1).is_stateless:
        return 'exactness="recheck" asks processors twice, and one of them may keep state'
    return None


def _with_records(output: Any, input_ids: torch.Tensor) -> Any:
    if not isinstance(output, torch.Tensor):
        new = output["sequences"].shape[1] - input_ids.shape[1]
        output.speculation = [
            SpeculationRecord(path="transformers", new_tokens=new) for _ in range(len(input_ids))
        ]
    return output
