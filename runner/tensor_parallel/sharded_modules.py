"""A model's modules with one rank's weights: their parameters are cut, and some end with a collective.

A module gets a class of ours over its own; all code around it stays as it is. Weights are plain local tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from piecegraph.errors import UnsupportedModel
from piecegraph.passes.ops.collectives import ALL_GATHER, ALL_REDUCE, GATHER_TOKENS, OWN_COLUMNS, SCATTER_SUM
from piecegraph.runner.lora.modules import LoraLinear
from piecegraph.runner.quantization.expert_names import PROJECTIONS
from piecegraph.runner.quantization.experts import QuantisedExperts, cut_experts
from piecegraph.runner.quantization.methods.all_methods import METHODS
from piecegraph.runner.quantization.methods.linear_method import DoesNotFit
from piecegraph.runner.quantization.modules import CutWeights, QuantisedEmbedding, QuantisedLinear
from piecegraph.runner.tensor_parallel.plan import (
    EMBEDDING,
    GATHERED,
    MODULE_REDUCED,
    SPLIT_INPUT,
    WHOLE_EXPERTS,
    RankPlan,
)


def _product(module: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `x @ weight.T + bias` for the weight of a linear layer, however it is stored."""
    if isinstance(module, QuantisedLinear | LoraLinear):
        return module.product(x, bias)
    return nn.functional.linear(x, module.weight, bias)


class _Rowwise(nn.Linear):
    """A linear layer over this rank's columns: partial products are added up over ranks."""

    num_ranks: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  torch's name
        output: torch.Tensor = ALL_REDUCE(self._partial(input))
        return output if self.bias is None else output + self.bias

    def _partial(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self, QuantisedLinear) and METHODS[self.scheme].inputs == "tokens":
            largest = ALL_GATHER(x.abs().amax(-1, keepdim=True), self.num_ranks).amax(-1, keepdim=True)
            return self.product(x, None, largest)
        return _product(self, x, None)


class _SplitInput(_Rowwise):
    """The same, for an input that every rank has whole."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  torch's name
        return super().forward(OWN_COLUMNS(input, self.in_features))


class _Gathered(nn.Linear):
    """A linear layer over this rank's rows, whose output is joined from all ranks."""

    num_ranks: int
    full_out_features: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  torch's name
        output: torch.Tensor = ALL_GATHER(_product(self, input, self.bias), self.num_ranks)
        return output if output.shape[-1] == self.full_out_features else output[..., : self.full_out_features]


class _VocabularyPart(nn.Embedding):
    """An embedding of this rank's part of the vocabulary; other tokens are looked up on the other ranks.

    The first token is a buffer and no number, because ranks share one graph.
    """

    first_token: torch.Tensor  # [] int64

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  torch's name
        local = input - self.first_token
        is_elsewhere = (local < 0) | (local >= self.num_embeddings)
        rows = super().forward(local.masked_fill(is_elsewhere, 0))
        output: torch.Tensor = ALL_REDUCE(rows.masked_fill(is_elsewhere.unsqueeze(-1), 0.0))
        return output


