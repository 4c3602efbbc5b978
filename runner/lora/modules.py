"""Modules that an adapter may change: linears and embeddings, each of which gets a class of ours and stacked matrices.

The stacks hold the matrices of all adapters that lie on the device, one in each slot. They are buffers, so the key of a
plan knows them by shape, and no checkpoint is asked for them: `lora_a` `[num_slots, max_rank, size]`, of an embedding
`[num_slots, num_ids, max_rank]`; `lora_b` `[num_slots, num_columns, max_rank]`; and `lora_ranks` `[num_slots]` int32,
0 where an adapter does not change the module. `lora_rows` says what the module's rows are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from piecegraph.errors import ConfigError, UnsupportedModel
from piecegraph.passes.ops.lora import LOGITS, LORA_EXPAND, LORA_LOOKUP, LORA_SHRINK, TOKENS
from piecegraph.runner.common.engine_config import EngineConfig


def _add(module: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Add what adapters make of `x` to `y`, in place, and return `y`."""
    shrunk = LORA_SHRINK(x, module.lora_a, module.lora_ranks, module.lora_rows)
    LORA_EXPAND(y, shrunk, module.lora_b, module.lora_ranks, module.lora_rows)
    return y


def _add_looked_up(module: Any, y: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    shrunk = LORA_LOOKUP(ids, module.lora_a, module.lora_ranks, module.lora_rows)
    LORA_EXPAND(y, shrunk, module.lora_b, module.lora_ranks, module.lora_rows)
    return y


class LoraLinear(nn.Linear):
    """A linear layer with adapters."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  torch's name
        return _add(self, F.linear(input, self.weight, self.bias), input)


class LoraEmbedding(nn.Embedding):
    """An embedding with adapters."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  torch's name
        return _add_looked_up(self, F.embedding(input, self.weight), input)


_CLASSES: dict[type[nn.Module], Any] = {
    nn.Linear: LoraLinear,
    nn.Embedding: LoraEmbedding,
}
"""Our classes by those they replace. Subclasses may compute in ways of their own, and are not adapted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions:
    """How much room a model has for adapters, and in which modules."""

    num_slots: int  # adapters that lie on the device at once
    max_rank: int
    target_modules: tuple[str, ...] | None = None  # names that paths end with; None: all that can be adapted


def lora_options(config: EngineConfig) -> LoraOptions | None:
    """Return the room for adapters that a config asks for, or None if it enables none."""
    if not config.enable_lora:
        return None
    return LoraOptions(
        num_slots=config.max_loras, max_rank=config.max_lora_rank, target_modules=config.lora_target_modules
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptable:
    """The shape of a module's matrices."""

    size: int  # columns of the input; of an embedding, the number of ids
    num_columns: int  # of the output
    is_embedding: bool
    is_output: bool  # the output layer, which computes logits


@dataclass(frozen=True, slots=True)
class AdaptedModules:
    """The modules of a model that adapters may change, by path."""

    modules: Mapping[str, nn.Module]
    shapes: Mapping[str, Adaptable]
    options: LoraOptions
    unread: tuple[str, ...] = ()  # paths of modules that the model's code does not call: no adapter changes them
    other_classes: Mapping[str, str] = field(default_factory=dict)  # of further modules with a matrix, by path

    @property
    def notes(self) -> tuple[str, ...]:
        """What a caller may want to know, one sentence for each."""
        most = f"up to {self.options.num_slots} at once, of rank {self.options.max_rank} or less"
        found = [f"adapters: {most}, in {len(self.modules)} modules"]
        if self.unread:
            where = f"{len(self.unread)} modules, such as {self.unread[0]}"
            found.append(f"adapters: the model computes {where}, in ways of its own; adapters for them are refused")
        return tuple(found)

    def only_read(self, read: Collection[int]) -> AdaptedModules:
        """Return the modules whose stacks are among the tensors that compiled pieces read, given by id."""
        is_read = {path: id(module.lora_b) in read for path, module in self.modules.items()}
        return replace(
            self,
            modules={path: module for path, module in self.modules.items() if is_read[path]},
            shapes={path: shape for path, shape in self.shapes.items() if is_read[path]},
            unread=tuple(path for path in self.modules if not is_read[path]),
        )

    def write(self, slot: int, matrices: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Put an adapter into a slot, in the order of the current stream: of each path its A and its scaled B.

        `a` is `[rank, size]` and `b` `[num_columns, rank]`. Modules without matrices get the rank 0.
        """
        for path, module in self.modules.items():
            found = matrices.get(path)
            stacks: Any = module
            if found is None:
                stacks.lora_ranks[slot] = 0
                continue
            a, b = found
            rank = a.shape[0]
            if self.shapes[path].is_embedding:
                stacks.lora_a[slot, :, :rank].copy_(a.T, non_blocking=True)
            else:
                stacks.lora_a[slot, :rank].copy_(a, non_blocking=True)
            stacks.lora_b[slot, :, :rank].copy_(b, non_blocking=True)
            stacks.lora_ranks[slot] = rank


def adapt_modules(
    model: nn.Module, options: LoraOptions, *, dtype: torch.dtype, device: torch.device
) -> AdaptedModules:
    """Give the linears and embeddings of `model` stacks of matrices, in place.

    Raises `ConfigError` for a name in `options.target_modules` that no such module has, and `UnsupportedModel` if there
    is no such module at all.
    """
    target_modules = options.target_modules
    transformers_model: Any = model
    output = transformers_model.get_output_embeddings()
    found: dict[str, nn.Module] = {}
    shapes: dict[str, Adaptable] = {}
    for path, module in model.named_modules():
        if type(module) not in _CLASSES or not _is_target(path, target_modules):
            continue
        found[path] = module
        shapes[path] = _shape(module, is_output=module is output)
    for name in target_modules or ():
        if not any(_is_target(path, (name,)) for path in found):
            raise ConfigError(
                f"lora_target_modules has {name!r}, and {type(model).__name__} has no such linear layer or embedding; "
                f"its are named {', '.join(sorted({path.rpartition('.')[2] for path in _adaptable_paths(model)}))}."
            )
    if not found:
        raise UnsupportedModel(f"{type(model).__name__} has no linear layer that an adapter can change.")
    for path, module in found.items():
        _adapt(module, shapes[path], options, dtype, device)
    others = {path: type(module).__name__ for path, module in model.named_modules() if _has_matrix(module)}
    return AdaptedModules(found, shapes, options, other_classes=others)


def _has_matrix(module: nn.Module) -> bool:
    """Return whether a module of a class that no adapter can change here has a weight that peft might change."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim > 1 and type(module) not in (*_CLASSES, *_CLASSES.values())


def _is_target(path: str, names: Sequence[str] | None) -> bool:
    return names is None or any(path == name or path.endswith(f".{name}") for name in names)


def _adaptable_paths(model: nn.Module) -> list[str]:
    kinds = (*_CLASSES, *_CLASSES.values())
    return [path for path, module in model.named_modules() if type(module) in kinds]


def _shape(module: Any, *, is_output: bool) -> Adaptable:
    if isinstance(module, nn.Embedding):
        sizes = module.num_embeddings, module.embedding_dim
    else:
        sizes = module.in_features, module.out_features
    return Adaptable(
        size=sizes[0], num_columns=sizes[1], is_embedding=isinstance(module, nn.Embedding), is_output=is_output
    )


def _adapt(module: Any, shape: Adaptable, options: LoraOptions, dtype: torch.dtype, device: torch.device) -> None:
    num_slots, max_rank = options.num_slots, options.max_rank
    module.__class__ = _CLASSES[type(module)]
    module.lora_rows = LOGITS if shape.is_output else TOKENS
    of_a = (shape.size, max_rank) if shape.is_embedding else (max_rank, shape.size)
    for name, sizes, kind in (
        ("lora_a", (num_slots, *of_a), dtype),
        ("lora_b", (num_slots, shape.num_columns, max_rank), dtype),
        ("lora_ranks", (num_slots,), torch.int32),
    ):
        module.register_buffer(name, torch.zeros(sizes, dtype=kind, device=device), persistent=False)
