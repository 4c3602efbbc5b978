"""One rank's part of a safetensors checkpoint, read through transformers' own loading.

transformers renames and converts the tensors of a checkpoint (it merges experts, for one). It takes tensors as objects
that are read when they are indexed; ours read the rank's ranges of the file only. A tensor that is converted by an
operation that we cannot divide is refused, and the caller then loads the model whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from piecegraph.runner.quantization.expert_names import expert_of, merges_experts
from piecegraph.runner.quantization.methods.shard import Shard
from piecegraph.runner.tensor_parallel.expert_ranks import ExpertRanks
from piecegraph.runner.tensor_parallel.plan import RankPlan, rank_plan
from piecegraph.runner.tensor_parallel.sharded_modules import shard_model

_DIVISIBLE = frozenset({"MergeModulelist", "Concatenate", "_IdentityOp"})
"""Conversions that join tensors along dims that are not divided, or along that in which they are packed."""


class CannotSlice(Exception):
    """The checkpoint cannot be read in parts; the message is the reason."""


class RankSlice:
    """A tensor of a file, of which indexing reads the rank's part."""

    def __init__(self, whole: Any, shard: Shard | None, bytes_read: list[int]) -> None:
        self._whole = whole  # a slice object of safetensors
        self._shard = shard
        self._bytes_read = bytes_read

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        shape: list[int] = self._whole.get_shape()
        return shape

    def get_dtype(self) -> str:
        """Return safetensors' name of the dtype."""
        return str(self._whole.get_dtype())

    def __getitem__(self, index: object) -> torch.Tensor:
        assert index is Ellipsis, index
        shard, shape = self._shard, self.get_shape()
        if shard is None or shape[shard.dim] != shard.full_size:  # of another shape: transformers reports it
            tensor: torch.Tensor = self._whole[...]
            self._bytes_read[0] += tensor.nbytes
            return tensor
        found = []
        before = (slice(None),) * (len(shape) + shard.dim)
        for start, stop, size in shard.parts:
            part = self._whole[(*before, slice(start, stop))]
            self._bytes_read[0] += part.nbytes
            found.append(part)
            if size > stop - start:
                missing = list(part.shape)
                missing[shard.dim] = size - (stop - start)
                found.append(part.new_zeros(missing))
        return torch.cat(found, shard.dim)


