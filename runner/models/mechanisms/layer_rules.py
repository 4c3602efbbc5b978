"""What transformers tells attention layers by a mask or by the order of a batch, as data of the modules.

Our attention gets no masks, and its batches are flattened, so a row's number is not its position. Modules are found by
their attributes and by their entries in the config's `layer_types`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from piecegraph.errors import UnsupportedModel
from piecegraph.runner.attention.interface.transformers_attention import CHUNK_SIZE_ATTRIBUTE, TEMPERATURE_ATTRIBUTE
from piecegraph.runner.attention.modules.by_value import most_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNKED = "chunked_attention"
"""The kind of layers in which a token sees the tokens of its own chunk, as configs call it."""


def apply_layer_rules(model: PreTrainedModel, max_model_len: int) -> tuple[str, ...]:
    """Set the chunks of attention modules and the growth of their queries, where texts are long enough to show them.

    Returns notes. Raises `UnsupportedModel` for chunks of unknown size, and for texts in which keys would be masked by
    their values. Idempotent.
    """
    most = most_tokens(model)
    if most is not None and max_model_len > most:
        raise UnsupportedModel(
            f"{type(model).__name__} masks keys by value in texts of more than {most} tokens (keep_window_size), and "
            f"attention gets no such mask here; give max_model_len={most} or less, not {max_model_len}."
        )
    config = model.config.get_text_config(decoder=True)
    kinds = list(getattr(config, "layer_types", None) or ())
    notes: dict[str, None] = {}
    for name, module in _attention_modules(model):
        if module.layer_idx < len(kinds) and kinds[module.layer_idx] == CHUNKED:
            chunk_size = getattr(config, "attention_chunk_size", None)
            if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
                raise UnsupportedModel(
                    f"{name} attends within chunks, and the config has attention_chunk_size={chunk_size!r}; it must be "
                    "a number of tokens."
                )
            if chunk_size < max_model_len:
                setattr(module, CHUNK_SIZE_ATTRIBUTE, chunk_size)
            else:
                notes[
                    f"chunked attention: max_model_len={max_model_len} is within one chunk of {chunk_size} tokens, so "
                    "its layers run as full attention"
                ] = None
        if getattr(module, "attn_temperature_tuning", False):
            _take_over_temperature(name, module, max_model_len)
    return tuple(notes)


def first_layer_with_rules(model: PreTrainedModel) -> str | None:
    """Return the first attention module that needs `apply_layer_rules`, and why; None if there is none."""
    kinds = list(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())
    for name, module in _attention_modules(model):
        if module.layer_idx < len(kinds) and kinds[module.layer_idx] == CHUNKED:
            return f"{name} attends within chunks"
        if getattr(module, "attn_temperature_tuning", False):
            return f"{name} scales queries by their position"
    return None


def _attention_modules(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if isinstance(getattr(module, "is_causal", None), bool) and isinstance(getattr(module, "layer_idx", None), int):
            yield name, module


def _take_over_temperature(name: str, module: Any, max_model_len: int) -> None:
    """Let our attention scale the queries of a layer, which scales them by row.

    A layer with rotary embedding (`use_rope`) does not scale, and nobody does before position `floor_scale` - 1.
    """
    step, growth = getattr(module, "floor_scale", None), getattr(module, "attn_scale", None)
    if not isinstance(step, int | float) or not isinstance(growth, int | float) or not hasattr(module, "use_rope"):
        raise UnsupportedModel(
            f"{name} ({type(module).__name__}) has attn_temperature_tuning, but not floor_scale, attn_scale and "
            "use_rope."
        )
    module.attn_temperature_tuning = False
    if not module.use_rope and max_model_len >= step:
        setattr(module, TEMPERATURE_ATTRIBUTE, (step, growth))
