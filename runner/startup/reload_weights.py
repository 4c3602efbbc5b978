"""Replacement of a running engine's weights in place, so that nothing is compiled or captured again."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from piecegraph.errors import CheckpointError, ConfigError, PiecegraphError, UsageError, did_you_mean
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.models.config.load_config import load_config
from piecegraph.runner.models.load import load_model
from piecegraph.runner.startup.drafts.head import CompiledHead
from piecegraph.runner.tensor_parallel.parallel import weights_digest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from piecegraph.compiler.compiled_model import CompiledModel
    from piecegraph.runner.engine.engine import Engine
    from piecegraph.runner.models.load import LoadedModel
    from piecegraph.runner.startup.loaded import Loaded

NewWeights = str | Path | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
"""A folder, .gguf file or hub id; or tensors under the names of the model's `state_dict`, as a mapping or as pairs."""

_FIELDS_FREE_TO_DIFFER = frozenset(
    {"_name_or_path", "architectures", "dtype", "name_or_path", "torch_dtype", "transformers_version", "use_cache"}
)
"""Fields of a config that may differ between a model and a later version of the model."""

_NO_DRAFT = "draft_weights are given, and no model drafts here (speculative_config); leave them out."


class _Part(NamedTuple):
    """A model of the engine that is given other weights: the one that is served, or the one that drafts for it."""

    source: ModelSource
    model: LoadedModel
    compiled: CompiledModel
    seed: int
    name: str  # before each of its tensors' names in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWeights:
    """What a rank says of the weights that it has read."""

    rank: int
    pid: int
    error: PiecegraphError | None  # why they do not fit
    digest: str  # of the files

    @property
    def name(self) -> str:
        """The rank in messages; ranks of several engines have the same numbers."""
        return f"rank {self.rank} (process {self.pid})"


def reload_weights(loaded: Loaded, weights: NewWeights | None, draft_weights: NewWeights | None = None) -> int:
    """Replace the weights of an engine's model in place, and return how many tensors were written.

    `weights`: None reads the model's own source again, and that of a draft model. `draft_weights`: of the draft model,
    which keeps its weights if only `weights` are given. The prefix cache is discarded, and scales of cached keys and
    values that were calibrated are calibrated again.

    Raises `UsageError` while requests are unfinished, `ConfigError` if another model's config differs, and
    `CheckpointError` for a name that the model does not have or a tensor that does not fit; with mappings or files
    nothing has been written then. It is raised for weights that cannot be calibrated, too, which have been written
    then, as the message says.
    """
    if draft_weights is not None and loaded.draft is None:
        raise UsageError(_NO_DRAFT)
    if draft_weights is not None and isinstance(loaded.draft, CompiledHead):
        raise UsageError(
            "draft_weights are given, and a head drafts, whose weights are read at the start only; make a new LLM."
        )
    _refuse_unfinished(loaded.engine)
    parts = [(_Part(loaded.source, loaded.model, loaded.compiled, loaded.seed, ""), weights)]
    is_model = loaded.draft is not None and not isinstance(loaded.draft, CompiledHead)
    if loaded.draft is not None and is_model and (weights is None or draft_weights is not None):
        draft = loaded.draft
        part = _Part(draft.config.source, draft.loaded, draft.model.compiled, draft.config.seed, "the draft model's ")
        parts.append((part, draft_weights))
    read = [(part, _checked(part, each)) for part, each in parts]
    num_written = 0
    with _written(loaded):
        for part, each in read:
            num_written += _write(part, each)
    return num_written


def reload_on_ranks(
    engine: Engine, call: Callable[[str, Sequence[Any]], list[Any]], weights: object, draft_weights: object
) -> int:
    """Do what `reload_weights` does on all ranks, each of which reads its part.

    Nothing is written if one cannot read it, or if two have read different files. `call`: calls a method of `Worker` on
    every rank, and returns the results. Raises the same errors, and `UsageError` for weights that are not in files.
    """
    if weights is not None and not isinstance(weights, str | Path):
        raise UsageError(
            "with several ranks, or engines, weights are read from files, of which each rank reads its part; give "
            "reload_weights a folder, or nothing."
        )
    if draft_weights is not None:
        raise UsageError("with several ranks, or engines, drafts keep their weights; leave draft_weights out.")
    if weights is not None and Path(weights).expanduser().exists():
        weights = str(Path(weights).expanduser().absolute())  # ranks may be in other directories
    _refuse_unfinished(engine)
    failed = _why_not(call("read_weights", (weights,)))
    written = call("write_weights", (failed is None,))
    if failed is not None:
        raise failed
    return len({name for names in written for name in names})


