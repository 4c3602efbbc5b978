"""Random weights, drawn one layer after another, so that a rank holds its part only and has the values of one process.

Each layer, and each module outside of them, is drawn whole from a seed of its own by transformers' `_init_weights`, cut
to the rank's part, and freed. So a rank needs memory for its part and one layer more.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from piecegraph.runner.quantization.methods.shard import Shard


class NotInitialized(Exception):
    """The model's `_init_weights` leaves a parameter or buffer without values; the message is its name."""


def fill_with_random(model: Any, whole: Any, shards: Mapping[str, Shard], device: torch.device, seed: int) -> None:
    """Give `model` random weights on `device`, in place: of each parameter in `shards` the rank's part, else all of it.

    `model`, `whole`: the same transformers model on the meta device, the first cut to `shards`; `whole` stays there.
    Parameters that share memory in `model` still do. Changes torch's random state. Raises `NotInitialized`.
    """
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # with the old parameter, which must live to keep its id
    for name, unit, is_alone in _units(whole):
        torch.manual_seed((seed + zlib.crc32(name.encode())) % 2**63)
        with torch.no_grad():
            _draw(_owner_of(whole, name), unit, device, is_alone=is_alone)
        for owner_name, owner in _modules(name, unit, is_alone=is_alone):
            _check_values(owner, owner_name)
            target = model.get_submodule(owner_name)
            for short, value in owner._parameters.items():
                if value is None:
                    continue
                path = f"{owner_name}.{short}".lstrip(".")
                old, shard = target._parameters[short], shards.get(path)
                if id(old) not in made:
                    part = value.detach() if shard is None else shard.of(value.detach())
                    made[id(old)] = old, nn.Parameter(part, requires_grad=False)
                target._parameters[short] = made[id(old)][1]
            target._buffers.update(owner._buffers)
        _move(unit, torch.device("meta"), is_alone=is_alone)
    for module in model.modules():  # buffers that only ranks have, and that are written later
        for short, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[short] = torch.zeros_like(buffer, device=device)


def _check_values(module: Any, name: str) -> None:
    """Raise `NotInitialized` if floats of a module, outside of its children, have got no values."""
    for short, value in (*module._parameters.items(), *module._buffers.items()):
        if value is not None and value.is_floating_point() and bool(value.isnan().any()):
            raise NotInitialized(f"{name}.{short}".lstrip("."))


def _units(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield the name, the module, and whether it is without its children: layers and what has none, then the others."""
    for short, child in module.named_children():
        path = f"{name}.{short}".lstrip(".")
        is_layer = isinstance(module, nn.ModuleList)
        if not is_layer and any(isinstance(each, nn.ModuleList) for each in child.modules()):
            yield from _units(child, path)
        else:
            yield path, child, False
    yield name, module, True


def _modules(name: str, unit: nn.Module, *, is_alone: bool) -> Iterator[tuple[str, Any]]:
    """Yield the modules of a unit with their names in the model."""
    if is_alone:
        yield name, unit
    else:
        yield from ((f"{name}.{below}".strip("."), module) for below, module in unit.named_modules())


def _owner_of(model: Any, name: str) -> Any:
    """Return the innermost transformers model that the module `name` is in, whose `_init_weights` is meant for it."""
    from transformers import PreTrainedModel

    owner = module = model
    for short in name.split(".") if name else ():
        module = getattr(module, short)
        owner = module if isinstance(module, PreTrainedModel) else owner
    return owner


def _draw(owner: Any, unit: nn.Module, device: torch.device, *, is_alone: bool) -> None:
    """Give a unit memory on `device`, NaN at first, and initialize it as transformers' `initialize_weights` does."""
    _move(unit, device, is_alone=is_alone)
    if is_alone:
        owner._init_weights(unit)
    else:
        _initialize(owner._init_weights, unit)


def _initialize(function: Callable[[nn.Module], None], module: nn.Module) -> None:
    from transformers import PreTrainedModel

    for child in module.children():
        _initialize(child._init_weights if isinstance(child, PreTrainedModel) else function, child)
    function(module)


def _move(unit: nn.Module, device: torch.device, *, is_alone: bool) -> None:
    """Give parameters and buffers new memory on a device, with NaN in all that are floats."""
    for module in (unit,) if is_alone else unit.modules():
        for registry in (module._parameters, module._buffers):
            for short, tensor in registry.items():
                if tensor is None:
                    continue
                empty = torch.empty_like(tensor, device=device)
                if empty.is_floating_point():
                    empty.fill_(float("nan"))
                is_parameter = isinstance(tensor, nn.Parameter)
                registry[short] = nn.Parameter(empty, requires_grad=False) if is_parameter else empty  # type: ignore[assignment]
