"""Models divided among ranks and stages: what can be, what a rank holds, and the cut of a whole model to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from piecegraph.errors import UnsupportedModel
from piecegraph.runner.attention.modules.replace import has_own_attention
from piecegraph.runner.models.causal_lm import counts_positions
from piecegraph.runner.models.common.rank_share import RankShare
from piecegraph.runner.models.mechanisms.replaced_layers import compresses_keys
from piecegraph.runner.pipeline_parallel.stage import StagePlan
from piecegraph.runner.pipeline_parallel.stage_forward import check_passes_through
from piecegraph.runner.state_layers.modules.replace import first_state_layer, has_state_layers
from piecegraph.runner.tensor_parallel.plan import RankPlan, rank_plan
from piecegraph.runner.tensor_parallel.sharded_modules import fill_rank_buffers, shard_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def check_divisible(config: PreTrainedConfig, num_ranks: int) -> None:
    """Raise `UnsupportedModel` for what several ranks cannot divide."""
    if num_ranks > 1 and compresses_keys(config):
        raise UnsupportedModel(
            "the model has latent attention (kv_lora_rank), which tensor parallelism does not divide yet; use "
            "tensor_parallel_size=1."
        )


def plan_of_rank(model: PreTrainedModel, plan: RankPlan | None, share: RankShare) -> RankPlan | None:
    """Return what a rank holds of a whole model, or `plan` if the model has been cut; None: nothing is divided.

    Raises `UnsupportedModel` for layers of kinds that are not divided.
    """
    if not share.is_divided:
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
    return rank_plan(model, share.rank, share.num_ranks, experts=share.experts) if plan is None else plan


def cut_to_rank(model: PreTrainedModel, plan: RankPlan | None, *, is_cut: bool) -> None:
    """Cut a model to a rank's plan, unless it was loaded so, and write the buffers that differ between ranks."""
    if plan is None:
        return
    if not is_cut:
        shard_model(model, plan)
    fill_rank_buffers(model, plan)


def check_stages(model: PreTrainedModel, plan: StagePlan | None) -> None:
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
