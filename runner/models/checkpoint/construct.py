"""Construction of a model with its weights: all of a checkpoint's, a rank's part, quantised ones, or random ones."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from piecegraph.errors import CheckpointError, ModelError, PiecegraphError, UnsupportedModel, is_out_of_memory
from piecegraph.runner.attention.interface.transformers_attention import ATTENTION_IMPLEMENTATION
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.models.checkpoint.files import check_weight_files, first_line
from piecegraph.runner.models.checkpoint.random_weights import NotInitialized, fill_with_random
from piecegraph.runner.models.checkpoint.tensors import check_tensors, without_other_parts, without_prediction
from piecegraph.runner.models.common.model_kind import ModelKind, constructor_options
from piecegraph.runner.models.common.rank_share import RankShare
from piecegraph.runner.pipeline_parallel.stage import StageCut
from piecegraph.runner.quantization.checkpoints.gguf_file import gguf_tensors
from piecegraph.runner.quantization.checkpoints.load import (
    WHOLE_MODEL,
    CannotStream,
    PlainCheckpoint,
    opened_files,
    read_model,
)
from piecegraph.runner.quantization.checkpoints.stored import StoredCheckpoint
from piecegraph.runner.quantization.quantise import QuantisationSummary
from piecegraph.runner.tensor_parallel.plan import RankPlan, rank_plan
from piecegraph.runner.tensor_parallel.sharded_checkpoint import CannotSlice, RankDivision, rank_model
from piecegraph.runner.tensor_parallel.sharded_modules import shard_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_CONSTRUCTOR_ERRORS = (KeyError, TypeError, AttributeError, ZeroDivisionError, IndexError)
"""The errors that a model's constructor raises for an inconsistent config; reading weights raises other errors."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The model that is to be constructed: from where, of which class and dtype, and which part of it."""

    source: ModelSource
    config: PreTrainedConfig
    dtype: torch.dtype
    device: torch.device  # of random weights; others are on the CPU
    _: KW_ONLY
    kind: ModelKind
    model_class: type[PreTrainedModel] | None  # None: only the model's own code knows it
    stages: StageCut
    share: RankShare


class Constructed(NamedTuple):
    """A model with its weights, and what is known of how they were read."""

    model: Any
    quantised: QuantisationSummary | None = None  # None: weights are floats
    plan: RankPlan | None = None  # what a rank holds, if the model was cut when it was read
    bytes_read: int | None = None  # of weight files, if only a rank's part was read
    note: str = ""  # about how weights were made


def construct(
    wanted: Wanted, *, checkpoint: StoredCheckpoint | PlainCheckpoint | None, device_type: str, seed: int
) -> Constructed:
    """Return the model with its weights; for load format `dummy` they are random.

    `checkpoint`: how quantised weights are stored or made; None: there are none. `device_type`: whose kernels will
    multiply by quantised weights. `seed`: for random weights.

    Raises `ModelError` for a config of which no model can be made, and `CheckpointError` for weights that cannot be
    read or do not fit the config.
    """
    with _construction_errors(wanted.source):
        if wanted.source.load_format == "dummy":
            return _random_model(wanted, seed, is_quantised=checkpoint is not None)
        if checkpoint is not None:
            return _quantised_model(wanted, checkpoint, device_type)
        if wanted.share.is_divided or wanted.stages.cuts:
            return _model_of_rank(wanted)
        return Constructed(_whole_model(wanted))


@contextmanager
def _construction_errors(source: ModelSource) -> Iterator[None]:
    """Convert what a model's constructor raises about its config, such as an unknown activation, to `ModelError`."""
    try:
        yield
    except (*_CONSTRUCTOR_ERRORS, ValueError) as error:
        if isinstance(error, PiecegraphError):
            raise
        if isinstance(error, KeyError) and error.args == (ATTENTION_IMPLEMENTATION,):
            owner = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
            raise UnsupportedModel(
                f"each layer's {type(owner).__name__} picks one of a list of attention classes of its own, and each "
                "computes attention itself, so ours cannot run; it would need to call transformers' attention "
                "interface."
            ) from error
        raise ModelError(
            f"no model can be made from the config of {source.model!r}: {type(error).__name__}: {first_line(error)}. "
            "Check config.json and hf_overrides."
        ) from error


def _whole_model(wanted: Wanted) -> Any:
    import transformers
    from safetensors import SafetensorError

    source, config, kind = wanted.source, wanted.config, wanted.kind
    options = {**source.options, **constructor_options(config, kind)}
    if source.load_format == "safetensors":
        options["use_safetensors"] = True
    check_weight_files(source)
    try:
        loaded: Any = getattr(transformers, kind.auto_class).from_pretrained(
            source.location,
            config=config,
            dtype=wanted.dtype,
            attn_implementation=kind.attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, together with missing and unexpected tensors
            **options,
        )
    except (SafetensorError, EOFError) as error:
        raise CheckpointError(f"a weight file of {source.model!r} is corrupt: {first_line(error)}") from error
    except OSError as error:
        raise CheckpointError(f"no weights to read at {source.model!r}: {first_line(error)}") from error
    except Exception as error:  # a damaged file, for instance a pickled one, may raise anything
        if is_out_of_memory(error) or isinstance(error, PiecegraphError):
            raise
        if isinstance(error, _CONSTRUCTOR_ERRORS) and not _was_unpickling(error):
            raise
        raise CheckpointError(f"the weights of {source.model!r} cannot be read: {first_line(error)}") from error
    model, info = loaded
    check_tensors(source, without_other_parts(model, config, info, is_pooling=kind.ignores_other_weights), config)
    return model