class _Reduced(nn.Module):
    """A module whose output is a part of the sum over ranks."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        output: torch.Tensor = ALL_REDUCE(super().forward(*args, **kwargs))
        return output


class _ExpertsPart(nn.Module):
    """A module of experts of which this rank has some whole; the other ranks compute the pairs of all others.

    A pair of a token and an expert of another rank gets the number behind the last expert and no weight, as experts of
    transformers expect it. The first expert is a buffer and no number, because ranks share one graph.
    """

    first_expert: torch.Tensor  # [] int64
    num_experts: int  # of this rank
    num_engines: int  # whose ranks share the experts; each engine has tokens of its own, and as many
    num_ranks: int  # of this engine

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        num_engines = self.num_engines
        if num_engines > 1:
            hidden_states, top_k_index, top_k_weights = (
                GATHER_TOKENS(each, num_engines) for each in (hidden_states, top_k_index, top_k_weights)
            )
        local = top_k_index - self.first_expert
        is_elsewhere = (local < 0) | (local >= self.num_experts)
        local, weights = local.masked_fill(is_elsewhere, self.num_experts), top_k_weights.masked_fill(is_elsewhere, 0.0)
        output: torch.Tensor = super().forward(hidden_states, local, weights)
        if num_engines > 1:
            output = SCATTER_SUM(output, num_engines)
        return ALL_REDUCE(output) if self.num_ranks > 1 else output


@functools.cache
def _over(ours: Hashable, own: Hashable) -> Any:
    """Return a class over both, the same one each time. It knows `own`, and how to be made over another class."""
    assert isinstance(ours, type) and isinstance(own, type), (ours, own)
    members = {"__module__": __name__, "plain_class": own, "over": staticmethod(functools.partial(_over, ours))}
    return type(f"{ours.__name__.lstrip('_')}{own.__name__}", (ours, own), members)


def shard_model(model: Any, plan: RankPlan) -> None:
    """Cut the parameters of a model to `plan`, and give modules that need a collective their class, in place.

    Parameters that share memory are cut once. Quantised weights are cut by their method. Call `fill_rank_buffers` when
    the model has its values. Raises `UnsupportedModel` for a weight that is stored in a way that cannot be cut so.
    """
    quantised = CutWeights()
    cut: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # with the old parameter, which must live to keep its id
    for name, shard in plan.shards.items():
        owner_name, _, short = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        if short == "weight" and isinstance(owner, QuantisedLinear | QuantisedEmbedding):
            _cut_quantised(functools.partial(quantised.cut, owner, shard), owner, name)
            continue
        if short in PROJECTIONS and isinstance(owner, QuantisedExperts):
            _cut_quantised(functools.partial(cut_experts, owner, short, shard), owner, name)
            continue
        parameter = owner._parameters[short]
        if id(parameter) in {id(new) for _, new in cut.values()}:
            continue  # tied, and cut under its other name
        if id(parameter) not in cut:
            local = nn.Parameter(shard.of(parameter.detach()), requires_grad=False)
            cut[id(parameter)] = parameter, local
        owner._parameters[short] = cut[id(parameter)][1]
    for module in model.modules():  # other names of tied parameters
        if isinstance(module, QuantisedLinear | QuantisedEmbedding):
            quantised.share(module)
        for short, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in cut:
                module._parameters[short] = cut[id(parameter)][1]
    for name, style in plan.styles.items():
        _change_class(model.get_submodule(name), style, plan, name)
    for name in plan.shards:
        module = model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, nn.Linear) and name.endswith(".weight"):
            shape = plan.shards[name].local_shape((module.out_features, module.in_features))
            module.out_features, module.in_features = shape


def _cut_quantised(cut: Callable[[], None], module: Any, name: str) -> None:
    """Cut the quantised weight of a module. Raises `UnsupportedModel`."""
    try:
        cut()
    except DoesNotFit as error:
        whole = ", enable_expert_parallel" if isinstance(module, QuantisedExperts) else ""
        raise UnsupportedModel(
            f"{name} is quantised ({module.scheme}) in a way that ranks cannot divide: {error}. Use another "
            f"tensor_parallel_size{whole}, or unquantised weights."
        ) from error


def _change_class(module: Any, style: str, plan: RankPlan, name: str) -> None:
    own: Any = type(module)
    if style == EMBEDDING:
        module.num_embeddings = plan.shards[f"{name}.weight"].size
        module.padding_idx = None  # only gradients depend on it
        device = next(module.parameters(recurse=False)).device
        module.register_buffer("first_token", torch.zeros((), dtype=torch.int64, device=device), persistent=False)
        module.__class__ = _over(_VocabularyPart, own)
    elif style in MODULE_REDUCED:
        module.__class__ = _over(_Reduced, own)
    elif style == WHOLE_EXPERTS:
        parameter = next(module.parameters(recurse=False))
        module.num_experts = parameter.shape[0]
        module.num_engines = 1 if plan.experts is None else plan.experts.num_engines
        module.num_ranks = plan.num_ranks
        module.register_buffer(
            "first_expert", torch.zeros((), dtype=torch.int64, device=parameter.device), persistent=False
        )
        module.__class__ = _over(_ExpertsPart, own)
    elif style == GATHERED:
        module.full_out_features = plan.shards[f"{name}.weight"].full_size
        module.num_ranks = plan.num_ranks
        module.__class__ = _over(_Gathered, own)
    else:
        module.num_ranks = plan.num_ranks
        module.__class__ = _over(_SplitInput if style == SPLIT_INPUT else _Rowwise, own)


def fill_rank_buffers(model: nn.Module, plan: RankPlan) -> None:
    """Write the buffers that differ between ranks. Loading a checkpoint leaves them without values."""
    for module in model.modules():
        if isinstance(module, _VocabularyPart):
            module.first_token.fill_(plan.rank * module.num_embeddings)
        elif isinstance(module, _ExpertsPart):
            module.first_expert.fill_(plan.expert_rank * module.num_experts)
