"""Replacement of a running engine's weights in place, so that nothing is compiled or captured again."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from piecegraph.errors import CheckpointError, ConfigError, UsageError, did_you_mean
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.models.config.load_config import load_config
from piecegraph.runner.models.load import load_model
from piecegraph.runner.startup.drafts.head import CompiledHead

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from piecegraph.compiler.compiled_model import CompiledModel
    from piecegraph.runner.models.load import LoadedModel
    from piecegraph.runner.startup.loaded import Loaded

NewWeights = str | Path | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
"""A folder, .gguf file or hub id; or tensors under the names of the model's `state_dict`, as a mapping or as pairs."""

_FIELDS_FREE_TO_DIFFER = frozenset(
    {"_name_or_path", "architectures", "dtype", "name_or_path", "torch_dtype", "transformers_version", "use_cache"}
)
"""Fields of a config that may differ between a model and a later version of the model."""


class _Part(NamedTuple):
    """A model of the engine that is given other weights: the one that is served, or the one that drafts for it."""

    source: ModelSource
    model: LoadedModel
    compiled: CompiledModel
    seed: int
    name: str  # before each of its tensors' names in an error


def reload_weights(loaded: Loaded, weights: NewWeights | None, draft_weights: NewWeights | None = None) -> int:
    """Replace the weights of an engine's model in place, and return how many tensors were written.

    `weights`: None reads the model's own source again, and that of a draft model. `draft_weights`: of the draft model,
    which keeps its weights if only `weights` are given. The prefix cache is discarded. Raises `UsageError` while
    requests are unfinished, `ConfigError` if another model's config differs, and `CheckpointError` for a name that the
    model does not have or a tensor that does not fit; with mappings or files nothing has been written then.
    """
    if loaded.model.rank_plan is not None or loaded.model.stage is not None:
        raise UsageError(
            "reload_weights is not yet available with several ranks (tensor_parallel_size, pipeline_parallel_size); "
            "make a new LLM."
        )
    if draft_weights is not None and loaded.draft is None:
        raise UsageError("draft_weights are given, and no model drafts here (speculative_config); leave them out.")
    if draft_weights is not None and isinstance(loaded.draft, CompiledHead):
        raise UsageError(
            "draft_weights are given, and a head drafts, whose weights are read at the start only; make a new LLM."
        )
    if loaded.engine.has_unfinished:
        raise UsageError(
            f"{len(loaded.engine.requests)} requests are unfinished, and their cached keys and values depend on the "
            "old weights. Let them finish, or abort them, before the weights are loaded again."
        )
    parts = [(_Part(loaded.source, loaded.model, loaded.compiled, loaded.seed, ""), weights)]
    is_model = loaded.draft is not None and not isinstance(loaded.draft, CompiledHead)
    if loaded.draft is not None and is_model and (weights is None or draft_weights is not None):
        draft = loaded.draft
        part = _Part(draft.config.source, draft.loaded, draft.model.compiled, draft.config.seed, "the draft model's ")
        parts.append((part, draft_weights))
    read = [(part, _checked(part, each)) for part, each in parts]
    device = loaded.model.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # a step that was launched ahead still reads the old weights
    num_written = 0
    try:
        for part, each in read:
            num_written += _write(part, each)
    finally:
        loaded.engine.scheduler.reset_prefix_cache()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return num_written


def _checked(
    part: _Part, weights: NewWeights | None
) -> Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]:
    """Return tensors by name, all of which fit; pairs are returned as they are, and are checked one by one."""
    if weights is None or isinstance(weights, str | Path):
        weights = _read(part, weights)
    if isinstance(weights, Mapping):
        targets: dict[str, torch.Tensor] = part.model.model.state_dict()
        for name, tensor in weights.items():
            _check(part.name, name, tensor, targets)
    return weights


def _write(part: _Part, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> int:
    """Write the tensors into those of the model, and return how many there were."""
    targets: dict[str, torch.Tensor] = part.model.model.state_dict()
    written: dict[str, None] = {}
    try:
        for name, tensor in weights.items() if isinstance(weights, Mapping) else weights:
            _check(part.name, name, tensor, targets, written)
            with torch.no_grad():
                targets[name].copy_(tensor)
            written[name] = None
    finally:
        if written:
            part.compiled.refresh_weights()  # in case a tensor that was written had been moved
    return len(written)


def _read(part: _Part, model: str | Path | None) -> Mapping[str, torch.Tensor]:
    """Return the weights of `model`, another version of the part's, or of the part's own source, on the CPU."""
    source = part.source
    if model is not None:
        load_format = "auto" if source.load_format in ("dummy", "gguf") else source.load_format
        source = replace(source, model=os.path.expanduser(model), revision=None, load_format=load_format)
        _check_config(load_config(source), part.model.config, source)
    config, dtype = copy.deepcopy(part.model.config), part.model.dtype
    quantised = part.model.quantisation
    is_read = (written := getattr(load_config(source), "quantization_config", None)) is not None
    if is_read:  # weights of the model's own source, which are stored as they are used
        config.quantization_config = written
    read = load_model(
        source,
        config,
        dtype=dtype,
        device=torch.device("cpu"),
        seed=part.seed,
        quantization=None if quantised is None or is_read else quantised.scheme,
        runs_on=part.model.device,
    )
    state: Mapping[str, torch.Tensor] = read.model.state_dict()
    return state


def _check_config(found: PreTrainedConfig, wanted: PreTrainedConfig, source: ModelSource) -> None:
    """Raise `ConfigError` if a model with the config `found` would not compute like the compiled one."""
    left, right = (dict(_fields(config)) for config in (found, wanted))
    differing = sorted(name for name in {*left, *right} if left.get(name) != right.get(name))
    if differing:
        first = differing[0]
        raise ConfigError(
            f"the config of {source.model!r} differs from the compiled model's in {', '.join(differing)} "
            f"({first}: {left.get(first)!r}, and {right.get(first)!r}). Only another version of the same model can "
            "take its place; make a new LLM for this one."
        )


def _fields(config: PreTrainedConfig) -> Iterable[tuple[str, Any]]:
    return (
        (name, value)
        for name, value in config.to_dict().items()
        if name not in _FIELDS_FREE_TO_DIFFER and not name.endswith("token_id")
    )


def _check(
    of: str,
    name: str,
    tensor: torch.Tensor,
    targets: Mapping[str, torch.Tensor],
    written: Mapping[str, None] | None = None,
) -> None:
    """Raise `CheckpointError` if `tensor` cannot be written to the target with that name; `of` precedes the name."""
    after = f" {len(written)} tensors before it were written." if written else ""
    if name not in targets:
        whose = of.removesuffix("'s ") or "the model"
        raise CheckpointError(f"{whose} has no tensor {name!r}.{did_you_mean(name, list(targets))}{after}")
    target = targets[name]
    if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
        raise CheckpointError(f"{of}{name} is {type(tensor).__name__} without values; give a tensor.{after}")
    if tensor.shape != target.shape:
        raise CheckpointError(
            f"{of}{name} has shape {tuple(tensor.shape)}; the model's is {tuple(target.shape)}. A reload cannot change "
            f"shapes; make a new LLM.{after}"
        )
    if tensor.dtype != target.dtype and not (tensor.is_floating_point() and target.is_floating_point()):
        raise CheckpointError(
            f"{of}{name} is {tensor.dtype}, which cannot be converted to the model's {target.dtype}.{after}"
        )