def _model_of_rank(wanted: Wanted) -> Constructed:
    """Return the model with the weights of one rank or stage.

    A checkpoint that cannot be read in parts is read whole; the plan is None then, and nothing is cut yet.
    """
    from safetensors import SafetensorError

    source, config, share = wanted.source, wanted.config, wanted.share
    if wanted.model_class is None or not source.weight_files or source.is_gguf:
        return Constructed(_whole_model(wanted))
    check_weight_files(source)
    try:
        model, info, plan, bytes_read = rank_model(
            wanted.model_class,
            config,
            source.weight_files,
            share.rank,
            share.num_ranks,
            wanted.stages.cut,
            share.experts,
            dtype=wanted.dtype,
            attn_implementation=wanted.kind.attention,
        )
    except CannotSlice:
        return Constructed(_whole_model(wanted))
    except SafetensorError as error:
        raise CheckpointError(f"a weight file of {source.model!r} is corrupt: {first_line(error)}") from error
    is_pooling = wanted.kind.ignores_other_weights
    check_tensors(source, without_other_parts(model, config, info, is_pooling=is_pooling), config)
    return Constructed(model, plan=plan, bytes_read=bytes_read)


def _quantised_model(wanted: Wanted, checkpoint: StoredCheckpoint | PlainCheckpoint, device_type: str) -> Constructed:
    """Return the model with quantised weights.

    There is no copy of all weights in floats. If the tensors of a plain checkpoint are not those of the model's
    modules, one for one, the model has floats still, and is whole.
    """
    from safetensors import SafetensorError

    source, config, share = wanted.source, wanted.config, wanted.share
    check_weight_files(source)
    files = source.weight_files
    keeps_blocks = checkpoint.quant_method == "gguf" and source.is_gguf
    is_readable = keeps_blocks or (files and all(file.suffix == ".safetensors" for file in files))
    if wanted.model_class is None or not is_readable:
        if isinstance(checkpoint, PlainCheckpoint):
            return Constructed(_whole_model(wanted))
        raise UnsupportedModel(
            f"{source.model!r} is quantised, and can be read only from safetensors files and with a class of "
            "transformers."
        )
    division = None
    if share.is_divided or wanted.stages.cuts:
        division = RankDivision(
            wanted.model_class, config, share.rank, share.num_ranks, wanted.stages.cut, share.experts
        )
    try:
        opened = nullcontext(gguf_tensors(Path(source.model))) if keeps_blocks else opened_files(files)
        with opened as stored:
            tensors = {name: stored[name] for name in without_prediction(stored, config)}
            model, info, summary = read_model(
                wanted.model_class,
                config,
                tensors,
                checkpoint,
                dtype=wanted.dtype,
                attention=wanted.kind.attention,
                device_type=device_type,
                division=division or WHOLE_MODEL,
            )
    except (CannotStream, CannotSlice):
        return Constructed(_whole_model(wanted))
    except SafetensorError as error:
        raise CheckpointError(f"a weight file of {source.model!r} is corrupt: {first_line(error)}") from error
    check_tensors(source, info, config)
    if division is None:
        return Constructed(model, summary)
    return Constructed(model, summary, division.plan, division.bytes_read)


def _random_model(wanted: Wanted, seed: int, *, is_quantised: bool) -> Constructed:
    """Return a model with random weights, which are the same however the model is divided.

    A rank or stage has its part only, unless its weights are `is_quantised` afterwards. Where a model cannot be drawn
    a layer at a time, each draws all of it, and a note of a divided one says why.
    """
    if wanted.device.type == "meta":
        return Constructed(_from_config(wanted, wanted.device))
    devices = [wanted.device] if wanted.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        found = _drawn_by_layer(wanted, seed, is_quantised=is_quantised)
        if isinstance(found, Constructed):
            return found
        torch.manual_seed(seed)
        whole = _from_config(wanted, wanted.device)
    is_part = wanted.share.is_divided or wanted.stages.cuts
    return Constructed(
        whole, note=f"random weights: each rank draws the whole model, because {found}" if is_part else ""
    )


def _drawn_by_layer(wanted: Wanted, seed: int, *, is_quantised: bool) -> Constructed | str:
    """Return the model with weights that `fill_with_random` draws, or why it cannot."""
    meta, share, plan = torch.device("meta"), wanted.share, None
    try:
        model, whole = _from_config(wanted, meta), _from_config(wanted, meta)
    except Exception as error:  # if it is not that a constructor computes with values, it comes again on the device
        return f"it cannot be constructed without values ({type(error).__name__}: {first_line(error)})"
    for each in (model, whole):
        wanted.stages.cut(each)
    if share.is_divided and not is_quantised:
        plan = rank_plan(model, share.rank, share.num_ranks, experts=share.experts)
        shard_model(model, plan)
    try:
        fill_with_random(model, whole, {} if plan is None else plan.shards, wanted.device, seed)
    except NotInitialized as error:
        return f"transformers gives {error} no values"
    return Constructed(model, plan=plan)


def _from_config(wanted: Wanted, device: torch.device) -> Any:
    """Return a model with the weights that transformers draws; on the meta device there are none."""
    import transformers

    kind = wanted.kind
    with device:
        return getattr(transformers, kind.auto_class).from_config(
            wanted.config,
            dtype=wanted.dtype,
            attn_implementation=kind.attention,
            trust_remote_code=wanted.source.trust_remote_code,
            **constructor_options(wanted.config, kind),
        )


def _was_unpickling(error: BaseException) -> bool:
    """Return whether `error` was raised while torch read a pickled file, whose damaged bytes can raise a `KeyError`."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") == "torch.serialization" for frame, _ in frames)
