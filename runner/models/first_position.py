"""The position at which a model's own forward starts to count if it is called without positions.

A model with learned positions may reserve the first rows of their table: RoBERTa and related models start after the
row of the padding token. `generate` of transformers passes 0, 1, 2, ..., with which such a model was not trained.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from piecegraph.compiler.repeated_layers.find import name_layers
from piecegraph.errors import UnsupportedModel
from piecegraph.runner.attention.interface.transformers_attention import ATTENTION_IMPLEMENTATION, register_attention
from piecegraph.runner.attention.modules.alibi import adds_position_bias
from piecegraph.runner.attention.modules.replace import WITHOUT_INTERFACE, replace_attention
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.models.causal_lm import CountedPositions, counts_positions
from piecegraph.runner.models.common.one_thread import in_one_thread_at_a_time
from piecegraph.runner.models.common.quiet_transformers import quiet_transformers
from piecegraph.runner.models.mechanisms.support import check_class, check_is_causal, has_pluggable_attention

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_NUM_TOKENS = 5
_SHIFT = 3


@dataclass(frozen=True, slots=True)
class FirstPosition:
    """The first position of a model's texts, with a note for the user if it is unknown or not 0."""

    value: int
    note: str = ""
    uncounted_token: int | None = None  # a token that the model's own forward puts at `value - 1` and does not count


@in_one_thread_at_a_time
def first_position(
    source: ModelSource,
    config: PreTrainedConfig,
    *,
    auto_class: str = "AutoModelForCausalLM",
    attention: str = ATTENTION_IMPLEMENTATION,
) -> FirstPosition:
    """Return the position of the first token of a text in the model's own forward.

    One layer of the model is constructed with uninitialised weights and run up to its attention, once with positions
    0, 1, 2, ... and once without positions. The difference of the indices at which its tables are read is the first
    position. A model with rotary embeddings is not run, because only the distances of its positions matter.

    Raises `UnsupportedModel` if the model's own positions are not consecutive, and if it is to generate but is an
    encoder.
    """
    if getattr(config.get_text_config(decoder=True), "rope_parameters", None):
        return FirstPosition(0)
    try:
        with quiet_transformers():
            generates = auto_class == "AutoModelForCausalLM"
            if _computes_attention_itself(config, auto_class):
                attention = WITHOUT_INTERFACE
            model = _one_layer(config, source.trust_remote_code, auto_class, attention)
            if attention == WITHOUT_INTERFACE and not replace_attention(model, pools=not generates):
                return FirstPosition(0)  # loading refuses the model
            if generates:
                check_is_causal(model)
            if generates and not _may_run(type(model)):
                return FirstPosition(0)  # loading refuses the model
            _allocate(model)
            given = torch.arange(_NUM_TOKENS)[None]
            input_ids = _ordinary_tokens(config)
            own = _table_reads(model, input_ids)
            if counts_positions(type(model)):
                with CountedPositions(given[0] + _SHIFT):
                    shifted = _table_reads(model, input_ids)
                    if adds_position_bias(model) and _difference(shifted, own) == 0:
                        return FirstPosition(0)  # attention alone needs positions, and it has its own
                    return _of_a_counting_model(model, own, shifted)
            counted = _table_reads(model, input_ids, position_ids=given)
            first = _difference(own, counted)
            uncounted = _uncounted_token(model, input_ids, own, first) if first else None
    except UnsupportedModel:
        raise
    except Exception as error:  # whatever a model of one layer, called with few arguments, raises
        line = next(iter(str(error).splitlines()), "")
        return FirstPosition(
            0, f"positions begin at 0; the model's own could not be determined: {type(error).__name__}: {line}"
        )
    if first is None:
        raise UnsupportedModel(
            f"{type(model).__name__} computes its own positions if it is given none, and they are not consecutive: "
            f"its tables are read at {own}, and with positions 0 to {_NUM_TOKENS - 1} at {counted}. Only models "
            "whose positions count up from a fixed number can run here."
        )
    if first == 0:
        return FirstPosition(0)
    note = f"positions begin at {first}, as in the model's own forward"
    if uncounted is not None and generates:
        note += "; padding tokens in a text count like others"
    return FirstPosition(first, note, uncounted)


def _of_a_counting_model(model: Any, own: Sequence[Read], shifted: Sequence[Read]) -> FirstPosition:
    """Return 0 if the positions that a model counts can be given to it, however its texts lie in a batch."""
    if _difference(shifted, own) != _SHIFT:
        raise UnsupportedModel(
            f"{type(model).__name__}.forward takes no position_ids, and its positions are not those of a table that it "
            "reads at torch.arange(num_tokens), so it cannot be told where in their texts the tokens of a batch are."
        )
    return FirstPosition(0)


