"""The layers of a model whose forward is replaced, because it keeps states, compresses keys or attends itself.

Layers of such kinds that are not known here are refused.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from piecegraph.errors import UnsupportedModel
from piecegraph.runner.attention.interface.latent import keep_latents
from piecegraph.runner.attention.modules.replace import (
    WITHOUT_INTERFACE,
    replace_attention,
    sees_later_tokens,
    unknown_attention,
)
from piecegraph.runner.models.common.model_kind import ModelKind
from piecegraph.runner.models.common.quiet_transformers import quiet_transformers
from piecegraph.runner.models.mechanisms.layer_rules import first_layer_with_rules
from piecegraph.runner.models.mechanisms.support import (
    check_class,
    check_structure,
    has_pluggable_attention,
    is_decoder,
    layer_that_differs,
)
from piecegraph.runner.state_layers.modules.replace import (
    first_state_layer,
    has_state_layers,
    replace_state_layers,
)
from piecegraph.runner.traceable.replace import make_traceable

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def checked_kind(
    known_class: type[PreTrainedModel], config: PreTrainedConfig, kind: ModelKind, num_ranks: int
) -> ModelKind:
    """Return `kind` with the attention that the class can be constructed with.

    Raises `UnsupportedModel` if the class lacks what the runner needs, or has layers of kinds that are not known here.
    """
    try:
        check_class(known_class, kind.inputs)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{error}{_differing_layer(config, kind)}") from None
    is_replaced = not has_pluggable_attention(known_class, pools=not kind.generates)
    if is_replaced and num_ranks > 1:
        raise UnsupportedModel(
            f"{known_class.__name__} computes its attention itself (it has no pluggable attention), which tensor "
            "parallelism does not divide; use tensor_parallel_size=1."
        )
    if is_replaced or (kind.generates and (known_class._is_stateful or compresses_keys(config))):
        _check_replaceable(config, WITHOUT_INTERFACE if is_replaced else None, kind)
    return replace(kind, attention=WITHOUT_INTERFACE) if is_replaced else kind


def compresses_keys(config: PreTrainedConfig) -> bool:
    """Return whether layers of the model probably have latent attention, by the config."""
    return isinstance(getattr(config.get_text_config(decoder=True), "kv_lora_rank", None), int)


def replace_layers(model: PreTrainedModel) -> tuple[str, ...]:
    """Replace the forward of layers with states and of own attention, and the expansion of keys; return notes.

    Raises `UnsupportedModel` if the model has layers of these kinds that are not known.
    """
    name = type(model).__name__
    make_traceable(model)
    is_replaced = replace_attention(model)
    check_structure(model)
    if not is_replaced and not has_pluggable_attention(type(model)):
        raise UnsupportedModel(_unknown(model))
    if (both_ways := sees_later_tokens(model)) is not None:
        raise UnsupportedModel(f"{name}: {both_ways}.")
    for module in model.modules():
        if getattr(module, "is_causal", None) is False and is_decoder(module):
            vars(module)["is_causal"] = True  # which transformers says by a mask alone
    problem = replace_state_layers(model)
    other_problem, notes = keep_latents(model)
    if problem is not None or other_problem is not None:
        raise UnsupportedModel(f"{name}: {problem or other_problem}")
    if model._is_stateful and not has_state_layers(model):
        first = layer_that_differs(model)
        raise UnsupportedModel(
            f"{name} keeps a recurrent state between tokens in layers of a kind that cannot run here"
            + (f", such as {first}" if first is not None else "")
            + "; their scan would need an op of its own. Linear attention by the gated delta rule, Mamba, Mamba-2 and "
            "gated short convolutions have one."
        )
    return notes


def check_pools(model: PreTrainedModel) -> tuple[str, ...]:
    """Replace the forward of own attention; return no notes.

    Raises `UnsupportedModel` for a model that can generate and cannot pool, and for unknown attention.
    """
    make_traceable(model)
    if not has_pluggable_attention(type(model), pools=True) and not replace_attention(model, pools=True):
        raise UnsupportedModel(_unknown(model))
    if (stateful := first_state_layer(model)) is not None:
        raise UnsupportedModel(
            f"{type(model).__name__} keeps a state between tokens ({stateful}), and cannot pool here."
        )
    if (ruled := first_layer_with_rules(model)) is not None:
        raise UnsupportedModel(f"{type(model).__name__}: {ruled}; such models can generate here, not pool.")
    return ()


def _check_replaceable(config: PreTrainedConfig, attention: str | None, kind: ModelKind) -> None:
    """Raise `UnsupportedModel` if layers keep states, compress keys or attend themselves in a way not known here.

    The model is made without memory and with `attention`, None for transformers' choice; no weights are read.
    """
    import transformers

    auto: Any = getattr(transformers, kind.auto_class)
    with quiet_transformers(), torch.device("meta"):
        model = auto.from_config(copy.deepcopy(config), attn_implementation=attention)
        replace_layers(model) if kind.generates else check_pools(model)


def _differing_layer(config: PreTrainedConfig, kind: ModelKind) -> str:
    """Return a sentence that names the first module for which a model's class is refused, or ""."""
    import transformers

    auto: Any = getattr(transformers, kind.auto_class)
    try:
        with quiet_transformers(), torch.device("meta"):
            found = layer_that_differs(auto.from_config(copy.deepcopy(config), attn_implementation=WITHOUT_INTERFACE))
    except Exception:  # whatever a model's constructor raises; the class is refused all the same
        return ""
    return "" if found is None else f" The first such module is {found}."


def _unknown(model: PreTrainedModel) -> str:
    return (
        f"{type(model).__name__} computes its attention itself (it has no pluggable attention), and "
        f"{unknown_attention(model)}. It would need to call transformers' attention interface, or a class for its kind "
        "in runner/attention/modules."
    )
