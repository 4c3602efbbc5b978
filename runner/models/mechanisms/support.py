"""Checks for unsupported models, made before weights are read or anything is compiled.

Every check concerns a mechanism (state, masks, quantisation), not the name of a model family.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from piecegraph.errors import ModelError, UnsupportedModel
from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.quantization.checkpoints.all_formats import stored_checkpoint
from piecegraph.runner.state_layers.layer import StateLayer

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

_LAYER_TYPES = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "attention", "dense", "sparse", "moe"}
)
"""The kinds of layers that have an ordinary KV cache; the last three only describe the MLP."""

_CHUNKED = "chunked_attention"
"""The kind of layers in which a token sees the tokens of its own chunk."""

_BOTH = "hybrid"
"""The kind of layers that have keys and values and a state."""

_STATE_LAYER_TYPES = frozenset({"linear_attention", "conv", _BOTH})
"""The kinds of layers that keep a state; which of them can run is decided by their modules (`state_layers`)."""

_ATTENTION_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention", _CHUNKED, _BOTH})
"""The kinds of layers that have keys and values."""

_MLP_LAYER_TYPES = frozenset({"mlp", "moe"})
"""The kinds of layers that keep nothing, in a model whose other layers are called by what they keep."""

MAX_SIZES: Mapping[str, int] = {
    "num_hidden_layers": 10_000,
    "num_attention_heads": 65_536,
    "num_key_value_heads": 65_536,
    "head_dim": 1 << 20,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "vocab_size": 1 << 26,
    "max_position_embeddings": 1 << 30,
}
"""The largest value of each size, far above that of any model, so that a larger value means a damaged config; the
smallest value is 1."""


def check_model_sizes(config: PreTrainedConfig) -> None:
    """Raise `ModelError` for a config whose sizes are not whole numbers, exceed `MAX_SIZES`, or do not divide.

    The message names the field, its value and what is expected.
    """
    text_config = config.get_text_config(decoder=True)
    sizes: dict[str, int] = {}
    for name, largest in MAX_SIZES.items():
        value = _field(text_config, name)
        if value is None or isinstance(value, list | tuple):  # absent, or a value per layer, which is not checked
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
            raise ModelError(f"the config has {name}={value!r}; it must be a whole number from 1 to {largest}.")
        sizes[name] = value
    heads, kv_heads = sizes.get("num_attention_heads"), sizes.get("num_key_value_heads")
    if heads is not None and kv_heads is not None and heads % kv_heads:
        raise ModelError(
            f"the config has num_attention_heads={heads} and num_key_value_heads={kv_heads}; the first must be a "
            "multiple of the second."
        )


def check_config(config: PreTrainedConfig, written: Mapping[str, Any] | None = None) -> None:
    """Check that a model with this config is supported.

    Args:
        config: the config as transformers has read it, with defaults.
        written: the contents of the model's config.json; None if there is none (GGUF).

    Raises:
        UnsupportedModel: a mechanism of the model is not supported; the message names the mechanism.
        ModelError: the config has no number of attention heads.
    """
    text_config = config.get_text_config(decoder=True)
    kind = f"{type(config).__name__} (model_type {config.model_type!r})"
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{kind} is an encoder-decoder; only decoder-only models can run here.")
    foreign = sorted(
        set(getattr(text_config, "layer_types", None) or ()) - _LAYER_TYPES - _STATE_LAYER_TYPES - _MLP_LAYER_TYPES
    )
    if foreign:
        first = list(text_config.layer_types).index(foreign[0])
        raise UnsupportedModel(
            f"{kind} has layers of type {', '.join(foreign)} (the first is layers.{first}), for which there is no "
            "cache here; such a layer would need a CacheSpec and an op of its own. Layers can be full_attention, "
            f"sliding_attention, chunked_attention, {', '.join(sorted(_STATE_LAYER_TYPES))}."
        )
    if "dynamic" in _rope_types(text_config):
        raise UnsupportedModel(
            f"{kind} uses 'dynamic' rotary embeddings, whose frequencies change with the longest text in a batch. "
            'Give a fixed kind: hf_overrides={"rope_parameters": {"rope_type": "yarn", "factor": ...}}.'
        )
    kinds = set(getattr(text_config, "layer_types", None) or ())
    has_attention = not kinds or not kinds <= _STATE_LAYER_TYPES - {_BOTH}
    if written is not None and has_attention:
        _check_heads(config, text_config, written)
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        stored_checkpoint(quantization)


def check_class(model_class: type[PreTrainedModel], inputs: Sequence[str] = ("position_ids", "logits_to_keep")) -> None:
    """Raise `UnsupportedModel` if the model's class lacks what the runner needs; `inputs`: of its forward."""
    name = model_class.__name__
    if model_class._is_stateful and "logits_to_keep" not in inputs:
        raise UnsupportedModel(
            f"{name} keeps a recurrent state between tokens; such models can generate here, not pool."
        )
    parameters = inspect.signature(model_class.forward).parameters
    for wanted in inputs:
        can_do_without = (
            wanted == "position_ids"
            and ("kwargs" in parameters or not model_class._is_stateful)  # it may count (`causal_lm.CountedPositions`)
        )
        if wanted not in parameters and not can_do_without:
            raise UnsupportedModel(f"{name} {_what_is_missing(model_class, wanted, parameters)}")


