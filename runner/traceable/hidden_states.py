"""Hidden states between layers as further results of a traced model.

A layer whose hidden states are wanted gets a class of ours that calls `piecegraph::leaves_model` on them. While
`LeavingHiddenStates` is active, as in the forward that is traced, the call is intercepted and its tensor kept; so the
op is in no graph, and what leaves is one more output of the piece that computes it. The tensors of the module and their
names stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from piecegraph.errors import ConfigError, UnsupportedModel

_library = torch.library.Library("piecegraph", "FRAGMENT")
_library.define("leaves_model(Tensor x) -> ()")
_library.impl("leaves_model", lambda x: None, "CompositeExplicitAutograd")

LAST = -1
"""The place that stands for the hidden states behind the last norm, which logits are computed from."""

_ATTRIBUTE = "_piecegraph_leaving"
"""The attribute of a module whose hidden states leave the model, and of the model itself: the place, as text, so that
no two such layers are taken for alike."""


class LeavingHiddenStates(TorchFunctionMode):
    """A mode that keeps the tensors that leave the model while it runs, in the order in which they are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`, or keep its argument."""
        if func is torch.ops.piecegraph.leaves_model.default:
            self.found.append(args[0])
            return None
        return func(*args, **(kwargs or {}))


class _LeavesBefore(nn.Module):
    """A layer whose first argument leaves the model."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        torch.ops.piecegraph.leaves_model.default(hidden_states)
        return super().forward(hidden_states, *args, **kwargs)


class _LeavesBehind(nn.Module):
    """A layer whose result leaves the model."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(hidden_states, *args, **kwargs)
        torch.ops.piecegraph.leaves_model.default(result[0] if isinstance(result, tuple) else result)
        return result


class _LeavesLast(nn.Module):
    """A model without a head whose last hidden states leave it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(*args, **kwargs)
        torch.ops.piecegraph.leaves_model.default(result.last_hidden_state)
        return result


def let_hidden_states_leave(model: nn.Module, places: Sequence[int]) -> None:
    """Make hidden states of `model`, a causal language model of transformers, leave it when it is traced.

    `places`: j is the input of layer j, which is the result of the layer before; the number of layers is the result of
    the last one; `LAST` is behind the last norm. Mutates the classes of these layers. Raises `ConfigError` for a place
    that the model does not have, and `UnsupportedModel` for a model whose layers are not found.
    """
    if not places:
        return
    owner: Any = model
    layers = _layers(owner)
    for place in sorted(set(places)):
        if not LAST <= place <= len(layers):
            raise ConfigError(
                f"hidden states of layer {place} are asked for, and {type(model).__name__} has layers 0 to "
                f"{len(layers) - 1}; check that the head was made for this model."
            )
        if place == LAST:
            _change(owner.base_model, _LeavesLast, place)
        elif place == 0:
            _change(layers[0], _LeavesBefore, place)
        else:
            _change(layers[place - 1], _LeavesBehind, place)
    vars(owner)[_ATTRIBUTE] = " ".join(map(str, sorted(set(places))))


def has_leaving_hidden_states(model: nn.Module) -> bool:
    """Return whether `let_hidden_states_leave` has changed the model."""
    return _ATTRIBUTE in vars(model)


def _layers(model: Any) -> Sequence[nn.Module]:
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise UnsupportedModel(
        f"{type(model).__name__} has no list of its {count} layers, between which hidden states could leave it; draft "
        "with method 'ngram' or 'draft_model'."
    )


def _change(module: nn.Module, how: type[nn.Module], place: int) -> None:
    kind = type(module)
    module.__class__ = type(kind.__name__, (how, kind), {"__module__": __name__})
    vars(module)[_ATTRIBUTE] = f"{vars(module).get(_ATTRIBUTE, 'places')} {place}"