def _computes_attention_itself(config: PreTrainedConfig, auto_class: str) -> bool:
    import transformers

    known = getattr(transformers, auto_class)._model_mapping.get(type(config), None)
    generates = auto_class == "AutoModelForCausalLM"
    return isinstance(known, type) and not has_pluggable_attention(known, pools=not generates)


def _one_layer(config: PreTrainedConfig, trust_remote_code: bool, auto_class: str, attention: str) -> Any:
    """Return a model of one layer on the meta device."""
    import transformers

    register_attention()
    small = copy.deepcopy(config)
    small.get_text_config(decoder=True).num_hidden_layers = 1
    with torch.device("meta"):
        return getattr(transformers, auto_class).from_config(
            small,
            dtype=torch.float32,
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
        )


def _may_run(model_class: type[PreTrainedModel]) -> bool:
    """Return whether models of this class can be loaded."""
    try:
        check_class(model_class)
    except UnsupportedModel:
        return False
    return True


def _allocate(model: Any) -> None:
    """Allocate the model's memory on the CPU, and initialise only its integer buffers."""
    model.to_empty(device="cpu").eval()
    for module in model.modules():
        if any(not buffer.is_floating_point() for buffer in module.buffers(recurse=False)):
            model._init_weights(module)  # as transformers does after it made a model without memory
    name_layers(model)


def _ordinary_tokens(config: PreTrainedConfig) -> torch.Tensor:
    """Return tokens `[1, _NUM_TOKENS]` without special tokens."""
    text_config = config.get_text_config(decoder=True)
    special = {
        token
        for name, value in text_config.to_dict().items()
        if name.endswith("token_id")
        for token in (value if isinstance(value, list) else [value])
    }
    tokens = [token for token in range(text_config.vocab_size) if token not in special]
    return torch.tensor([(tokens * _NUM_TOKENS)[:_NUM_TOKENS]])


def _uncounted_token(model: Any, input_ids: torch.Tensor, own: Sequence[Read], first: int) -> int | None:
    """Return the padding token if the model's own positions leave it out, as RoBERTa's do."""
    text = model.config.get_text_config(decoder=True)
    padding = getattr(text, "pad_token_id", None)
    if not isinstance(padding, int) or not 0 <= padding < text.vocab_size:
        return None
    with_padding = input_ids.clone()
    with_padding[0, 2] = padding
    counted = tuple(range(first, first + _NUM_TOKENS))
    left_out = (first, first + 1, first - 1, *range(first + 2, first + _NUM_TOKENS - 1))
    reads = _table_reads(model, with_padding)
    found = [at for (_, before), (_, at) in zip(own, reads, strict=False) if before == counted]
    return padding if found and all(at == left_out for at in found) else None


Read = tuple[str, tuple[int, ...]]
"""The name of an operation on floating-point tensors, and the integers of its index tensor, one per token."""


def _table_reads(model: Any, input_ids: torch.Tensor, **options: Any) -> list[Read]:
    """Return the reads of the model's tables before its first attention, in order."""
    reads = _TableReads()
    with torch.no_grad(), reads, contextlib.suppress(_AtAttention):
        model(input_ids=input_ids, use_cache=False, **options)
    return reads.found


def _difference(own: Sequence[Read], counted: Sequence[Read]) -> int | None:
    """Return by how much the positions of `own` exceed those of `counted`; None if not by the same number."""
    if [(name, len(at)) for name, at in own] != [(name, len(at)) for name, at in counted]:
        return None
    differences = {
        left - right
        for (_, own_at), (_, counted_at) in zip(own, counted, strict=True)
        if own_at != counted_at
        for left, right in zip(own_at, counted_at, strict=True)
    }
    return next(iter(differences), 0) if len(differences) <= 1 and min(differences, default=0) >= 0 else None


class _AtAttention(Exception):
    """The signal that the model calls its first attention."""


class _TableReads(TorchDispatchMode):
    """A dispatch mode that records index tensors of operations on floating-point tensors, and stops at attention."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.found: list[Read] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "piecegraph":
            raise _AtAttention
        tensors = [each for each in torch.utils._pytree.tree_leaves(args) if isinstance(each, torch.Tensor)]
        if any(each.is_floating_point() for each in tensors):
            self.found.extend(
                (str(func), tuple(each.flatten().tolist()))
                for each in tensors
                if each.dtype in (torch.int64, torch.int32) and each.numel() == _NUM_TOKENS
            )
        return func(*args, **(kwargs or {}))
