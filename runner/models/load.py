"""Loading of a model from a folder, a GGUF file or a hub id through transformers."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from piecegraph.compiler.repeated_layers.find import name_layers
from piecegraph.errors import UnsupportedModel
from piecegraph.progress import OnPhase, Phase
from piecegraph.runner.attention.interface.transformers_attention import register_attention
from piecegraph.runner.attention.modules.replace import has_lifted_modules
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.lora.modules import AdaptedModules, LoraOptions, adapt_modules
from piecegraph.runner.models.causal_lm import DYNAMIC_DIMS, CausalLMForward, example_inputs
from piecegraph.runner.models.checkpoint.construct import Wanted, construct
from piecegraph.runner.models.common.model_kind import GENERATION, ModelKind, known_class
from piecegraph.runner.models.common.one_thread import in_one_thread_at_a_time
from piecegraph.runner.models.common.quiet_transformers import quiet_transformers
from piecegraph.runner.models.common.rank_share import RankShare
from piecegraph.runner.models.divided_model import check_divisible, check_stages, cut_to_rank, plan_of_rank
from piecegraph.runner.models.first_position import first_position
from piecegraph.runner.models.mechanisms.replaced_layers import check_pools, checked_kind, replace_layers
from piecegraph.runner.models.mechanisms.support import check_class
from piecegraph.runner.models.quantised_model import quantise, split_quantisation
from piecegraph.runner.pipeline_parallel.stage import Stage, StageCut, StagePlan
from piecegraph.runner.pipeline_parallel.stage_forward import stage_dims, stage_forward, stage_inputs
from piecegraph.runner.quantization.checkpoints.load import PlainCheckpoint
from piecegraph.runner.quantization.quantise import QuantisationSummary
from piecegraph.runner.tensor_parallel.expert_ranks import ExpertRanks
from piecegraph.runner.tensor_parallel.plan import RankPlan
from piecegraph.runner.traceable.hidden_states import let_hidden_states_leave

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A transformers model on its device, in eval mode and without gradients, with its config."""

    model: PreTrainedModel
    config: PreTrainedConfig
    dtype: torch.dtype
    device: torch.device
    first_position: int  # the position of a text's first token in the model's own forward
    uncounted_token: int | None = None  # see `FirstPosition`
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
    def is_part(self) -> bool:
        """Whether other ranks have other parts of the model."""
        return self.rank_plan is not None or self.stage is not None

    @property
    def has_only_int8_weights(self) -> bool:
        """True if every weight of two dims is int8 with a scale for each output channel, and there are no experts."""
        summary = self.quantisation
        if summary is None or summary.left or summary.experts:
            return False
        return all(scheme.method == "int8" and not scheme.group_size for scheme in summary.methods.values())

    @property
    def num_parameters(self) -> int:
        """The number of parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def dynamic_dims(self) -> Mapping[str, Mapping[int, str]]:
        """The dims of the arguments of `forward_module` that vary."""
        return DYNAMIC_DIMS if self.stage is None else stage_dims(self.stage.stage)

    def example_inputs(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return inputs to trace `forward_module` with; the trace does not depend on their sizes.

        Those of a model with lifted modules are one token: where such a module asks whether there are several, the
        trace refuses it, and not its first step of one token.
        """
        example = example_inputs(device)
        if has_lifted_modules(self.model):
            tokens, positions, _ = example
            example = tokens[:1], positions[:1], torch.zeros_like(positions[:1])
        return example if self.stage is None else stage_inputs(self.stage, self.dtype, example)


@in_one_thread_at_a_time
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
    `runs_on`: where it will run, if that is not `device`. Threads that load wait for each other.

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
    model_class = known_class(config, kind)
    if model_class is not None:
        kind = checked_kind(model_class, config, kind, num_ranks)
    check_divisible(config, num_ranks)
    stages, share = StageCut(stage), RankShare(rank=rank, num_ranks=num_ranks, experts=experts)
    device_type = _kernels_of(runs_on or device)
    stored = checkpoint or (PlainCheckpoint(quantization) if quantization is not None and kind.generates else None)
    wanted = Wanted(source, config, dtype, device, kind=kind, model_class=model_class, stages=stages, share=share)
    with quiet_transformers(functools.partial(_report_weights, report, source.model)):
        made = construct(wanted, checkpoint=stored, device_type=device_type, seed=seed)
    model, plan = made.model, made.plan
    assert isinstance(model, PreTrainedModel), type(model)
    check_class(type(model), kind.inputs)
    stages.cut(model)
    notes = replace_layers(model) if kind.generates else check_pools(model)
    is_cut, plan = plan is not None, plan_of_rank(model, plan, share)
    check_stages(model, stages.plan)
    quantised = quantise(model, quantization, checkpoint, made.quantised, device_type, plan)
    cut_to_rank(model, plan, is_cut=is_cut)
    model = model.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]  # transformers decorates .to
    let_hidden_states_leave(model, source.hidden_states)
    adapted = None if lora is None else _adapted(model, lora, dtype, device, plan, is_stage=stages.cuts)
    name_layers(model)
    report(Phase(name="load", seconds=time.monotonic() - started, detail=_what_was_loaded(model, dtype, device)))
    first = first_position(source, config, auto_class=kind.auto_class, attention=kind.attention)
    return LoadedModel(
        model=model,
        config=model.config,
        dtype=dtype,
        device=device,
        first_position=first.value,
        uncounted_token=first.uncounted_token,
        notes=(*filter(None, (first.note, made.note)), *notes, *(() if quantised is None else (str(quantised),))),
        rank_plan=plan,
        bytes_read=made.bytes_read,
        stage=stages.plan,
        quantisation=quantised,
        adapted=adapted,
    )


def _adapted(
    model: PreTrainedModel,
    lora: LoraOptions,
    dtype: torch.dtype,
    device: torch.device,
    plan: RankPlan | None,
    *,
    is_stage: bool,
) -> AdaptedModules:
    """Let adapters change a model, which has been cut to `plan`, and to a stage."""
    shards = None if plan is None else plan.shards
    return adapt_modules(model, lora, dtype=dtype, device=device, shards=shards, is_stage=is_stage)


def _kernels_of(device: torch.device) -> str:
    """Return the type of devices whose kernels a model on `device` runs: "cuda" or "cpu"."""
    return "cuda" if device.type == "cuda" else "cpu"


def _report_weights(report: OnPhase, model: str, done: int, total: int) -> None:
    report(Phase(name="load", done=done, total=total, detail=model))


def _what_was_loaded(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> str:
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    detail = f"{type(model).__name__}, {num_parameters / 1e6:.1f}M parameters, {dtype} on {device}"
    return detail.replace("torch.", "")
