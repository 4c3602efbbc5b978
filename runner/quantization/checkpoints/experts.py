"""Reading of the quantised weights of experts: those of a layer are put together from tensors of files when needed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from piecegraph.errors import CheckpointError
from piecegraph.runner.quantization.checkpoints.headers import OfOneExpert, check_tensors_of
from piecegraph.runner.quantization.checkpoints.stored import StoredCheckpoint, WeightReader, lazy_weight, read_weight
from piecegraph.runner.quantization.expert_names import PROJECTIONS, ExpertNames, Place
from piecegraph.runner.quantization.experts import of_linear, put, stack_of, weights_of
from piecegraph.runner.quantization.methods.all_methods import METHODS
from piecegraph.runner.quantization.methods.linear_method import DoesNotFit, PackedWeight, Scheme
from piecegraph.runner.quantization.methods.shard import Shard

Slices = dict[str, Any]
"""Stored tensors by name, each of which is read when it is indexed."""


@dataclass(frozen=True, slots=True)
class _Linear:
    """The stored tensors of one linear of an expert, or of one projection of all experts."""

    path: str
    parts: Slices  # by the last part of their names


class ExpertFiles:
    """The tensors in files of the experts of a model that `read_model` makes.

    `model` has `QuantisedExperts` under the paths in `schemes`, cut to the rank's part. `shards` are those of float
    parameters by name. `is_elsewhere` says of the name of a float parameter whether other ranks have it.
    """

    def __init__(
        self,
        model: Any,
        stored: Mapping[str, Any],
        checkpoint: WeightReader,
        schemes: Mapping[str, Scheme],
        dtype: torch.dtype,
        shards: Mapping[str, Shard],
        is_elsewhere: Callable[[str], bool],
    ) -> None:
        self._model, self._checkpoint, self._schemes = model, checkpoint, schemes
        self._dtype, self._shards, self._is_elsewhere = dtype, shards, is_elsewhere
        self._places: dict[str, Place | None] = {}
        self._found: dict[tuple[str, str, int | None], dict[int, _Linear]] = {}
        self.others: Slices = {}  # tensors that belong to no quantised experts
        for name, tensor in stored.items():
            if not self._take(name, tensor):  # a stage without experts leaves out those of the others
                self.others[name] = tensor

    @functools.cached_property
    def _names(self) -> ExpertNames:
        return ExpertNames(self._model, self._schemes)

    def _take(self, name: str, tensor: Any) -> bool:
        """Return whether `name` is of quantised experts, which are kept, or of experts that other ranks have."""
        path, _, suffix = name.rpartition(".")
        if suffix in self._checkpoint.suffixes:
            place = self._place(f"{path}.weight")
            if place is not None and place.expert is not None:
                return self._keep(place, path, suffix, tensor)
        for suffix in self._checkpoint.of_all_experts:
            path = name.removesuffix(suffix)
            if name.endswith(suffix) and path.endswith(PROJECTIONS):
                place = self._place(path)
                if place is not None:
                    return self._keep(place, path, suffix, tensor)
        return False

    def _place(self, name: str) -> Place | None:
        if name not in self._places:
            self._places[name] = self._names.place_of(name)
        return self._places[name]

    def _keep(self, place: Place, path: str, suffix: str, tensor: Any) -> bool:
        if place.module not in self._schemes:
            return self._is_elsewhere(f"{place.module}.{place.projection}")
        linears = self._found.setdefault((place.module, place.projection, place.expert), {})
        linears.setdefault(place.part, _Linear(path, {})).parts[suffix] = tensor
        return True

    def named(self) -> dict[str, Any]:
        """Return the tensors of all quantised experts by the names of the model's parameters, read when indexed."""
        found: dict[str, Any] = {}
        for module in self._schemes:
            for projection in PROJECTIONS:
                values, scale = lazy_weight(self._reader(module, projection))
                found[f"{module}.{projection}_packed"], found[f"{module}.{projection}_scale"] = values, scale
        return found

    def problem(self) -> str | None:
        """Return what is missing or too much in the files, or None."""
        for module in self._schemes:
            for projection in PROJECTIONS:
                total, experts, _ = self._experts(module, projection)
                of_all = self._found.get((module, projection, None))
                if of_all is not None:
                    sizes = {next(iter(part.get_shape()), 0) for part in of_all[0].parts.values()}
                    if sizes != {total}:
                        return f"{of_all[0].path} has {sorted(sizes)} experts in the files, and the model {total}"
                    continue
                for number in experts:
                    linears = self._found.get((module, projection, number), {})
                    for part, name in enumerate(self._names.linears(module, projection)):
                        if part not in linears:
                            return f"the files have no tensors of {name.replace('*', str(number))}"
        for module, projection, expert in self._found:
            if expert is not None and expert >= (total := self._experts(module, projection)[0]):
                return f"the files have the expert {expert} of {module}, and the model {total} experts"
        return None

    def check_headers(self, checkpoint: StoredCheckpoint, shapes: Mapping[tuple[str, ...], tuple[int, int]]) -> None:
        """Raise `CheckpointError` unless the tensors are those that the format needs; call it if `problem` has none.

        `shapes`: of one expert's weights in floats, by `(name of the parameter,)`. Reads headers, and no weights.
        """
        for (module, projection, expert), linears in self._found.items():
            rows, size = shapes[(f"{module}.{projection}",)]
            if expert is not None:
                rows //= len(self._names.linears(module, projection))
            for linear in linears.values():
                parts = linear.parts
                if expert is None:
                    parts = {name: OfOneExpert(part) for name, part in parts.items()}
                wanted = checkpoint.tensors(linear.path, self._schemes[module], (rows, size), parts)
                check_tensors_of(linear.path, parts, wanted)

    def _experts(self, module: str, projection: str) -> tuple[int, range, Shard | None]:
        """Return how many experts all ranks have, which are read, and what part of each is held; None: all of it."""
        shard = self._shards.get(f"{module}.{projection}")
        if shard is not None and shard.dim == -3:
            return shard.full_size, range(*shard.parts[0][:2]), None
        owner = self._model.get_submodule(module)
        held = weights_of(owner, projection).values.shape[0]
        return held, range(held), None if shard is None else of_linear(owner, projection, shard)

    def _reader(self, module: str, projection: str) -> Callable[[], PackedWeight]:
        _, experts, shard = self._experts(module, projection)
        scheme = self._schemes[module]
        model = weights_of(self._model.get_submodule(module), projection)
        num_held = model.values.shape[0]

        def read() -> PackedWeight:
            found: PackedWeight | None = None
            for place, number in enumerate(experts):
                one, path = self._expert(module, projection, number, scheme)
                try:
                    one = one if shard is None else METHODS[scheme.method].cut(one, shard)
                    found = stack_of(one, num_held) if found is None else found
                    put(found, place, one)
                except DoesNotFit as error:
                    raise CheckpointError(
                        f"{path} is of another shape than those of other experts: {error}. Check the checkpoint."
                    ) from error
            if found is None:  # a rank whose experts are all padding
                values, scale = (torch.zeros(each.shape, dtype=each.dtype) for each in (model.values, model.scale))
                found = PackedWeight(values=values, scale=scale)
            return found

        return read

    def _expert(self, module: str, projection: str, number: int, scheme: Scheme) -> tuple[PackedWeight, str]:
        """Return the whole weight of an expert, its rows in the model's order, and the path of its first linear."""
        of_all = self._found.get((module, projection, None))
        if of_all is not None:
            linear = of_all[0]
            parts = {name: part[number] for name, part in linear.parts.items()}
            if "" in parts:  # floats, as the model has them
                weight = parts.pop("")
                parts["weight"] = weight.t() if self._model.get_submodule(module).is_transposed else weight
            return read_weight(self._checkpoint, linear.path, parts, scheme, self._dtype), linear.path
        linears = [linear for _, linear in sorted(self._found[module, projection, number].items())]
        packed = []
        for linear in linears:
            parts = {name: part[...] for name, part in linear.parts.items()}
            packed.append(read_weight(self._checkpoint, linear.path, parts, scheme, self._dtype))
        joined = (torch.cat([getattr(each, name) for each in packed]) for name in ("values", "scale"))
        values, scale = joined if len(packed) > 1 else (packed[0].values, packed[0].scale)
        return PackedWeight(values=values, scale=scale, block=packed[0].block), linears[0].path
