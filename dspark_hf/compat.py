"""Everything that differs between supported Transformers versions, and every private name used.

Peers break at each release because such knowledge is spread out; here it is one file. Checked
against 5.20 and 5.24.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from transformers import PreTrainedModel

CACHE_KEYS = ("cache", "past_key_values", "cache_params")
"""Names of the cache in forwards and outputs; "cache" everywhere since 5.23."""
OUTPUT_CACHE_NAME = next(
    key for key in CACHE_KEYS if key in GenerateDecoderOnlyOutput.__annotations__
)
"""Name of the cache in generate()'s output."""


def cache_of(mapping: Any) -> Cache | None:
    """Return the cache of model keywords or outputs under either name."""
    for key in CACHE_KEYS:
        found = mapping.get(key)
        if found is not None:
            return cast("Cache", found)
    return None


def is_user_cache(cache: Cache | None) -> bool:
    """Tell whether the caller handed this cache to generate()."""
    return cache is not None and bool(getattr(cache, "_is_user_defined", False))


def text_config(model: PreTrainedModel) -> Any:
    """Return the decoder's text configuration."""
    return model.config.get_text_config(decoder=True)


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """Return an empty dynamic cache with the layer kinds the model's configuration asks for."""
    return DynamicCache(config=text_config(model))


def sliding_windows(model: PreTrainedModel) -> list[int | None] | None:
    """Return each layer's sliding window in tokens (None: full attention).

    Returns:
        The list, one entry per layer; None when some layer is neither full nor sliding attention
        (recurrent, chunked, indexed, shared keys, ...).
    """
    config = text_config(model)
    kinds = getattr(config, "layer_types", None)
    if kinds is None and getattr(config, "attention_chunk_size", None) is not None:
        return None
    if kinds is not None and not set(kinds) <= {"full_attention", "sliding_attention"}:
        return None
    windows: list[int | None] = []
    layers = new_cache(model).layers
    if not layers:
        return None
    for layer in layers:
        if type(layer) is DynamicSlidingWindowLayer:
            windows.append(layer.sliding_window)
        elif type(layer) is DynamicLayer:
            windows.append(None)
        else:
            return None
    return windows


def recurrent_part(layer: Any) -> bool:
    """Tell whether a cache layer carries convolution or recurrent state."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def is_attention_layer(layer: Any) -> bool:
    """Tell whether a cache layer is exactly a full or sliding attention layer, which can be cut."""
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)


def accepts(model: PreTrainedModel, name: str) -> bool:
    """Tell whether the model's forward names a parameter."""
    return name in inspect.signature(model.forward).parameters


def cache_key(model: PreTrainedModel) -> str:
    """Return the name under which the model's forward takes its cache."""
    return next((key for key in CACHE_KEYS if accepts(model, key)), CACHE_KEYS[0])


def supports_logits_to_keep(model: PreTrainedModel) -> bool:
    """Tell whether the forward can leave out logits nobody asked for."""
    return accepts(model, "logits_to_keep")


def attention_name(model: PreTrainedModel) -> str:
    """Return the name of the model's attention implementation."""
    return cast("str", text_config(model)._attn_implementation)  # noqa: SLF001 - no public reader


def attention_configs(model: PreTrainedModel) -> list[Any]:
    """Return every configuration object the model's modules read their attention name from."""
    found: dict[int, Any] = {}
    for module in cast("nn.Module", model).modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
    return list(found.values())


@contextmanager
def attention_set_to(configs: list[Any], name: str) -> Iterator[None]:
    """Point configurations at an attention implementation for a while."""
    saved = [config._attn_implementation_internal for config in configs]  # noqa: SLF001
    try:
        for config in configs:
            config._attn_implementation_internal = name  # noqa: SLF001 - the setter is slow
        yield
    finally:
        for config, old in zip(configs, saved, strict=True):
            config._attn_implementation_internal = old  # noqa: SLF001 - as above


def can_switch_attention(model: PreTrainedModel) -> bool:
    """Tell whether the model looks its attention function up in Transformers' registry."""
    check = getattr(model, "_can_set_attn_implementation", None)
    return bool(check()) if callable(check) else False


def has_own_prepare_inputs(model: PreTrainedModel) -> Any:
    """Return an instance-level override of `prepare_inputs_for_generation`, as PEFT installs."""
    return vars(model).get("prepare_inputs_for_generation")
