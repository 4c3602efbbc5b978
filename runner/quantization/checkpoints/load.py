"""Reading of a model whose weights are quantised in the files, or quantised one by one while they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from piecegraph.errors import CheckpointError
from piecegraph.runner.quantization.checkpoints.experts import ExpertFiles
from piecegraph.runner.quantization.checkpoints.stored import Parts, StoredCheckpoint, check_headers, named_weights
from piecegraph.runner.quantization.methods.all_methods import METHODS
from piecegraph.runner.quantization.methods.linear_method import NotFinite, PackedWeight, Scheme
from piecegraph.runner.quantization.methods.shard import Shard
from piecegraph.runner.quantization.online import online_schemes
from piecegraph.runner.quantization.quantise import (
    QuantisationSummary,
    SchemeOf,
    bytes_by_dtype,
    quantise_model,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class CannotStream(Exception):
    """The names in the files are not those of the model's modules, so weights cannot be quantised one by one."""


class PlainCheckpoint:
    """A checkpoint of floats, each weight of which is quantised when it is read."""

    marks: ClassVar[tuple[str, ...]] = ("weight",)
    suffixes: ClassVar[frozenset[str]] = frozenset(("weight",))
    of_all_experts: ClassVar[tuple[str, ...]] = ("",)

    def __init__(self, quantization: str) -> None:
        self.scheme_of: SchemeOf = online_schemes(quantization)
        self._quantization = quantization

    @property
    def quant_method(self) -> str:
        """The value of `quantization`."""
        return self._quantization

    def packed(self, path: str, parts: Parts, scheme: Scheme, dtype: torch.dtype) -> PackedWeight:
        """Return the weight quantised. Raises `CheckpointError` for one that is not finite."""
        try:
            return METHODS[scheme.method].pack(parts["weight"].to(dtype).contiguous(), scheme)
        except NotFinite as error:
            raise CheckpointError(
                f"{path}.weight cannot be quantised to {self.quant_method}: {error}. Check the checkpoint, or leave "
                "quantization out."
            ) from error


