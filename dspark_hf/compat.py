"""Everything that differs between supported Transformers versions, and every private name used.

Peers break at each release because such knowledge is spread out; here it is one file. Checked
against 5.20 and 5.24.
"""

from __future__ import annotations

import inspect
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def text_decoder(model: PreTrainedModel) -> nn.Module:
    """Return the part of a model that decodes text, without image or audio towers."""
    find = getattr(model, "get_decoder", None)
    found = find() if callable(find) else None
    return found if isinstance(found, nn.Module) else cast("nn.Module", model)


def input_device(model: PreTrainedModel) -> torch.device:
    """Return where token ids are wanted; weights that are offloaded have no place of their own."""
    device = cast("torch.device", model.get_input_embeddings().weight.device)
    return torch.device("cpu") if device.type == "meta" else device


def has_dropout(model: PreTrainedModel) -> bool:
    """Tell whether forwards of the model drop anything at random right now."""
    if not model.training:
        return False
    return any(
        module.training and (getattr(module, "attention_dropout", 0) or _dropped_by(module))
        for module in cast("nn.Module", model).modules()
    )


def _dropped_by(module: nn.Module) -> float:
    return module.p if isinstance(module, nn.Dropout) else 0.0


def is_autocast(model: PreTrainedModel) -> bool:
    """Tell whether forwards of the model run under autocast right now."""
    device = "cpu" if model.device.type == "meta" else model.device.type
    return torch.is_autocast_enabled(device)


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
    return original_attention(text_config(model))


def attention_configs(model: PreTrainedModel) -> list[Any]:
    """Return every configuration object the model's modules read their attention name from."""
    found: dict[int, Any] = {}
    for module in cast("nn.Module", model).modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
    return list(found.values())


@dataclass
class _Switched:
    """A configuration pointed elsewhere: how many forwards want it, and what it says otherwise."""

    config: Any
    original: str
    users: int = 0


_guard = threading.Lock()
_switched: dict[int, _Switched] = {}
"""By the configuration's identity. Threads and models may share one: the last user restores it."""


@contextmanager
def attention_set_to(configs: list[Any], name: str) -> Iterator[None]:
    """Point configurations at an attention implementation while at least one forward wants it."""
    with _guard:
        for config in configs:
            original = config._attn_implementation_internal  # noqa: SLF001 - the setter is slow
            _switched.setdefault(id(config), _Switched(config, original)).users += 1
            config._attn_implementation_internal = name  # noqa: SLF001 - as above
    try:
        yield
    finally:
        with _guard:
            for config in configs:
                entry = _switched[id(config)]
                entry.users -= 1
                if not entry.users:
                    config._attn_implementation_internal = entry.original  # noqa: SLF001 - as above
                    del _switched[id(config)]


def attention_shape(model: PreTrainedModel) -> dict[str, int]:
    """Return the numbers of query and key heads and their width, from the configuration."""
    config = text_config(model)
    heads = int(config.num_attention_heads)
    return {
        "num_heads": heads,
        "num_kv": int(getattr(config, "num_key_value_heads", None) or heads),
        "dim": int(getattr(config, "head_dim", None) or config.hidden_size // heads),
    }


def original_attention(config: Any) -> str:
    """Return the attention implementation a configuration names when no forward has switched it."""
    entry = _switched.get(id(config))
    name = config._attn_implementation if entry is None else entry.original  # noqa: SLF001
    return cast("str", name)


def attention_function(name: str, module: nn.Module) -> Any:
    """Return the function of an attention implementation; "eager" is the model file's own."""
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return AttentionInterface().get_interface(name, own)


def mask_function(name: str) -> Any:
    """Return the function that builds masks for an attention implementation."""
    return ALL_MASK_ATTENTION_FUNCTIONS[name]


def can_switch_attention(model: PreTrainedModel) -> bool:
    """Tell whether the model looks its attention function up in Transformers' registry."""
    check = getattr(model, "_can_set_attn_implementation", None)
    return bool(check()) if callable(check) else False


def has_own_prepare_inputs(model: PreTrainedModel) -> Any:
    """Return an instance-level override of `prepare_inputs_for_generation`, as PEFT installs."""
    return vars(model).get("prepare_inputs_for_generation")
