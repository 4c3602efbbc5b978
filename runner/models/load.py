"""Loading of a model from a folder, a GGUF file or a hub id through transformers."""

from __future__ import annotations

import copy
import functools
import inspect
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from piecegraph.compiler.repeated_layers.find import name_layers
from piecegraph.cpu_instructions import cpu_instructions, has_bfloat16
from piecegraph.errors import (
    CheckpointError,
    ConfigError,
    ModelError,
    ModelNotFound,
    PiecegraphError,
    UnsupportedModel,
    did_you_mean,
    is_out_of_memory,
)
from piecegraph.progress import OnPhase, Phase
from piecegraph.runner.attention.interface.latent import keep_latents
from piecegraph.runner.attention.interface.transformers_attention import (
    ATTENTION_IMPLEMENTATION,
    register_attention,
)
from piecegraph.runner.attention.modules.replace import (
    WITHOUT_INTERFACE,
    has_own_attention,
    replace_attention,
    sees_later_tokens,
    unknown_attention,
)
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.lora.modules import AdaptedModules, LoraOptions, adapt_modules
from piecegraph.runner.models.causal_lm import DYNAMIC_DIMS, CausalLMForward, counts_positions, example_inputs
from piecegraph.runner.models.checkpoint.files import (
    check_exists,
    check_generation_config,
    check_weight_files,
    first_line,
    not_found,
)
from piecegraph.runner.models.checkpoint.tensors import check_tensors, without_other_parts
from piecegraph.runner.models.first_position import first_position
from piecegraph.runner.models.layer_rules import first_layer_with_rules
from piecegraph.runner.models.quiet_transformers import quiet_transformers
from piecegraph.runner.models.support import (
    check_class,
    check_config,
    check_model_sizes,
    check_structure,
    has_pluggable_attention,
    is_decoder,
    layer_that_differs,
)
from piecegraph.runner.pipeline_parallel.stage import Stage, StageCut, StagePlan
from piecegraph.runner.pipeline_parallel.stage_forward import (
    check_passes_through,
    stage_dims,
    stage_forward,
    stage_inputs,
)
from piecegraph.runner.quantization.checkpoints.all_formats import stored_checkpoint
from piecegraph.runner.quantization.checkpoints.gguf_file import gguf_quantization, gguf_tensors
from piecegraph.runner.quantization.checkpoints.load import (
    WHOLE_MODEL,
    CannotStream,
    PlainCheckpoint,
    opened_files,
    read_model,
)
from piecegraph.runner.quantization.checkpoints.stored import StoredCheckpoint
from piecegraph.runner.quantization.online import online_schemes
from piecegraph.runner.quantization.quantise import QuantisationSummary, quantise_model
from piecegraph.runner.state_layers.modules.replace import (
    first_state_layer,
    has_state_layers,
    replace_state_layers,
)
from piecegraph.runner.tensor_parallel.expert_ranks import ExpertRanks
from piecegraph.runner.tensor_parallel.plan import RankPlan, rank_plan
from piecegraph.runner.tensor_parallel.sharded_checkpoint import CannotSlice, RankDivision, rank_model
from piecegraph.runner.tensor_parallel.sharded_modules import fill_rank_buffers, shard_model
from piecegraph.runner.traceable.hidden_states import let_hidden_states_leave
from piecegraph.runner.traceable.replace import make_traceable

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKind:
    """What transformers loads a model as, and what the runner needs of it."""

    auto_class: str = "AutoModelForCausalLM"
    mapping: str = "MODEL_FOR_CAUSAL_LM_MAPPING"  # from configs to the classes behind `auto_class`
    name: str = "causal language model"
    attention: str = ATTENTION_IMPLEMENTATION
    inputs: tuple[str, ...] = ("position_ids", "logits_to_keep")  # of its forward
    options: Mapping[str, Any] = field(default_factory=dict)  # for the constructor, where it takes them
    ignores_other_weights: bool = False  # weights that the class does not have, such as a head, are not read

    @property
    def generates(self) -> bool:
        """Return whether the model continues texts, so that states are kept from step to step."""
        return "logits_to_keep" in self.inputs


