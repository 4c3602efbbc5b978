"""The division of a model among ranks, from the plan that transformers keeps with the model's class and config.

A plan maps names of modules and parameters, with `*` for the numbers of layers, to styles. `RankPlan` is what follows
for one rank: the part of each parameter that the rank holds, and the modules whose forward needs a collective.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from piecegraph.errors import ModelError, UnsupportedModel
from piecegraph.runner.pipeline_parallel.missing_module import MissingModule
from piecegraph.runner.quantization.methods.shard import Shard
from piecegraph.runner.tensor_parallel.expert_ranks import ExpertRanks
from piecegraph.runner.tensor_parallel.shards import HeadSplit, even_shard

REPLICATED = frozenset({"replicated_with_grad_allreduce", "mla_kv_a_proj", "replicate", "replicated"})
"""Styles of modules that every rank holds whole; they differ only in the gradients of training."""

GATHERED, SPLIT_INPUT = "colwise_gather_output", "rowwise_split_input"
EMBEDDING, MODULE_REDUCED = "embedding_rowwise", ("moe_tp_experts", "all_reduce")
WHOLE_EXPERTS, EXPERT_PARAMETER = "ep_experts", "grouped_gemm"
"""Styles of expert parallelism: a module of experts, under our name, and a parameter whose first dim counts experts."""
EXPERT_MODULES = ("moe_tp_experts", "ep_dispatch_experts")
"""The styles of a module of experts in plans of expert parallelism: of transformers 5.17, and of 5.24 on."""
SHARDED_PARAMETERS = {"colwise": (-2, 1), "packed_colwise": (-2, 2), "rowwise": (-1, 1), "packed_rowwise": (-1, 2)}
"""By style, the dim of a parameter (of 2 dims or more) that is divided, and how many tensors are packed in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """What one rank holds of a model, and which modules end with a collective."""

    rank: int
    num_ranks: int
    heads: HeadSplit | None  # None: every rank computes all heads
    shards: Mapping[str, Shard]  # by the parameter's name; others are held whole
    styles: Mapping[str, str] = field(default_factory=dict)  # of modules whose forward changes
    experts: ExpertRanks | None = None  # who shares whole experts; None: nobody does

    @property
    def expert_rank(self) -> int:
        """The number of this rank among those that share experts."""
        return 0 if self.experts is None else self.experts.of(self.rank, self.num_ranks)[0]

    @property
    def num_experts(self) -> int | None:
        """The experts of a layer that a rank holds whole, with padding; None: experts are not divided so."""
        modules = [name for name, style in self.styles.items() if style == WHOLE_EXPERTS]
        return next((shard.size for name, shard in self.shards.items() if name.rpartition(".")[0] in modules), None)


def styles_of(model: Any, *, divides_experts: bool = False, num_ranks: int = 2) -> dict[str, str]:
    """Return the rules of a transformers model by name. Raises `UnsupportedModel` if it has none.

    `divides_experts`: each rank holds some experts whole (`base_model_ep_plan`), not a part of each. An engine of one
    rank divides nothing else.
    """
    if num_ranks == 1:
        return _expert_rules(model, {}) if divides_experts else {}
    config = model.config.get_text_config(decoder=True)
    prefix = model.base_model_prefix
    base = getattr(config, "base_model_tp_plan", None) or {}
    rules = {f"{prefix}.{name}" if prefix else name: style for name, style in base.items()}
    rules.update(type(model)._tp_plan or {})
    if not any("*" in name for name in base):  # gpt-oss divides its embedding alone from transformers 5.24 on
        raise UnsupportedModel(
            f"{type(model).__name__} has no plan for tensor parallelism of its layers in transformers "
            "(base_model_tp_plan); use tensor_parallel_size=1."
        )
    return {**rules, **_expert_rules(model, rules)} if divides_experts else rules


def _expert_rules(model: Any, rules: dict[str, str]) -> dict[str, str]:
    """Return the rules of expert parallelism, and take those of the same experts out of `rules`."""
    config = model.config.get_text_config(decoder=True)
    plan = getattr(config, "base_model_ep_plan", None) or {}
    prefix = f"{model.base_model_prefix}." if model.base_model_prefix else ""
    experts = [f"{prefix}{name}" for name, style in plan.items() if style in EXPERT_MODULES]
    if not experts:
        raise UnsupportedModel(
            f"{type(model).__name__} has no plan for expert parallelism in transformers (base_model_ep_plan); leave "
            "enable_expert_parallel out."
        )
    for name in [name for name in rules if any(name == each or name.startswith(f"{each}.") for each in experts)]:
        del rules[name]
    found = {f"{prefix}{name}": style for name, style in plan.items() if style == EXPERT_PARAMETER}
    return {**found, **dict.fromkeys(experts, WHOLE_EXPERTS)}


