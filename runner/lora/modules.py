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
from piecegraph.runner.quantization.methods.all_methods import METHODS
from piecegraph.runner.quantization.methods.linear_method import PackedWeight
from piecegraph.runner.quantization.methods.shard import Shard
from piecegraph.runner.quantization.modules import QuantisedEmbedding, QuantisedLinear


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
        return self.product(input, self.bias)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return `x @ weight.T + bias` and what adapters add to it.

        On a rank with a part of the input it is a part of the sum over ranks, with one part of each A.
        """
        return _add(self, F.linear(x, self.weight, bias), x)


class LoraEmbedding(nn.Embedding):
    """An embedding with adapters."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  torch's name
        return _add_looked_up(self, F.embedding(input, self.weight), input)


class LoraQuantisedLinear(QuantisedLinear):
    """A linear layer whose weight is quantised, with adapters in floats beside it."""

    def product(self, x: torch.Tensor, bias: torch.Tensor | None, largest: torch.Tensor | None = None) -> torch.Tensor:
        """Return `x @ weight.T + bias` and what adapters add to it; see `QuantisedLinear.product`."""
        return _add(self, super().product(x, bias, largest), x)


class LoraQuantisedEmbedding(QuantisedEmbedding):
    """An embedding whose weight is quantised, with adapters in floats beside it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  torch's name
        return _add_looked_up(self, super().forward(input), input)


_CLASSES: dict[type[nn.Module], Any] = {
    nn.Linear: LoraLinear,
    nn.Embedding: LoraEmbedding,
    QuantisedLinear: LoraQuantisedLinear,
    QuantisedEmbedding: LoraQuantisedEmbedding,
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
    shard: Shard | None = None  # the rank's part of the module's weight; None: all of it

    @property
    def of_weight(self) -> tuple[int, int]:
        """The shape of the module's weight on all ranks together."""
        return (self.size, self.num_columns) if self.is_embedding else (self.num_columns, self.size)

    def of_rank(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rank's part of A `[rank, size]` and B `[num_columns, rank]`.

        A part of the output takes rows of B, a part of the input columns of A; the other matrix is whole.
        """
        if self.shard is None:
            return a, b
        if self.is_embedding:
            return self.shard.in_units(1, -1).of(a), b
        return (a, self.shard.of(b)) if self.shard.dim == -2 else (self.shard.of(a), b)


@dataclass(frozen=True, slots=True)
class AdaptedModules:
    """The modules of a model that adapters may change, by path."""

    modules: Mapping[str, nn.Module]  # those that this process has
    shapes: Mapping[str, Adaptable]  # of all modules, those of other stages of a pipeline included
    options: LoraOptions
    unread: tuple[str, ...] = ()  # paths of modules that the model's code does not call: no adapter changes them
    other_classes: Mapping[str, str] = field(default_factory=dict)  # of further modules with a matrix, by path

    def facts(self) -> dict[str, Any]:
        """Return what other stages of a pipeline must know of these modules, for `with_stages`; JSON can hold it."""
        shapes = {
            path: (each.size, each.num_columns, each.is_embedding, each.is_output) for path, each in self.shapes.items()
        }
        return {"shapes": shapes, "unread": list(self.unread), "other_classes": dict(self.other_classes)}

    def with_stages(self, stages: Sequence[Mapping[str, Any]]) -> AdaptedModules:
        """Return these modules, beside the shapes of those of all stages, by which adapters are checked."""
        shapes = {
            path: Adaptable(size=size, num_columns=num_columns, is_embedding=is_embedding, is_output=is_output)
            for stage in stages
            for path, (size, num_columns, is_embedding, is_output) in stage["shapes"].items()
        }
        shapes.update(self.shapes)
        return replace(
            self,
            shapes=shapes,
            unread=tuple(path for stage in stages for path in stage["unread"] if path not in shapes),
            other_classes={path: name for stage in stages for path, name in stage["other_classes"].items()},
        )

    def without_weights(self) -> AdaptedModules:
        """Return what adapters can be checked by in another process."""
        return replace(
            self, modules={}, shapes={path: replace(shape, shard=None) for path, shape in self.shapes.items()}
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What a caller may want to know, one sentence for each."""
        most = f"up to {self.options.num_slots} at once, of rank {self.options.max_rank} or less"
        found = [f"adapters: {most}, in {len(self.shapes)} modules"]
        if self.unread:
            where = f"{len(self.unread)} modules, such as {self.unread[0]}"
            found.append(f"adapters: the model computes {where}, in ways of its own; adapters for them are refused")
        return tuple(found)

    def only_read(self, read: Collection[int]) -> AdaptedModules:
        """Return the modules whose stacks are among the tensors that compiled pieces read, given by id.

        Raises `AssertionError` beside shapes of other stages, whose pieces are not known here.
        """
        assert self.modules.keys() == self.shapes.keys(), "with_stages comes afterwards"
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
            a, b = self.shapes[path].of_rank(*found)
            rank = a.shape[0]
            if self.shapes[path].is_embedding:
                stacks.lora_a[slot, :, :rank].copy_(a.T, non_blocking=True)
            else:
                stacks.lora_a[slot, :rank].copy_(a, non_blocking=True)
            stacks.lora_b[slot, :, :rank].copy_(b, non_blocking=True)
            stacks.lora_ranks[slot] = rank


def adapt_modules(
    model: nn.Module,
    options: LoraOptions,
    *,
    dtype: torch.dtype,
    device: torch.device,
    shards: Mapping[str, Shard] | None = None,
    is_stage: bool = False,
) -> AdaptedModules:
    """Give the linears and embeddings of `model` stacks of matrices, in place.

    `shards`: by a weight's name the part of it that the rank holds, which the model has been cut to. `is_stage`: other
    stages of a pipeline have other modules, so `check_targets` has to be called with those of all.

    Raises `ConfigError` for a name in `options.target_modules` that no such module has, and `UnsupportedModel` if there
    is no such module at all.
    """
    target_modules = options.target_modules
    transformers_model: Any = model
    output = transformers_model.get_output_embeddings()
    found: dict[str, nn.Module] = {}
    shapes: dict[str, Adaptable] = {}
    for path, module in model.named_modules():
        if _plain_class(module) not in _CLASSES or not _is_target(path, target_modules):
            continue
        found[path] = module
        shard = (shards or {}).get(f"{path}.weight")
        shapes[path] = _shape(module, shard, is_output=module is output)
    if not is_stage:
        check_targets(type(model).__name__, target_modules, found, adaptable_paths(model))
    for path, module in found.items():
        _adapt(module, shapes[path], options, dtype, device)
    others = {path: type(module).__name__ for path, module in model.named_modules() if _has_matrix(module)}
    return AdaptedModules(found, shapes, options, other_classes=others)


def check_targets(
    model_name: str, target_modules: Sequence[str] | None, paths: Collection[str], adaptable: Collection[str]
) -> None:
    """Raise `ConfigError` for a target that is none of `paths`, and `UnsupportedModel` if there are none.

    `paths`: of the modules that adapters may change; `adaptable`: of those that they could change.
    """
    for name in target_modules or ():
        if not any(_is_target(path, (name,)) for path in paths):
            raise ConfigError(
                f"lora_target_modules has {name!r}, and {model_name} has no such linear layer or embedding; "
                f"its are named {', '.join(sorted({path.rpartition('.')[2] for path in adaptable}))}."
            )
    if not paths:
        raise UnsupportedModel(f"{model_name} has no linear layer that an adapter can change.")


def rows_of_weight(module: Any, index: torch.Tensor) -> torch.Tensor:
    """Return rows of the weight of an adapted module, dequantised, `[len(index), size]` float32 on the CPU."""
    if isinstance(module, QuantisedLinear | QuantisedEmbedding):
        packed = PackedWeight(values=module.weight_packed, scale=module.weight_scale, block=module.block)
        method = METHODS[module.scheme]
        return (
            method.unpack(packed).float().cpu()[index]
            if isinstance(module, nn.Linear)
            else (method.rows(packed, index.to(module.weight_packed.device)).float().cpu())
        )
    weight: torch.Tensor = module.weight
    return weight[index.to(weight.device)].float().cpu()


def _has_matrix(module: nn.Module) -> bool:
    """Return whether a module of a class that no adapter can change here has a weight that peft might change."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim > 1 and _plain_class(module) not in (*_CLASSES, *_CLASSES.values())


def _is_target(path: str, names: Sequence[str] | None) -> bool:
    return names is None or any(path == name or path.endswith(f".{name}") for name in names)


def adaptable_paths(model: nn.Module) -> list[str]:
    """Return the paths of all modules that adapters could change."""
    kinds = (*_CLASSES, *_CLASSES.values())
    return [path for path, module in model.named_modules() if _plain_class(module) in kinds]


def _plain_class(module: nn.Module) -> Any:
    """Return the class of a module; of one that has a rank's part of the weight, the class that it had before."""
    return getattr(type(module), "plain_class", type(module))


def _weight_shape(module: Any) -> tuple[int, int]:
    """Return the shape of a module's weight, which may be stored in another one; on a rank, of its part."""
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    return module.out_features, module.in_features


def _shape(module: Any, shard: Shard | None, *, is_output: bool) -> Adaptable:
    """Return the shape that a module's matrices have on all ranks together."""
    local = _weight_shape(module)
    rows, size = local if shard is None else shard.whole_shape(local)
    is_embedding = isinstance(module, nn.Embedding)
    return Adaptable(
        size=rows if is_embedding else size,
        num_columns=size if is_embedding else rows,
        is_embedding=is_embedding,
        is_output=is_output,
        shard=shard,
    )


def _adapt(module: Any, shape: Adaptable, options: LoraOptions, dtype: torch.dtype, device: torch.device) -> None:
    num_slots, max_rank = options.num_slots, options.max_rank
    adapted, cut_class = _CLASSES[_plain_class(module)], type(module)
    rows, size = _weight_shape(module)
    if shape.is_embedding:
        of_a, num_columns = (rows, max_rank), size
    else:
        of_a, num_columns = (max_rank, size), rows
    module.__class__ = cut_class.over(adapted) if hasattr(cut_class, "plain_class") else adapted
    module.lora_rows = LOGITS if shape.is_output else TOKENS
    for name, sizes, kind in (
        ("lora_a", (num_slots, *of_a), dtype),
        ("lora_b", (num_slots, num_columns, max_rank), dtype),
        ("lora_ranks", (num_slots,), torch.int32),
    ):
        module.register_buffer(name, torch.zeros(sizes, dtype=kind, device=device), persistent=False)