GENERATION = ModelKind()


_CONSTRUCTOR_ERRORS = (KeyError, TypeError, AttributeError, ZeroDivisionError, IndexError)
"""The errors that a model's constructor raises for an inconsistent config; reading weights raises other errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A transformers model on its device, in eval mode and without gradients, with its config."""

    model: PreTrainedModel
    config: PreTrainedConfig
    dtype: torch.dtype
    device: torch.device
    first_position: int  # the position of a text's first token in the model's own forward
    notes: tuple[str, ...]
    rank_plan: RankPlan | None = None  # what this rank holds; None: all of the model
    bytes_read: int | None = None  # of weight files, if only a rank's part was read
    stage: StagePlan | None = None  # what this stage of a pipeline holds; None: all of the model
    quantisation: QuantisationSummary | None = None  # None: weights have the dtype
    adapted: AdaptedModules | None = None  # the modules that adapters may change; None: adapters are not enabled

    def forward_module(self) -> nn.Module:
        """Return the module that is compiled, `(tokens, positions, logits_indices) -> logits`.

        Stages of a pipeline differ: see `stage_forward`.
        """
        if self.stage is not None:
            return stage_forward(self.model, self.first_position, self.stage)
        return CausalLMForward(self.model, self.first_position)

    @property
    def num_parameters(self) -> int:
        """The number of parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def dynamic_dims(self) -> Mapping[str, Mapping[int, str]]:
        """The dims of the arguments of `forward_module` that vary."""
        return DYNAMIC_DIMS if self.stage is None else stage_dims(self.stage.stage)

    def example_inputs(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return inputs to trace `forward_module` with; the trace does not depend on their sizes."""
        example = example_inputs(device)
        return example if self.stage is None else stage_inputs(self.stage, self.dtype, example)


def load_config(source: ModelSource) -> PreTrainedConfig:
    """Return the model's config, checked. Raises `ModelNotFound`, `ModelError` or `UnsupportedModel`."""
    from transformers import AutoConfig, PreTrainedConfig

    check_exists(source)
    check_generation_config(source)
    with quiet_transformers():
        try:
            written = None
            if not source.is_gguf:
                written, _ = PreTrainedConfig.get_config_dict(source.location, **source.options)
                written.update(source.hf_overrides)
            config: Any = AutoConfig.from_pretrained(source.location, **source.options)
            if source.hf_overrides:  # from_pretrained would drop fields that the class does not have
                config = _overridden(config, written, source.hf_overrides)
        except ValueError as error:
            raise ModelError(f"{source.model!r}: {first_line(error)}") from error
        except OSError as error:
            if Path(source.location).is_dir():  # the folder exists, but cannot be read
                raise ModelError(f"the config of {source.model!r} cannot be read: {first_line(error)}") from error
            raise ModelNotFound(not_found(source, error)) from error
        except Exception as error:  # config classes check their fields with their own error types
            raise ModelError(f"the config of {source.model!r} is not valid: {first_line(error)}") from error
    assert isinstance(config, PreTrainedConfig), type(config)
    if source.is_gguf and hasattr(config, "quantization_config"):
        del config.quantization_config  # read into plain floats by transformers
    if source.is_gguf and source.keeps_blocks:
        config.quantization_config = gguf_quantization(Path(source.model))
    check_model_sizes(config)
    check_config(config, written)
    return config


def resolve_device(device: str | torch.device | None) -> torch.device:
    """Return `device`, or for None the GPU if there is one, else the CPU. Raises `ConfigError`."""
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        if not isinstance(device, str | torch.device):
            raise TypeError
        resolved = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"device={device!r} is not a device; e.g. 'cpu' or 'cuda'.") from error
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device={device!r}, but torch sees no NVIDIA GPU. Use device='cpu', or install a CUDA build."
        )
    if resolved.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={device!r} cannot run here; use 'cpu' or 'cuda'.")
    if resolved.type == "cuda" and resolved.index not in (None, current := torch.cuda.current_device()):
        raise ConfigError(
            f"device={device!r}, but this process's current GPU is cuda:{current}, where kernels are launched. Call "
            f"torch.cuda.set_device({resolved.index}) first, or show the process that GPU alone: "
            f"CUDA_VISIBLE_DEVICES={resolved.index}."
        )
    return resolved