class Division(Protocol):
    """What a rank holds of a model, and reads of its files."""

    def shards(self, model: Any) -> Mapping[str, Shard]:
        """Take away the modules that the rank does not hold, and return its part of each parameter, by name."""

    def cut(self, model: Any) -> None:
        """Cut the parameters of a model, whose weights are quantised by now, to the rank's parts."""

    def held(self, stored: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return those tensors of the files, by name, that belong to modules which the rank holds."""

    def parts(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Return tensors of plain parameters so that reading them reads the rank's part; all others as they are."""

    def is_elsewhere(self, name: str) -> bool:
        """Return whether the parameter `name` is of a module that other ranks hold, and this one does not."""


class _WholeModel:
    """The division of a model that one rank holds."""

    def shards(self, model: Any) -> Mapping[str, Shard]:
        """Return none."""
        return {}

    def cut(self, model: Any) -> None:
        """Do nothing."""

    def held(self, stored: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return all."""
        return stored

    def parts(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Return all as they are."""
        return dict(stored)

    def is_elsewhere(self, name: str) -> bool:
        """Return False."""
        return False


WHOLE_MODEL: Division = _WholeModel()


@contextmanager
def opened_files(files: Sequence[Path]) -> Iterator[Mapping[str, Any]]:
    """Yield the tensors of safetensors files by name; each is read when it is indexed."""
    from safetensors import safe_open

    with ExitStack() as stack:
        tensors: dict[str, Any] = {}
        for file in files:
            handle = stack.enter_context(safe_open(str(file), framework="pt"))
            tensors.update((name, handle.get_slice(name)) for name in handle.keys())  # noqa: SIM118  no mapping
        yield tensors


def read_model(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    stored: Mapping[str, Any],
    checkpoint: StoredCheckpoint | PlainCheckpoint,
    *,
    dtype: torch.dtype,
    attention: str,
    device_type: str,
    division: Division = WHOLE_MODEL,
) -> tuple[Any, Mapping[str, Any], QuantisationSummary]:
    """Return the model, transformers' loading information, and the summary of what is quantised.

    `stored`: the tensors by name. Each is read, and quantised if it is to be, when its parameter is filled, so that
    there is never a copy of all weights in floats. `device_type`: where the model will run. `division`: the rank's part
    of the model. Raises `CannotStream` for a plain checkpoint with other names than the model's.
    """
    base: Any = model_class
    summaries: list[QuantisationSummary] = []
    state: dict[str, Any] = {}
    is_stored = not isinstance(checkpoint, PlainCheckpoint)

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)
        _tie(self)
        shards = division.shards(self)
        method, scheme_of = checkpoint.quant_method, checkpoint.scheme_of
        options: dict[str, Any] = {"device_type": device_type, "is_read": True, "must_fit": is_stored, "shards": shards}
        summary = quantise_model(self, method, scheme_of, **options)
        self.all_tied_weights_keys = dict(_tied(self.all_tied_weights_keys, summary.methods))
        summaries.append(summary)
        division.cut(self)
        state.update(_state(self, division.held(stored), checkpoint, summary, dtype, shards, division))

    own: Any = type(base.__name__, (base,), {"__init__": construct, "__module__": base.__module__})
    model, info = own.from_pretrained(
        None,
        config=config,
        state_dict=state,
        dtype=dtype,
        attn_implementation=attention,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    model.__class__ = model_class
    return model, info, replace(summaries[-1], bytes_by_dtype=bytes_by_dtype(model))


def _tie(model: Any) -> None:
    """Let modules share the parameters that transformers ties, which it does only when weights have been loaded."""
    for name, source in model.all_tied_weights_keys.items():
        owner, _, short = name.rpartition(".")
        model.get_submodule(owner)._parameters[short] = model.get_parameter(source)


def _tied(tied: Mapping[str, str], quantised: Mapping[str, Scheme]) -> Iterator[tuple[str, str]]:
    """Return the names of tied parameters, the later ones by the first ones, with those of quantised weights."""
    for pair in tied.items():
        path = pair[0].removesuffix(".weight")
        if path == pair[0] or path not in quantised:
            yield pair
        else:
            yield from ((pair[0] + part, pair[1] + part) for part in ("_packed", "_scale"))


def _state(
    model: torch.nn.Module,
    slices: Mapping[str, Any],
    checkpoint: StoredCheckpoint | PlainCheckpoint,
    summary: QuantisationSummary,
    dtype: torch.dtype,
    shards: Mapping[str, Shard],
    division: Division,
) -> dict[str, Any]:
    def cut(path: str, scheme: Scheme, packed: PackedWeight) -> PackedWeight:
        shard = shards.get(f"{path}.weight")
        return packed if shard is None else METHODS[scheme.method].cut(packed, shard)

    files = ExpertFiles(model, slices, checkpoint, summary.experts, dtype, shards, division.is_elsewhere)
    problem = files.problem()
    if not isinstance(checkpoint, PlainCheckpoint):
        if problem is not None:
            raise CheckpointError(f"{problem}. Check that the config belongs to the files, or copy them again.")
        with torch.device("cpu"):  # small tensors are compared; the model is being made on the meta device
            files.check_headers(checkpoint, summary.shapes)
            of_linears = {paths: shape for paths, shape in summary.shapes.items() if paths[0] in summary.methods}
            ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
            check_headers(files.others, checkpoint, summary.methods, of_linears, ignored)
        return {**division.parts(named_weights(files.others, checkpoint, summary.methods, dtype, cut)), **files.named()}
    paths = {path for path in summary.methods if f"{path}.weight" in slices}
    parameters = dict(model.named_parameters())  # of shared ones, the first name alone
    if missing := [path for path in summary.methods if f"{path}.weight_packed" in parameters and path not in paths]:
        raise CannotStream(f"no tensor is named {missing[0]}.weight")
    if problem is not None:
        raise CannotStream(problem)
    quantised = {f"{path}.weight": slices[f"{path}.weight"] for path in paths}
    others = {name: stored for name, stored in files.others.items() if name not in quantised}
    named = named_weights(quantised, checkpoint, summary.methods, dtype, cut)
    return {**division.parts(others), **named, **files.named()}