def _why_not(parts: Sequence[RankWeights]) -> PiecegraphError | None:
    """Return why what the ranks have read must not be written; None: it may be."""
    first = parts[0]
    for part in parts:
        if part.error is not None:
            return part.error
    for part in parts:
        if part.digest != first.digest:
            return CheckpointError(
                f"{part.name} has read other weight files than {first.name} (digest {part.digest}, and {first.digest} "
                "there), so no rank has written any. Copy the same files to all machines, and reload once they no "
                "longer change."
            )
    return None


def read_rank_weights(loaded: Loaded, weights: str | Path | None) -> tuple[PiecegraphError | None, str]:
    """Read a rank's part of the weights into `loaded.incoming`, and return why they do not fit, and the files' digest.

    The digest is that by which ranks are compared at the start.
    """
    part = _Part(loaded.source, loaded.model, loaded.compiled, loaded.seed, "")
    try:
        source = _source_of(part, weights)
        before = weights_digest(source.weight_files)
        read = _checked(part, weights)
        digest = weights_digest(source.weight_files)
        if source.weight_files and before not in (digest, weights_digest(())):  # else they were downloaded meanwhile
            raise CheckpointError(f"the weight files of {source.model} have changed while they were read; try again.")
    except PiecegraphError as error:
        return error, ""
    except OSError as error:
        return CheckpointError(f"the weight files of {weights or part.source.model} cannot be read: {error}."), ""
    assert isinstance(read, Mapping), "weights of files"
    loaded.incoming.update(read)
    return None, digest


def write_rank_weights(loaded: Loaded, is_wanted: bool) -> list[str]:
    """Write what `read_rank_weights` has read, or drop it unless all ranks could read; return the tensors' names."""
    names = list(loaded.incoming) if is_wanted else []
    try:
        if is_wanted:
            with _written(loaded):
                part = _Part(loaded.source, loaded.model, loaded.compiled, loaded.seed, "")
                _write(part, loaded.incoming)
    finally:
        loaded.incoming.clear()
    return names


@contextlib.contextmanager
def _written(loaded: Loaded) -> Iterator[None]:
    """Write weights inside the block: no step reads them meanwhile, and nothing that was cached is used afterwards."""
    device = loaded.model.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # a step that was launched ahead still reads the old weights
    try:
        yield
    except Exception:
        with contextlib.suppress(CheckpointError):  # of the tensors that were written
            _calibrate(loaded)
        raise
    finally:
        loaded.engine.scheduler.reset_prefix_cache()
    try:
        _calibrate(loaded)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} The new weights have been written, and scales of cached keys and values are those of the earlier "
            "ones: reload other weights before the next request."
        ) from error
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _calibrate(loaded: Loaded) -> None:
    """Calibrate scales of cached keys and values again, if they were. Raises `CheckpointError`."""
    if loaded.runner.calibrate is not None:
        loaded.runner.calibrate()


def _refuse_unfinished(engine: Engine) -> None:
    """Raise `UsageError` while requests are unfinished."""
    if engine.has_unfinished:
        raise UsageError(
            f"{engine.num_unfinished} requests are unfinished, and their cached keys and values depend on the "
            "old weights. Let them finish, or abort them, before the weights are loaded again."
        )


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
    source = _source_of(part, model)
    if model is not None:
        _check_config(load_config(source), part.model.config, source)
    config, dtype = copy.deepcopy(part.model.config), part.model.dtype
    quantised, plan, stage = part.model.quantisation, part.model.rank_plan, part.model.stage
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
        rank=0 if plan is None else plan.rank,
        num_ranks=1 if plan is None else plan.num_ranks,
        experts=None if plan is None else plan.experts,
        stage=None if stage is None else stage.stage,
    )
    state: Mapping[str, torch.Tensor] = read.model.state_dict()
    return state


def _source_of(part: _Part, model: str | Path | None) -> ModelSource:
    """Return where the weights of `model` are, or the part's own source."""
    source = part.source
    if model is None:
        return source
    load_format = "auto" if source.load_format in ("dummy", "gguf") else source.load_format
    return replace(source, model=os.path.expanduser(model), revision=None, load_format=load_format)


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