def resolve_dtype(
    dtype: str | torch.dtype,
    config: PreTrainedConfig,
    device: torch.device,
    quantization: str | None = None,
    *,
    instructions: frozenset[str] | None = None,
) -> torch.dtype:
    """Return the dtype that weights are loaded as, and that activations have.

    `"auto"` is bfloat16 with quantised weights. Otherwise it is, on the CPU, bfloat16 if the checkpoint has 16 bits and
    the processor has instructions for bfloat16, else float32; `instructions` are those of this machine unless given. On
    a GPU it is the checkpoint's dtype if that has 16 bits, else bfloat16. Raises `ConfigError` for an unknown name, and
    for quantised weights with float16.
    """
    written = getattr(config, "quantization_config", None)
    if quantization == "gguf" and (not isinstance(written, Mapping) or written.get("quant_method") != "gguf"):
        raise ConfigError(
            "quantization='gguf' keeps the blocks of a .gguf file, and the model is none; leave it out, or use 'int8' "
            "or 'int4'."
        )
    if written is not None:
        if quantization not in (None, "gguf"):
            raise ConfigError(
                f"quantization={quantization!r} is made from a plain checkpoint, and this one is quantised already; "
                "leave it out."
            )
        quantization = "a quantised checkpoint"
    listed = cpu_instructions() if instructions is None else instructions
    resolved = _resolve_dtype(dtype, config, device, quantization, computes_bfloat16=has_bfloat16(listed))
    if quantization is not None and resolved is torch.float16:
        raise ConfigError(
            f"dtype=float16 is not available with quantization={quantization!r}, whose scales have the range of "
            "bfloat16; use bfloat16 or float32."
        )
    return resolved


def _resolve_dtype(
    dtype: str | torch.dtype,
    config: PreTrainedConfig,
    device: torch.device,
    quantization: str | None,
    *,
    computes_bfloat16: bool,
) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        if dtype not in DTYPES.values():
            raise ConfigError(f"dtype={dtype} cannot run here; use float32, bfloat16 or float16.")
        return dtype
    if dtype == "auto":
        stored = getattr(config.get_text_config(decoder=True), "dtype", None) or config.dtype
        of_16_bits = stored if stored in (torch.bfloat16, torch.float16) else None
        if device.type == "cpu":
            is_bfloat16 = quantization is not None or (of_16_bits is not None and computes_bfloat16)
            return torch.bfloat16 if is_bfloat16 else torch.float32
        return torch.bfloat16 if of_16_bits is None or quantization is not None else of_16_bits
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is unknown.{did_you_mean(str(dtype), ['auto', *DTYPES])}")
    return DTYPES[dtype]