def _what_is_missing(model_class: type[PreTrainedModel], wanted: str, parameters: Collection[str]) -> str:
    """Return what a class whose forward takes no `wanted` does instead, as the end of a sentence about it."""
    if "shared_kv_states" in parameters:
        return (
            "attends to the keys and values of another model's layers (shared_kv_states), as a draft head does, and "
            "keeps none of its own; a draft needs a model of its own here (method 'draft_model')."
        )
    if "cache_params" in parameters or model_class._is_stateful:  # a newer transformers calls it cache
        return (
            "keeps a recurrent state between tokens (cache_params) in layers of a kind that cannot run here; their "
            "scan would need an op of its own."
        )
    if hasattr(sys.modules[model_class.__module__], "ngram_attention_bias"):
        return (
            "predicts several tokens at each place, in streams that attend to each other beside the text; that would "
            "need an attention op with a stream for each of them."
        )
    if wanted == "logits_to_keep":
        return (
            "computes the logits of every row of a batch; it would need a forward that takes logits_to_keep, since a "
            "flattened batch needs those of its last rows."
        )
    return f"takes no {wanted} in its forward, without which it cannot run on a flattened batch."


def layer_that_differs(model: PreTrainedModel) -> str | None:
    """Return the first module for which `check_class` refuses the class of a model, with its class; None: not found."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        parameters = inspect.signature(type(module).forward).parameters
        differs = bool({"shared_kv_states", "state"} & set(parameters)) or hasattr(module, "ngram")
        has_layers = any(type(child).__name__ == "ModuleList" for child in module.children())
        if name and differs and not has_layers:
            return f"{name} ({type(module).__name__})"
    found = [name for name, module in model.named_modules() if module is head]
    return f"{found[0]} ({type(head).__name__})" if found else None


def has_pluggable_attention(model_class: type[PreTrainedModel], *, pools: bool = False) -> bool:
    """Return whether models of a class call attention through transformers' interface, or have states.

    A class that generates may do so without saying so, since the calls in its graph are counted (`check_layers`), and
    each is known to be causal or not. In others the modules of attention are replaced, if their kind is known.
    """
    if model_class._supports_attention_backend or model_class._is_stateful:
        return True
    return not pools and hasattr(sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS")


def causality(model: nn.Module) -> list[bool]:
    """Return, for each module of a model that says so, whether it is causal; transformers' attention modules do."""
    found = [module for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)]
    return [bool(module.is_causal) or is_decoder(module) for module in found]


def is_decoder(module: nn.Module) -> bool:
    """Return whether a module of attention says that it is a decoder's, and so causal.

    In some classes only a mask makes it so, and `is_causal` is False.
    """
    return getattr(module, "is_decoder", None) is True


