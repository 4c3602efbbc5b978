"""What each rank of a model holds, and the collectives of a step, for `explain`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn

from piecegraph.runner.tensor_parallel.plan import GATHERED, RankPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """Collectives of a step that are alike."""

    op: str
    calls: int
    bytes_per_row: int  # of the result; a row is a token, or for logits a request
    is_of_logits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksSummary:
    """The division of a model; all ranks hold tensors of the same shapes."""

    num_ranks: int
    weight_bytes: int  # of one rank, zeros of padding included
    whole_bytes: int  # of `weight_bytes`, what every rank holds whole
    q_heads: int | None  # of one rank; None: heads are not divided
    kv_heads: int | None
    padded_q_heads: int  # heads of zeros on all ranks together
    experts: int | None  # of a layer, held whole by one rank; None: experts are not divided so
    kv_copies: int  # ranks' heads, at most, that hold the same KV head
    collectives: tuple[CollectiveRow, ...]


def ranks_summary(model: Any, plan: RankPlan) -> RanksSummary:
    """Return the summary of a model that `shard_model` has cut to `plan`."""
    parameters = dict(model.named_parameters())
    heads = plan.heads
    found: Counter[tuple[str, int, bool]] = Counter()
    head = model.get_output_embeddings()
    for name, style in plan.styles.items():
        module = model.get_submodule(name)
        is_gathered = style == GATHERED
        size = module.full_out_features if is_gathered else _row_size(model, module)
        itemsize = next(module.parameters()).itemsize
        found["all_gather" if is_gathered else "all_reduce", size * itemsize, module is head] += 1
    return RanksSummary(
        num_ranks=plan.num_ranks,
        weight_bytes=sum(each.nbytes for each in parameters.values()),
        whole_bytes=sum(each.nbytes for name, each in parameters.items() if name not in plan.shards),
        q_heads=None if heads is None else heads.q_heads,
        kv_heads=None if heads is None else heads.kv_heads,
        padded_q_heads=0 if heads is None else heads.padded_q_heads,
        experts=plan.num_experts,
        kv_copies=1 if heads is None else heads.kv_copies,
        collectives=tuple(
            CollectiveRow(op=op, calls=calls, bytes_per_row=size, is_of_logits=is_of_logits)
            for (op, size, is_of_logits), calls in found.items()
        ),
    )


def _row_size(model: Any, module: nn.Module) -> int:
    """Return the size of a row that a module's all-reduce adds up."""
    if isinstance(module, nn.Linear):
        return module.out_features
    if isinstance(module, nn.Embedding):
        return module.embedding_dim
    return int(model.config.get_text_config(decoder=True).hidden_size)