def load_model(
    source: ModelSource,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    on_phase: OnPhase | None = None,
    kind: ModelKind = GENERATION,
    rank: int = 0,
    num_ranks: int = 1,
    stage: Stage | None = None,
    experts: ExpertRanks | None = None,
    quantization: str | None = None,
    lora: LoraOptions | None = None,
    runs_on: torch.device | None = None,
) -> LoadedModel:
    """Return the model with our attention, with the weights of `source`, or with random weights for format `dummy`.

    With several ranks, the model has the weights of `rank` only, and with a `stage` those of its layers.
    `experts`: among whose ranks experts are divided; None: a rank has a part of each. `quantization`: the scheme by
    which weights are quantised, when read or, under other names, all then. `lora`: adapters may change the model.
    `runs_on`: where it will run, if that is not `device`.

    Raises `UnsupportedModel` if the model's class is not supported, and `CheckpointError` if files are missing or
    corrupt, or tensors are missing, unexpected or of another shape.
    """
    from transformers import PreTrainedModel

    started = time.monotonic()
    report = on_phase or (lambda phase: None)
    report(Phase(name="load", detail=source.model))
    register_attention()
    checkpoint, config = split_quantisation(config)
    if checkpoint is not None and not kind.generates:
        raise UnsupportedModel("a quantised checkpoint can generate, but not pool so far; use an unquantised one.")
    known_class = _known_class(config, kind)
    if known_class is not None:
        kind = _checked_kind(known_class, config, kind, num_ranks)
    _check_divisible(config, num_ranks)
    plan, bytes_read, quantised, device_type = None, None, None, _kernels_of(runs_on or device)
    stages, of_rank = StageCut(stage), (rank, num_ranks, experts)
    with quiet_transformers(functools.partial(_report_weights, report, source.model)), _construction_errors(source):
        if source.load_format == "dummy":
            model = _random_model(source, config, dtype, device, seed, kind)
        elif checkpoint is not None or (quantization is not None and kind.generates):
            of_kind = (source, config, dtype, kind, known_class, checkpoint or PlainCheckpoint(quantization or ""))
            model, quantised, plan, bytes_read = _quantised_checkpoint_model(*of_kind, device_type, stages, of_rank)
        elif _is_divided(of_rank) or stage is not None:
            model, plan, bytes_read = _rank_checkpoint_model(source, config, dtype, kind, known_class, stages, of_rank)
        else:
            model = _checkpoint_model(source, config, dtype, kind)
    assert isinstance(model, PreTrainedModel), type(model)
    check_class(type(model), kind.inputs)
    stages.cut(model)
    notes = _replace_layers(model) if kind.generates else _check_pools(model)
    is_cut, plan = plan is not None, _rank_plan(model, plan, of_rank)
    _check_stages(model, stages.plan)
    quantised = _quantised(model, quantization, checkpoint, quantised, device_type, plan)
    _cut_to_rank(model, plan, is_cut=is_cut)
    model = model.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]  # transformers decorates .to
    let_hidden_states_leave(model, source.hidden_states)
    adapted = None if lora is None else _adapted(model, lora, dtype, device, plan)
    name_layers(model)
    report(Phase(name="load", seconds=time.monotonic() - started, detail=_what_was_loaded(model, dtype, device)))
    first = first_position(source, config, auto_class=kind.auto_class, attention=kind.attention)
    return LoadedModel(
        model=model,
        config=model.config,
        dtype=dtype,
        device=device,
        first_position=first.value,
        notes=(*((first.note,) if first.note else ()), *notes, *(() if quantised is None else (str(quantised),))),
        rank_plan=plan,
        bytes_read=bytes_read,
        stage=stages.plan,
        quantisation=quantised,
        adapted=adapted,
    )


def _adapted(
    model: PreTrainedModel, lora: LoraOptions, dtype: torch.dtype, device: torch.device, plan: RankPlan | None
) -> AdaptedModules:
    """Let adapters change a model, which has been cut to `plan`."""
    return adapt_modules(model, lora, dtype=dtype, device=device, shards=None if plan is None else plan.shards)


def _kernels_of(device: torch.device) -> str:
    """Return the type of devices whose kernels a model on `device` runs: "cuda" or "cpu"."""
    return "cuda" if device.type == "cuda" else "cpu"


def _report_weights(report: OnPhase, model: str, done: int, total: int) -> None:
    report(Phase(name="load", done=done, total=total, detail=model))