def rank_model(
    model_class: type[Any],
    config: Any,
    files: Sequence[Path],
    rank: int,
    num_ranks: int,
    prepare: Callable[[Any], None] = lambda model: None,
    experts: ExpertRanks | None = None,
    **options: Any,
) -> tuple[Any, dict[str, Any], RankPlan, int]:
    """Return one rank's model, transformers' loading information, the plan, and the number of bytes read.

    `prepare` is called on each model without weights that is made, before it is divided; it may take modules away, and
    what only these would read is not read. `experts`: as for `rank_plan`. `options` are those of
    `from_pretrained`. Raises `CannotSlice`, `UnsupportedModel`, and what loading raises.
    """
    plans: list[RankPlan] = []

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, *args, **kwargs)
        prepare(self)
        plans.append(rank_plan(self, rank, num_ranks, experts=experts))
        shard_model(self, plans[-1])

    own: Any = type(model_class.__name__, (model_class,), {"__init__": construct, "__module__": model_class.__module__})
    bytes_read = [0]
    with torch.device("meta"):
        blank = model_class(config)
        names = set(blank.state_dict())
        prepare(blank)
        others = names - set(blank.state_dict())
        plan = rank_plan(blank, rank, num_ranks, experts=experts)
    with _opened(files) as tensors:
        state = {
            name: RankSlice(whole, shard, bytes_read)
            for name, whole, shard in _with_shards(blank, tensors, plan, others)
        }
        model, info = own.from_pretrained(
            None, config=config, state_dict=state, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    model.__class__ = model_class
    return model, info, plans[-1], bytes_read[0]


class RankDivision:
    """What one rank holds of a model with quantised weights, as `read_model` asks for it.

    Quantised weights are read whole, one after another, since a scale may be of values on several ranks; of all else
    the rank's ranges are read.
    """

    def __init__(
        self,
        model_class: type[Any],
        config: Any,
        rank: int,
        num_ranks: int,
        prepare: Callable[[Any], None],
        experts: ExpertRanks | None,
    ) -> None:
        """`prepare` and `experts` are those of `rank_model`."""
        self._rank, self._num_ranks, self._experts = rank, num_ranks, experts
        self._prepare = prepare
        self._bytes_read = [0]
        self._plan: RankPlan | None = None
        with torch.device("meta"):
            self._blank = model_class(config)
        names = set(self._blank.state_dict())
        prepare(self._blank)
        self._others = names - set(self._blank.state_dict())

    @property
    def plan(self) -> RankPlan:
        """What the rank holds of the model that has been read."""
        assert self._plan is not None, "no model has been read yet"
        return self._plan

    @property
    def bytes_read(self) -> int:
        """The bytes that have been read of files."""
        return self._bytes_read[0]

    def shards(self, model: Any) -> Mapping[str, Shard]:
        """Take away modules of other stages, and return the rank's part of each parameter, by name."""
        self._prepare(model)
        self._plan = rank_plan(model, self._rank, self._num_ranks, experts=self._experts)
        return self._plan.shards

    def cut(self, model: Any) -> None:
        """Cut the parameters of a model to the rank's parts."""
        shard_model(model, self.plan)

    def held(self, stored: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the tensors but those of quantised weights of other stages; what is read of them is counted."""
        elsewhere = {name.removesuffix(".weight") for name in self._others if name.endswith(".weight")}
        return {
            name: _Counted(whole, self._bytes_read)
            for name, whole in stored.items()
            if name.rpartition(".")[0] not in elsewhere
        }

    def parts(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Return tensors of plain parameters so that reading them reads the rank's part; all others as they are."""
        return {
            name: whole if shard is None else RankSlice(whole, shard, [0])
            for name, whole, shard in _with_shards(self._blank, stored, self.plan, self._others)
        }

    def is_elsewhere(self, name: str) -> bool:
        """Return whether the parameter `name` is of a module of another stage."""
        return name in self._others


class _Counted:
    """A tensor of a file; the bytes that are read of it are added to a count."""

    def __init__(self, whole: Any, bytes_read: list[int]) -> None:
        self._whole, self._bytes_read = whole, bytes_read

    def get_shape(self) -> list[int]:
        """Return the shape of the tensor."""
        return list(self._whole.get_shape())

    def get_dtype(self) -> str:
        """Return safetensors' name of the dtype."""
        return str(self._whole.get_dtype())

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._whole[index]
        self._bytes_read[0] += tensor.nbytes
        return tensor


@contextmanager
def _opened(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield the tensors of the files by name, none of them read yet."""
    from safetensors import safe_open

    with ExitStack() as opened:
        tensors: dict[str, Any] = {}
        for file in files:
            handle = opened.enter_context(safe_open(str(file), framework="pt"))
            tensors.update({name: handle.get_slice(name) for name in handle.keys()})  # noqa: SIM118  no mapping
        yield tensors


def _with_shards(
    model: Any, tensors: Mapping[str, Any], plan: RankPlan, others: set[str]
) -> Iterator[tuple[str, Any, Shard | None]]:
    """Yield each tensor of a checkpoint with the part of it that the rank reads; None: all of it.

    Tensors of parameters in `others`, which other ranks hold, are left out.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    state = {**dict.fromkeys(others), **model.state_dict()}  # renaming looks at names alone
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    for name, whole in tensors.items():
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target in others:
            continue
        shard = plan.shards.get(target)
        if shard is None or pattern is None:
            yield name, whole, shard
            continue
        num_dims = len(state[target].shape)
        if shard.dim == -num_dims and merges_experts(by_pattern[pattern]):
            if shard.num_read < shard.size:
                raise CannotSlice(f"{target} has fewer experts here than on other ranks")
            expert = expert_of(name, pattern)
            if expert is None:
                raise CannotSlice(f"{name} does not say of which expert it is")
            if expert in range(*shard.parts[0][:2]):
                yield name, whole, None
            continue
        yield name, whole, _source_shard(target, shard, by_pattern[pattern], num_dims)


def _source_shard(target: str, shard: Shard, converter: Any, num_dims: int) -> Shard:
    """Return the part of a source of a converted tensor, of which each holds one of the packed tensors or all of them.

    Dims are counted from the end, so a merge along a new first dim changes nothing.
    """
    names = [type(each).__name__ for each in converter.operations]
    if not _DIVISIBLE.issuperset(names):
        raise CannotSlice(f"{target} is converted by {', '.join(names)}")
    joins = [each for each in converter.operations if type(each).__name__ == "Concatenate"]
    if not joins:
        return shard
    num_sources = len(converter.source_patterns)
    is_along = len(joins) == 1 and joins[0].dim in (shard.dim, shard.dim + num_dims)
    if not is_along or len(shard.parts) != num_sources or len({each[2] for each in shard.parts}) != 1:
        raise CannotSlice(f"{target} is joined of {num_sources} tensors in another dim than it is divided in")
    size = shard.full_size // num_sources
    return Shard(dim=shard.dim, full_size=size, parts=shard.parts[:1])
