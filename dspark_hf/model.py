"""DSparkForCausalLM: takes over a Transformers model's generate() by swapping its class."""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast

from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMode

from dspark_hf import takeover
from dspark_hf.assist import (
    assistant_drafter,
    can_assist,
    unsafe_for_assisting,
    with_lookup_length,
)
from dspark_hf.config import DSparkConfig
from dspark_hf.drafting.resolve import resolve_drafter
from dspark_hf.errors import ConfigError
from dspark_hf.generation import Call
from dspark_hf.handle import DSparkHandle
from dspark_hf.inputs import check_inputs

if TYPE_CHECKING:
    import torch

    from dspark_hf.drafting.base import Drafter

_call_settings: ContextVar[tuple[Any, DSparkConfig | None]] = ContextVar(
    "dspark_call_settings", default=(None, None)
)
"""The model whose generate() runs and the settings that call brought."""


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
        if isinstance(drafting_model, PreTrainedModel) and drafting_model is not self:
            # By the plain method: two models may draft for each other.
            PreTrainedModel.to(drafting_model, *args, **kwargs)
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
        running, outer = _call_settings.get()
        # Token healing calls generate() from within: the outer call's settings hold there too.
        inherited = outer if running is self and settings is None else settings
        token = _call_settings.set((self, inherited))
        try:
            return super().generate(inputs, *args, **kwargs)  # type: ignore[misc]
        finally:
            _call_settings.reset(token)

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
        prepared = (input_ids, logits_processor, stopping_criteria, generation_config)
        call = Call(*prepared, streamer, model_kwargs, synced_gpus)
        return self._decode(call, self._settings(), self.dspark.drafter)

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
        prepared = (input_ids, logits_processor, stopping_criteria, generation_config)
        call = Call(*prepared, streamer, model_kwargs, synced_gpus)
        assist = {
            "assistant_model": assistant_model,
            "assistant_tokenizer": assistant_tokenizer,
            "tokenizer": tokenizer,
        }
        drafter = assistant_drafter(self, generation_config, **assist)
        if drafter is not None:
            settings = with_lookup_length(self._settings(), generation_config)
            return self._decode(call, settings, drafter)
        problem = unsafe_for_assisting(call)
        if problem is not None:
            self.dspark.warn_once(
                f"The assistant of this call is ignored: Transformers' assisted loop is not exact "
                f"with {problem}."
            )
            return self._decode(call, self._settings(), self.dspark.drafter)
        assisted = functools.partial(
            super()._assisted_decoding,  # type: ignore[misc]
            *prepared,
            synced_gpus,
            streamer,
            inputs_tensor,
            **assist,
            **model_kwargs,
        )
        reason = "only Transformers knows how this call is assisted"
        return takeover.run_own_loop(self.dspark, self._settings(), reason, call, assisted)

    def _beam_search(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        prepared = (input_ids, logits_processor, stopping_criteria, generation_config)
        beams = functools.partial(super()._beam_search, *prepared, *args, **kwargs)  # type: ignore[misc]
        call = Call(*prepared, None, kwargs)
        return takeover.run_own_loop(self.dspark, self._settings(), "beam search", call, beams)

    def _decode(self, call: Call, settings: DSparkConfig, drafter: Drafter | None) -> Any:
        """Decode a call here, or by the class's own sampling loop where that is right."""
        own = functools.partial(
            super()._sample,  # type: ignore[misc]
            call.input_ids,
            call.processors,
            call.criteria,
            call.generation_config,
            call.synced_gpus,
            call.streamer,
            **call.model_kwargs,
        )
        return takeover.decode_call(self.dspark, settings, call, drafter, own)

    def _settings(self) -> DSparkConfig:
        """Return the settings of the running call: its own, else the model's."""
        model, settings = _call_settings.get()
        return settings if model is self and settings is not None else self.dspark.config


@functools.cache
def _swapped(base: Any) -> Any:
    """Return the wrapped form of a model class, under the same name and module."""
    return type(base.__name__, (DSparkForCausalLM, base), {"__module__": base.__module__})


def _rebuild(base: Any) -> Any:
    cls = _swapped(base)
    return cls.__new__(cls)
