"""The stages of a pipeline: which layers and which other modules of a model each of them holds.

The plan is transformers' own, read as data: `base_model_pp_plan` names the modules of the base model in the order in
which they run, with the names of what each takes and returns. One of them is a list of layers, which is divided; those
before it are held by the first stage, those behind it by the last, with everything around the base model (`_pp_plan`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from piecegraph.errors import ConfigError, UnsupportedModel
from piecegraph.runner.pipeline_parallel.missing_module import MissingModule

_ONE_STAGE = "use pipeline_parallel_size=1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One of the stages that a step passes through, in order."""

    index: int
    num_stages: int

    @property
    def is_first(self) -> bool:
        """Whether the stage begins with token ids."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage ends with logits, and samples."""
        return self.index == self.num_stages - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """What one stage holds of a model."""

    stage: Stage
    layers: range  # numbers of the layers that it holds
    list_name: str  # the name of the list of layers in the model
    missing: tuple[str, ...]  # names of modules that it does not hold, in order
    hidden_size: int


def layers_of_stage(num_layers: int, stage: Stage) -> range:
    """Return the numbers of the layers of a stage.

    All stages have the same number of layers. A rest is given one each to stages from the last but one backwards, as
    vLLM does, because the last stage computes logits too and the first has the embedding.
    """
    base, rest = divmod(num_layers, stage.num_stages)
    counts = [base] * stage.num_stages
    for place in range(rest):
        counts[-2 - place] += 1
    start = sum(counts[: stage.index])
    return range(start, start + counts[stage.index])


def stage_plan(model: Any, stage: Stage) -> StagePlan:
    """Return what `stage` holds of a transformers model, which may be on the meta device.

    Raises `UnsupportedModel` for a model without a plan, or with parameters that its plan does not name, and
    `ConfigError` for more stages than layers.
    """
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    plan = getattr(config, "base_model_pp_plan", None) or {}
    base, prefix = model.base_model, model.base_model_prefix
    lists = [each for each in plan if isinstance(getattr(base, each, None), nn.ModuleList)]
    if base is model or len(lists) != 1:
        raise UnsupportedModel(
            f"{name} has no plan for pipeline parallelism in transformers (base_model_pp_plan) with one list of "
            f"layers; {_ONE_STAGE}."
        )
    list_name, order = lists[0], list(plan)
    num_layers = len(getattr(base, list_name))
    if num_layers < stage.num_stages:
        raise ConfigError(
            f"pipeline_parallel_size={stage.num_stages}, and the model has {num_layers} layers; give at most as many "
            "stages as layers."
        )
    around = [each for each, child in model.named_children() if child is not base and list(child.parameters())]
    unplanned = [f"{prefix}.{each}" for each, child in base.named_children() if each not in plan and has_state(child)]
    unplanned += [each for each in around if each not in (getattr(model, "_pp_plan", None) or {})]
    if unplanned or list(base.parameters(recurse=False)) or list(model.parameters(recurse=False)):
        raise UnsupportedModel(
            f"{name} has parameters outside of its plan for pipeline parallelism ({', '.join(unplanned)}); "
            f"{_ONE_STAGE}."
        )
    held = layers_of_stage(num_layers, stage)
    before = [f"{prefix}.{each}" for each in order[: order.index(list_name)]]
    behind = [f"{prefix}.{each}" for each in order[order.index(list_name) + 1 :]]
    missing = [f"{prefix}.{list_name}.{number}" for number in range(num_layers) if number not in held]
    if not stage.is_first:
        missing += [each for each in before if not (stage.is_last and _is_tied(model, each))]
    if not stage.is_last:
        missing += [*behind, *around]
    return StagePlan(
        stage=stage,
        layers=held,
        list_name=f"{prefix}.{list_name}",
        missing=tuple(missing),
        hidden_size=int(config.hidden_size),
    )


def has_state(module: nn.Module) -> bool:
    """Return whether a module has parameters of its own."""
    return next(module.parameters(), None) is not None


def cut_to_stage(model: Any, plan: StagePlan) -> None:
    """Replace the modules that the stage does not hold by `MissingModule`s, in place."""
    for name in plan.missing:
        parent, _, short = name.rpartition(".")
        setattr(model.get_submodule(parent), short, MissingModule(model.get_submodule(name), name))
    held = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied = getattr(model, "all_tied_weights_keys", None)
    if tied:  # transformers ties the weights of a loaded model by this
        model.all_tied_weights_keys = {one: other for one, other in tied.items() if {one, other} <= held}


def _is_tied(model: Any, name: str) -> bool:
    """Return whether another module reads a weight of the module `name`, as an output layer reads the embedding's.

    While a checkpoint is loaded, such weights are not one tensor yet, so transformers' names of them are read.
    """
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return any(weight.startswith(f"{name}.") for pair in tied.items() for weight in pair)


class StageCut:
    """Cuts models to a stage, those without weights and the one with them; to none, it leaves them whole."""

    def __init__(self, stage: Stage | None) -> None:
        self._stage = stage
        self.plan: StagePlan | None = None
        """What the stage holds of the last model; None: there is no stage, or no model has been cut."""

    @property
    def cuts(self) -> bool:
        """Whether there is a stage."""
        return self._stage is not None

    def cut(self, model: Any) -> None:
        """Cut a transformers model in place; one that is cut already stays as it is. Raises what `stage_plan` does."""
        if self._stage is None or any(isinstance(module, MissingModule) for module in model.modules()):
            return
        self.plan = stage_plan(model, self._stage)
        cut_to_stage(model, self.plan)