def rank_plan(model: Any, rank: int, num_ranks: int, *, experts: ExpertRanks | None = None) -> RankPlan:
    """Return what `rank` holds of a transformers model, which may be on the meta device.

    `experts`: the engines among whose ranks experts are divided, each whole; None: each rank has a part of each expert.
    Modules of other stages of a pipeline (`MissingModule`) are left out. Raises `UnsupportedModel`, with the module's
    name, for what cannot be divided.
    """
    rules = styles_of(model, divides_experts=experts is not None, num_ranks=num_ranks)
    planned = _planned(model, rules)
    shards: dict[str, Shard] = {}
    styles: dict[str, str] = {}
    heads = _head_split(model, planned, num_ranks)
    for name, style in planned.items():
        try:
            found = _parameters_of(model, name)
        except AttributeError:
            continue
        module = model.get_submodule(name) if not isinstance(found, nn.Parameter) else None
        if style in REPLICATED or isinstance(module, MissingModule):
            continue
        if module is None and style == EXPERT_PARAMETER:
            parameter = model.get_parameter(name)
            assert experts is not None, name
            shards[name] = even_shard(-parameter.ndim, parameter.shape[0], *experts.of(rank, num_ranks))
        elif module is None:
            shards[name] = _parameter_shard(model, name, style, heads, rank, num_ranks)
        elif style == WHOLE_EXPERTS:
            _check_experts(name, module)
            styles[name] = style
        elif style in MODULE_REDUCED:
            styles[name] = style
        else:
            shards.update(_module_shards(model, name, module, style, heads, rank, num_ranks))
            if style != "colwise":
                styles[name] = style
    _divide_vocabulary(model, shards, styles, rank, num_ranks)
    return RankPlan(rank=rank, num_ranks=num_ranks, heads=heads, shards=shards, styles=styles, experts=experts)


def _check_experts(name: str, module: Any) -> None:
    num_experts = getattr(module, "num_experts", None)
    sizes = {parameter.shape[0] for parameter in module.parameters(recurse=False)}
    if sizes != {num_experts} or list(module.children()) not in ([], [getattr(module, "act_fn", None)]):
        raise UnsupportedModel(
            f"{name} ({type(module).__name__}) keeps its experts in another way than expert parallelism can divide; "
            "leave enable_expert_parallel out."
        )


def check_heads(plan: RankPlan | None, layers: Iterable[tuple[str, int, int]]) -> None:
    """Raise `UnsupportedModel` unless each layer `(name, query heads, KV heads)` computes the heads of the plan.

    A layer whose heads are not divided, but whose model's are, computes all of them.
    """
    if plan is None or plan.heads is None:
        return
    heads = plan.heads
    for name, q_heads, kv_heads in layers:
        if (q_heads, kv_heads) not in ((heads.q_heads, heads.kv_heads), (heads.num_q_heads, heads.num_kv_heads)):
            raise UnsupportedModel(
                f"{name} computes {q_heads} query heads and {kv_heads} KV heads on a rank, and not the "
                f"{heads.q_heads} and {heads.kv_heads} that tensor parallelism gave it."
            )


def _planned(model: nn.Module, rules: Mapping[str, str]) -> dict[str, str]:
    """Return the style of each module and parameter that a rule names."""
    patterns = [(re.compile(re.escape(name).replace(r"\*", r"\d+")), style) for name, style in rules.items()]
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found: dict[str, str] = {}
    for name in names:
        for pattern, style in patterns:
            if pattern.fullmatch(name):
                found[name] = style
    return found


def _parameters_of(model: nn.Module, name: str) -> nn.Module | nn.Parameter:
    try:
        return model.get_parameter(name)
    except AttributeError:
        return model.get_submodule(name)


def _attention_of(model: nn.Module, name: str) -> nn.Module | None:
    """Return the module of attention that the module or parameter `name` belongs to, or None."""
    parent = model.get_submodule(name.rpartition(".")[0])
    return parent if isinstance(getattr(parent, "is_causal", None), bool) else None