def check_structure(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModel` for a mechanism of a model that a trace would fail at, or hide."""
    for name, module in model.named_modules():
        what = f"{type(model).__name__}: {name or 'the model'} ({type(module).__name__})"
        if module._modules.get("patcher") is not None:
            raise UnsupportedModel(
                f"{what} joins tokens to patches, as many as their values say, and has layers over patches; they would "
                "need a batch and a cache of patches, and here every layer runs over the tokens of a step."
            )
        if hasattr(type(module), "prepare_dynamic_mask"):
            raise UnsupportedModel(
                f"{what} masks keys by their values (prepare_dynamic_mask), and attention gets no mask here; it can be "
                "causal, within a window or a chunk, and with biases by position."
            )
        if (why := _not_left_to_right(module)) is not None:
            raise UnsupportedModel(
                f"{what} {why}, so no token's keys are final when it was computed; each step would need to compute all "
                "of a text anew."
            )


def _not_left_to_right(module: Any) -> str | None:
    """Return why the tokens of a text are not computed one after the other, or None."""
    if {"prompt_length", "segment_embedding"} <= {*vars(module), *module._modules}:  # CPM-Ant
        return f"puts {module.prompt_length} tokens of its own before a text, and a prompt sees the whole of itself"
    if "mask_emb" in module._parameters and hasattr(module, "relative_positional_encoding"):  # XLNet
        return "predicts a token in the place of an empty one that it appends, and lets all tokens see each other"
    if getattr(module, "causal", None) is False and hasattr(module, "use_lang_emb"):  # XLM
        return "predicts a token in the place of a mask token that it appends, and lets all tokens see each other"
    return None


def check_is_causal(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModel` if every attention of a model lets tokens see what comes after them."""
    found = causality(model)
    if found and not any(found):
        raise UnsupportedModel(
            f"{type(model).__name__} is an encoder by its config: every token sees the whole text, so it generates "
            "nothing. LLM(model, runner='pooling') embeds or classifies texts with it; a decoder of this kind has "
            "is_decoder=true in its config."
        )


def check_layers(
    layers: Sequence[AttentionLayer],
    config: PreTrainedConfig,
    with_states: Sequence[StateLayer] = (),
    *,
    max_model_len: int = 0,
) -> None:
    """Raise `UnsupportedModel` if a model's traced layers, of attention and `with_states`, contradict its config.

    A model that passes its sliding window only to its mask would silently attend to all tokens, because the runner
    builds no masks. Texts have up to `max_model_len` tokens.
    """
    text_config = config.get_text_config(decoder=True)
    num_layers = text_config.num_hidden_layers
    if with_states:
        kinds = list(getattr(text_config, "layer_types", None) or ())
        num_layers -= sum(kind in _MLP_LAYER_TYPES for kind in kinds)
        num_attention = sum(kind in _ATTENTION_LAYER_TYPES for kind in kinds)
        if len(layers) < num_attention:
            raise UnsupportedModel(
                f"only {len(layers)} of {num_attention} layers with attention call it in a way that can run here; "
                f"{_others(layers, with_states)} would need to call transformers' attention interface."
            )
    if len(layers) + len(with_states) < num_layers:
        raise UnsupportedModel(
            f"only {len(layers) + len(with_states)} of {num_layers} layers call attention"
            + (" or keep a state that is known" if with_states else "")
            + f"; {_others(layers, with_states)} would need to call transformers' attention interface, or to be of a "
            "kind with a state that is known here."
        )
    layer_types = getattr(text_config, "layer_types", None)
    if layer_types and len(layer_types) == len(layers):
        for layer, layer_type in zip(layers, layer_types, strict=True):
            wants_window = {"sliding_attention": True, "full_attention": False}.get(layer_type)
            if wants_window is not None and wants_window != bool(layer.window):
                raise UnsupportedModel(
                    f"{layer.name} is {layer_type} by the config, but its attention was called with "
                    + (f"a window of {layer.window}." if layer.window else "no window.")
                )
    _check_chunks(layers, text_config, max_model_len)
    declares_window = not layer_types and hasattr(type(text_config), "sliding_window")
    window = text_config.sliding_window if declares_window else None
    has_mask_alone = bool(window and layers) and not any(layer.window for layer in layers)
    if has_mask_alone and not (window is not None and max_model_len and max_model_len <= window):
        raise UnsupportedModel(
            f"the config has sliding_window={window}, but no layer calls attention with a window, {layers[0].name} "
            "being the first: a mask alone has it, and none is built here. They would need to pass sliding_window to "
            f"attention; max_model_len={window} runs without."
        )


def _others(layers: Sequence[AttentionLayer], with_states: Sequence[StateLayer]) -> str:
    """Return what the layers are that are not among these: by their numbers, where all names have one."""
    names = [*(layer.name for layer in layers), *(layer.name for layer in with_states)]
    numbers = [re.search(r"\.(\d+)\b", name) for name in names]
    if not numbers or None in numbers:
        return "the others"
    found = {int(number[1]) for number in numbers if number is not None}
    missing = [number for number in range(max(found) + 2) if number not in found]
    return f"the others (the first is layers.{missing[0]})"


def _check_chunks(layers: Sequence[AttentionLayer], text_config: PreTrainedConfig, max_model_len: int) -> None:
    """Raise `UnsupportedModel` unless as many layers attend within chunks as the config says."""
    chunk_size = getattr(text_config, "attention_chunk_size", None) or 0
    wanted = list(getattr(text_config, "layer_types", None) or ()).count(_CHUNKED) if chunk_size < max_model_len else 0
    found = sum(layer.chunk_size == chunk_size for layer in layers if layer.chunk_size)
    if found != wanted:
        raise UnsupportedModel(
            f"by the config {wanted} layers attend within chunks of {chunk_size} tokens, but {found} call attention so."
        )


def _field(config: PreTrainedConfig, name: str) -> Any:
    """Return a field of a config, or None if it is absent, or is a property, which no file gave.

    Of a field that each layer has a value of, that of the config itself, which no `getattr` returns.
    """
    name = config.attribute_map.get(name, name)
    held = vars(config)
    if name in held or isinstance(getattr(type(config), name, None), property):
        return held.get(name)
    return getattr(config, name, None)


def _rope_types(text_config: PreTrainedConfig) -> Iterator[str]:
    parameters = getattr(text_config, "rope_parameters", None) or {}
    for entry in (parameters, *parameters.values()):
        if isinstance(entry, Mapping) and isinstance(entry.get("rope_type"), str):
            yield entry["rope_type"]


def _check_heads(config: PreTrainedConfig, text_config: PreTrainedConfig, written: Mapping[str, Any]) -> None:
    names = {"num_attention_heads", text_config.attribute_map.get("num_attention_heads", "num_attention_heads")}
    if _field(text_config, "num_attention_heads") is None:
        return  # a model without heads of attention, or a number of them for each layer
    sections = [written, *(section for section in written.values() if isinstance(section, Mapping))]
    if not any(name in section for name in names for section in sections):
        raise ModelError(
            f"the model's config.json has no {' or '.join(sorted(names))}, so the shape of its attention is unknown. "
            'Complete it, or give the value: hf_overrides={"num_attention_heads": ...}.'
        )