def _what_was_loaded(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> str:
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    detail = f"{type(model).__name__}, {num_parameters / 1e6:.1f}M parameters, {dtype} on {device}"
    return detail.replace("torch.", "")


def split_quantisation(config: PreTrainedConfig) -> tuple[StoredCheckpoint | None, PreTrainedConfig]:
    """Return how the checkpoint is quantised, or None, and the config of the model without it."""
    written = getattr(config, "quantization_config", None)
    if written is None:
        return None, config
    plain = copy.deepcopy(config)
    del plain.quantization_config
    return stored_checkpoint(written), plain


def _quantised_checkpoint_model(
    source: ModelSource,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    kind: ModelKind,
    known_class: type[PreTrainedModel] | None,
    checkpoint: StoredCheckpoint | PlainCheckpoint,
    device_type: str,
    stages: StageCut,
    of_rank: tuple[int, int, ExpertRanks | None],
) -> tuple[Any, QuantisationSummary | None, RankPlan | None, int | None]:
    """Return the model with quantised weights, the summary, and of a rank or a stage the plan and the bytes read.

    There is no copy of all weights in floats. If the tensors of a plain checkpoint are not those of the model's
    modules, one for one, the model has floats still, is whole, and all else is None.
    """
    from safetensors import SafetensorError

    check_weight_files(source)
    files = source.weight_files
    keeps_blocks = checkpoint.quant_method == "gguf" and source.is_gguf
    is_readable = keeps_blocks or (files and all(file.suffix == ".safetensors" for file in files))
    if known_class is None or not is_readable:
        if isinstance(checkpoint, PlainCheckpoint):
            return _checkpoint_model(source, config, dtype, kind), None, None, None
        raise UnsupportedModel(
            f"{source.model!r} is quantised, and can be read only from safetensors files and with a class of "
            "transformers."
        )
    rank, num_ranks, experts = of_rank
    division = None
    if _is_divided(of_rank) or stages.cuts:
        division = RankDivision(known_class, config, rank, num_ranks, stages.cut, experts)
    try:
        opened = nullcontext(gguf_tensors(Path(source.model))) if keeps_blocks else opened_files(files)
        with opened as tensors:
            model, info, summary = read_model(
                known_class,
                config,
                tensors,
                checkpoint,
                dtype=dtype,
                attention=kind.attention,
                device_type=device_type,
                division=division or WHOLE_MODEL,
            )
    except (CannotStream, CannotSlice):
        return _checkpoint_model(source, config, dtype, kind), None, None, None
    except SafetensorError as error:
        raise CheckpointError(f"a weight file of {source.model!r} is corrupt: {first_line(error)}") from error
    check_tensors(source, info, config)
    if division is None:
        return model, summary, None, None
    return model, summary, division.plan, division.bytes_read


def _quantised(
    model: PreTrainedModel,
    quantization: str | None,
    checkpoint: StoredCheckpoint | None,
    read: QuantisationSummary | None,
    device_type: str,
    plan: RankPlan | None,
) -> QuantisationSummary | None:
    """Quantise a model in place, unless it was `read` so or stays plain, and return the summary.

    `plan`: what will be left on this rank of a whole model. Raises `UnsupportedModel` for a kind that cannot be
    quantised yet.
    """
    if checkpoint is None and quantization is None:
        return None
    has_states = has_state_layers(model)
    if has_states or compresses_keys(model.config):
        what = f"layers with a state ({first_state_layer(model)})" if has_states else "latent attention (kv_lora_rank)"
        raise UnsupportedModel(
            f"{type(model).__name__} has {what}, with which quantised weights (quantization={quantization!r}) are not "
            "yet available; use unquantised ones."
        )
    if read is not None:
        return read
    shards = None if plan is None else plan.shards
    if checkpoint is None:
        assert quantization is not None
        scheme_of = online_schemes(quantization)
        return quantise_model(model, quantization, scheme_of, device_type=device_type, shards=shards)
    method, scheme_of = checkpoint.quant_method, checkpoint.scheme_of
    options: dict[str, Any] = {"device_type": device_type, "is_read": True, "must_fit": True, "shards": shards}
    return quantise_model(model, method, scheme_of, **options)


def _check_divisible(config: PreTrainedConfig, num_ranks: int) -> None:
    """Raise `UnsupportedModel` for what several ranks cannot divide."""
    if num_ranks > 1 and compresses_keys(config):
        raise UnsupportedModel(
            "the model has latent attention (kv_lora_rank), which tensor parallelism does not divide yet; use "
            "tensor_parallel_size=1."
        )


def _checked_kind(
    known_class: type[PreTrainedModel], config: PreTrainedConfig, kind: ModelKind, num_ranks: int
) -> ModelKind:
    """Return `kind` with the attention that the class can be constructed with.

    Raises `UnsupportedModel` if the class lacks what the runner needs, or has layers of kinds that are not known here.
    """
    try:
        check_class(known_class, kind.inputs)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{error}{_differing_layer(config, kind)}") from None
    is_replaced = not has_pluggable_attention(known_class, pools=not kind.generates)
    if is_replaced and num_ranks > 1:
        raise UnsupportedModel(
            f"{known_class.__name__} computes its attention itself (it has no pluggable attention), which tensor "
            "parallelism does not divide; use tensor_parallel_size=1."
        )
    if is_replaced or (kind.generates and (known_class._is_stateful or compresses_keys(config))):
        check_replaceable(config, WITHOUT_INTERFACE if is_replaced else None, kind)
    return replace(kind, attention=WITHOUT_INTERFACE) if is_replaced else kind


def _differing_layer(config: PreTrainedConfig, kind: ModelKind) -> str:
    """Return a sentence that names the first module for which a model's class is refused, or ""."""
    import transformers

    auto: Any = getattr(transformers, kind.auto_class)
    try:
        with quiet_transformers(), torch.device("meta"):
            found = layer_that_differs(auto.from_config(copy.deepcopy(config), attn_implementation=WITHOUT_INTERFACE))
    except Exception:  # whatever a model's constructor raises; the class is refused all the same
        return ""
    return "" if found is None else f" The first such module is {found}."


def _is_divided(of_rank: tuple[int, int, ExpertRanks | None]) -> bool:
    """Return whether a rank holds less than the whole model."""
    _, num_ranks, experts = of_rank
    return num_ranks > 1 or (experts is not None and experts.num_engines > 1)


def _rank_plan(
    model: PreTrainedModel, plan: RankPlan | None, of_rank: tuple[int, int, ExpertRanks | None]
) -> RankPlan | None:
    """Return what a rank holds of a whole model, or `plan` if the model has been cut; None: nothing is divided.

    Raises `UnsupportedModel` for layers of kinds that are not divided.
    """
    rank, num_ranks, experts = of_rank
    if not _is_divided(of_rank):
        return None
    if has_state_layers(model):
        raise UnsupportedModel(
            f"{type(model).__name__} has layers with a state ({first_state_layer(model)}), which tensor parallelism "
            "does not divide; use tensor_parallel_size=1."
        )
    if has_own_attention(model):
        raise UnsupportedModel(
            f"{type(model).__name__} has attention whose forward is replaced (docs/own_attention.md), which tensor "
            "parallelism does not divide; use tensor_parallel_size=1."
        )
    return rank_plan(model, rank, num_ranks, experts=experts) if plan is None else plan


def _cut_to_rank(model: PreTrainedModel, plan: RankPlan | None, *, is_cut: bool) -> None:
    """Cut a model to a rank's plan, unless it was loaded so, and write the buffers that differ between ranks."""
    if plan is None:
        return
    if not is_cut:
        shard_model(model, plan)
    fill_rank_buffers(model, plan)


def _check_stages(model: PreTrainedModel, plan: StagePlan | None) -> None:
    """Raise `UnsupportedModel` for a model that has a `plan` and cannot run in stages; without weights less is seen."""
    if plan is None:
        return
    if has_state_layers(model):
        raise UnsupportedModel(
            f"{type(model).__name__} has layers with a state ({first_state_layer(model)}), which cannot run in stages "
            "yet; use pipeline_parallel_size=1."
        )
    if counts_positions(type(model)):
        raise UnsupportedModel(
            f"{type(model).__name__} takes no positions, which its stages need; use pipeline_parallel_size=1."
        )
    if not any(parameter.is_meta for parameter in model.parameters()):
        check_passes_through(model, plan)


def compresses_keys(config: PreTrainedConfig) -> bool:
    """Return whether layers of the model probably have latent attention, by the config."""
    return isinstance(getattr(config.get_text_config(decoder=True), "kv_lora_rank", None), int)


def check_replaceable(config: PreTrainedConfig, attention: str | None = None, kind: ModelKind = GENERATION) -> None:
    """Raise `UnsupportedModel` if layers keep states, compress keys or attend themselves in a way not known here.

    The model is made without memory and with `attention`, None for transformers' choice; no weights are read.
    """
    import transformers

    auto: Any = getattr(transformers, kind.auto_class)
    with quiet_transformers(), torch.device("meta"):
        model = auto.from_config(copy.deepcopy(config), attn_implementation=attention)
        _replace_layers(model) if kind.generates else _check_pools(model)


def _check_pools(model: PreTrainedModel) -> tuple[str, ...]:
    """Replace the forward of own attention; return no notes.

    Raises `UnsupportedModel` for a model that can generate and cannot pool, and for unknown attention.
    """
    make_traceable(model)
    if not has_pluggable_attention(type(model), pools=True) and not replace_attention(model, pools=True):
        raise UnsupportedModel(_unknown(model))
    if (stateful := first_state_layer(model)) is not None:
        raise UnsupportedModel(
            f"{type(model).__name__} keeps a state between tokens ({stateful}), and cannot pool here."
        )
    if (ruled := first_layer_with_rules(model)) is not None:
        raise UnsupportedModel(f"{type(model).__name__}: {ruled}; such models can generate here, not pool.")
    return ()


def _replace_layers(model: PreTrainedModel) -> tuple[str, ...]:
    """Replace the forward of layers with states and of own attention, and the expansion of keys; return notes.

    Raises `UnsupportedModel` if the model has layers of these kinds that are not known.
    """
    name = type(model).__name__
    make_traceable(model)
    is_replaced = replace_attention(model)
    check_structure(model)
    if not is_replaced and not has_pluggable_attention(type(model)):
        raise UnsupportedModel(_unknown(model))
    if (both_ways := sees_later_tokens(model)) is not None:
        raise UnsupportedModel(f"{name}: {both_ways}.")
    for module in model.modules():
        if getattr(module, "is_causal", None) is False and is_decoder(module):
            vars(module)["is_causal"] = True  # which transformers says by a mask alone
    problem = replace_state_layers(model)
    other_problem, notes = keep_latents(model)
    if problem is not None or other_problem is not None:
        raise UnsupportedModel(f"{name}: {problem or other_problem}")
    if model._is_stateful and not has_state_layers(model):
        first = layer_that_differs(model)
        raise UnsupportedModel(
            f"{name} keeps a recurrent state between tokens in layers of a kind that cannot run here"
            + (f", such as {first}" if first is not None else "")
            + "; their scan would need an op of its own. Linear attention by the gated delta rule, Mamba, Mamba-2 and "
            "gated short convolutions have one."
        )
    return notes


def _unknown(model: PreTrainedModel) -> str:
    return (
        f"{type(model).__name__} computes its attention itself (it has no pluggable attention), and "
        f"{unknown_attention(model)}. It would need to call transformers' attention interface, or a class for its kind "
        "in runner/attention/modules."
    )


def load_tokenizer(source: ModelSource, tokenizer: str | None = None) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer, or the one at `tokenizer`. Raises `ModelError` if there is none."""
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    options = source.options if tokenizer is None else {"trust_remote_code": source.trust_remote_code}
    with quiet_transformers():
        try:
            loaded = AutoTokenizer.from_pretrained(tokenizer or source.location, **options)
        except Exception as error:  # whatever transformers raises for a broken or missing tokenizer
            raise ModelError(
                f"no usable tokenizer at {tokenizer or source.model!r} ({first_line(error)}). "
                "Name one with tokenizer=..., or pass token ids with skip_tokenizer_init=True."
            ) from error
    assert isinstance(loaded, PreTrainedTokenizerBase), type(loaded)
    return loaded


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


def _overridden(
    config: PreTrainedConfig, written: Mapping[str, Any] | None, overrides: Mapping[str, Any]
) -> PreTrainedConfig:
    """Return the config rebuilt with `overrides`, each of which replaces a whole field."""
    fields = config.to_dict() if written is None else dict(written)
    return type(config).from_dict({**fields, **overrides})


def constructor_options(config: PreTrainedConfig, kind: ModelKind) -> dict[str, Any]:
    """Return those of the kind's options that the constructor of this model takes."""
    known = _known_class(config, kind) if kind.options else None
    parameters = inspect.signature(known.__init__).parameters if known is not None else {}
    return {name: value for name, value in kind.options.items() if name in parameters}


def _checkpoint_model(source: ModelSource, config: PreTrainedConfig, dtype: torch.dtype, kind: ModelKind) -> Any:
    import transformers
    from safetensors import SafetensorError

    options = {**source.options, **constructor_options(config, kind)}
    if source.load_format == "safetensors":
        options["use_safetensors"] = True
    check_weight_files(source)
    try:
        loaded: Any = getattr(transformers, kind.auto_class).from_pretrained(
            source.location,
            config=config,
            dtype=dtype,
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


def _rank_checkpoint_model(
    source: ModelSource,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    kind: ModelKind,
    known_class: type[PreTrainedModel] | None,
    stages: StageCut,
    of_rank: tuple[int, int, ExpertRanks | None],
) -> tuple[Any, RankPlan | None, int | None]:
    """Return the model with one rank's weights, its plan, and the bytes read.

    A checkpoint that cannot be read in parts is read whole; the plan is None then, and nothing is cut yet.
    """
    rank, num_ranks, experts = of_rank
    from safetensors import SafetensorError

    if known_class is None or not source.weight_files or source.is_gguf:
        return _checkpoint_model(source, config, dtype, kind), None, None
    check_weight_files(source)
    try:
        model, info, plan, bytes_read = rank_model(
            known_class,
            config,
            source.weight_files,
            rank,
            num_ranks,
            stages.cut,
            experts,
            dtype=dtype,
            attn_implementation=kind.attention,
        )
    except CannotSlice:
        return _checkpoint_model(source, config, dtype, kind), None, None
    except SafetensorError as error:
        raise CheckpointError(f"a weight file of {source.model!r} is corrupt: {first_line(error)}") from error
    check_tensors(source, without_other_parts(model, config, info, is_pooling=kind.ignores_other_weights), config)
    return model, plan, bytes_read


def _random_model(
    source: ModelSource,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    kind: ModelKind,
) -> Any:
    import transformers

    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), device:
        torch.manual_seed(seed)
        return getattr(transformers, kind.auto_class).from_config(
            config,
            dtype=dtype,
            attn_implementation=kind.attention,
            trust_remote_code=source.trust_remote_code,
            **constructor_options(config, kind),
        )


def _known_class(config: PreTrainedConfig, kind: ModelKind) -> type[PreTrainedModel] | None:
    """Return the class that transformers would construct; None if only the model's own code knows it."""
    from transformers import PreTrainedModel
    from transformers.models.auto import modeling_auto

    mapping = getattr(modeling_auto, kind.mapping)
    if type(config) not in mapping:
        if hasattr(config, "auto_map"):
            return None
        instead = " LLM(model, runner='pooling') embeds texts with a model that has none." if kind is GENERATION else ""
        raise UnsupportedModel(
            f"{type(config).__name__} (model_type {config.model_type!r}) has no {kind.name} in transformers.{instead}"
        )
    known = mapping[type(config)]
    return known if isinstance(known, type) and issubclass(known, PreTrainedModel) else None


def _was_unpickling(error: BaseException) -> bool:
    """Return whether `error` was raised while torch read a pickled file, whose damaged bytes can raise a `KeyError`."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") == "torch.serialization" for frame, _ in frames)