def _head_split(model: Any, planned: Mapping[str, str], num_ranks: int) -> HeadSplit | None:
    divided = [name for name, style in planned.items() if style == "colwise" and _attention_of(model, name) is not None]
    if not divided:
        return None
    config = model.config.get_text_config(decoder=True)
    q_heads = config.num_attention_heads
    groups = {getattr(_attention_of(model, name), "num_key_value_groups", 1) for name in divided}
    if not isinstance(q_heads, int) or len(groups) != 1:
        raise UnsupportedModel(f"{divided[0]}: layers differ in their number of heads, which cannot be divided here.")
    return HeadSplit.of(q_heads, q_heads // groups.pop(), num_ranks)


def _module_shards(
    model: nn.Module, name: str, module: nn.Module, style: str, heads: HeadSplit | None, rank: int, num_ranks: int
) -> Iterator[tuple[str, Shard]]:
    """Yield the part of each parameter of a module that `rank` holds."""
    known = {*SHARDED_PARAMETERS, GATHERED, SPLIT_INPUT, EMBEDDING}
    if style not in known:
        raise UnsupportedModel(f"{name} is {style!r} in the model's plan, which is not available here.")
    if style == EMBEDDING:
        if not isinstance(module, nn.Embedding):
            raise UnsupportedModel(f"{name} is {style!r} in the model's plan, but is a {type(module).__name__}.")
        yield f"{name}.weight", even_shard(-2, module.weight.shape[0], rank, num_ranks)
        return
    if not isinstance(module, nn.Linear):
        raise UnsupportedModel(
            f"{name} is {style!r} in the model's plan, and only linear layers are divided so; it is a "
            f"{type(module).__name__}."
        )
    base = {GATHERED: "colwise", SPLIT_INPUT: "rowwise"}.get(style, style)
    for each, parameter in module.named_parameters(recurse=False):
        if each == "bias" and base.endswith("rowwise"):
            continue  # added once, after the sum
        if style in ("colwise", "rowwise"):
            yield f"{name}.{each}", _parameter_shard(model, f"{name}.{each}", style, heads, rank, num_ranks, name)
            continue
        dim, packed = SHARDED_PARAMETERS[base]
        dim = -1 if parameter.ndim == 1 else dim
        yield f"{name}.{each}", even_shard(dim, parameter.shape[dim], rank, num_ranks, packed=packed)


def _parameter_shard(
    model: nn.Module,
    name: str,
    style: str,
    heads: HeadSplit | None,
    rank: int,
    num_ranks: int,
    module_name: str | None = None,
) -> Shard:
    """Return the part of a parameter that `rank` holds; one of attention is divided by heads."""
    if style not in SHARDED_PARAMETERS:
        raise UnsupportedModel(f"{name} is {style!r} in the model's plan, which is not available here.")
    parameter = model.get_parameter(name)
    dim, packed = SHARDED_PARAMETERS[style]
    dim = -1 if parameter.ndim == 1 else dim
    full_size = parameter.shape[dim]
    owner = module_name or name
    attention = _attention_of(model, owner)
    if attention is None:
        if full_size % packed:
            raise ModelError(f"{name} has size {full_size}, which is not {packed} tensors of equal size.")
        return even_shard(dim, full_size, rank, num_ranks, packed=packed)
    if heads is None or packed != 1:
        raise UnsupportedModel(f"{owner} is {style!r} in the model's plan, but its heads cannot be divided here.")
    short = owner.rpartition(".")[2]
    is_grouped = heads.num_kv_heads < heads.num_q_heads
    is_kv = is_grouped and short.startswith(("k", "v"))
    count = heads.num_kv_heads if is_kv else heads.num_q_heads
    is_fused = is_grouped and ("qkv" in short or "query_key_value" in short)
    head_dim = getattr(attention, "head_dim", None)
    divides = full_size % count == 0 and not is_fused
    if divides and is_grouped and isinstance(head_dim, int) and parameter.ndim > 1 and not is_kv and style == "colwise":
        divides = full_size in (count * head_dim, 2 * count * head_dim)
    if not divides:
        raise UnsupportedModel(
            f"{owner} has {full_size} {'columns' if dim == -1 and parameter.ndim > 1 else 'rows'}, which are not those "
            f"of {count} heads; tensor parallelism cannot divide it."
        )
    return (heads.kv_shard if is_kv else heads.q_shard)(dim, full_size, rank)


def _divide_vocabulary(model: Any, shards: dict[str, Shard], styles: dict[str, str], rank: int, num_ranks: int) -> None:
    """Divide the input embedding by vocabulary where the output layer is, so that no rank holds either whole."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    name = next((name for name, module in model.named_modules() if module is embedding), "")
    head_name = next((name for name, module in model.named_modules() if module is head and head is not None), "")
    is_tied = isinstance(head, nn.Linear) and head.weight is getattr(embedding, "weight", None)
    if styles.get(head_name) == GATHERED and isinstance(embedding, nn.Embedding) and name not in styles:
        shards[f"{name}.weight"] = even_shard(-2, embedding.weight.shape[0], rank, num_ranks)
        styles[name] = EMBEDDING
    elif is_tied and head_name in styles and (styles[head_name], styles.get(name)) != (GATHERED, EMBEDDING):
        raise UnsupportedModel(
            f"{head_name} is {styles[head_name]!r} in the model's plan and shares its weight with the embedding, which "
            "tensor parallelism cannot divide so."
        )
