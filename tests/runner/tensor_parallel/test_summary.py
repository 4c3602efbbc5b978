from __future__ import annotations

from piecegraph.runner.tensor_parallel.expert_ranks import ExpertRanks
from piecegraph.runner.tensor_parallel.plan import rank_plan
from piecegraph.runner.tensor_parallel.sharded_modules import shard_model
from piecegraph.runner.tensor_parallel.summary import CollectiveRow, RanksSummary, ranks_summary
from tests.runner.tiny_models import make_model


def summary_of(name: str, num_ranks: int, *, experts: ExpertRanks | None = None) -> RanksSummary:
    model = make_model(name)
    plan = rank_plan(model, 0, num_ranks, experts=experts)
    shard_model(model, plan)
    return ranks_summary(model, plan)


def test_collectives_of_a_step_and_their_bytes() -> None:
    """Two layers with two sums each and that of the embedding, of 32 floats a token; 128 logits a request."""
    assert set(summary_of("llama", 2).collectives) == {
        CollectiveRow(op="all_reduce", calls=5, bytes_per_row=128, is_of_logits=False),
        CollectiveRow(op="all_gather", calls=1, bytes_per_row=512, is_of_logits=True),
    }


def test_a_rank_holds_its_share_of_weights() -> None:
    """Where all divides, a rank has at most 5 % more than its share of what is divided."""
    whole = sum(parameter.nbytes for parameter in make_model("llama").parameters())
    assert summary_of("llama", 2).weight_bytes < 1.05 * whole / 2


def test_experts_are_divided_whole() -> None:
    assert summary_of("mixtral", 2).experts is None
    found = summary_of("mixtral", 2, experts=ExpertRanks())
    assert found.experts == 2
    assert found.collectives == summary_of("mixtral", 2).collectives


def test_four_ranks_pad_what_does_not_divide() -> None:
    """Four query and two KV heads on four ranks: each KV head twice; of five ranks one has heads of zeros."""
    four, five = summary_of("llama", 4), summary_of("llama", 5)
    assert (four.q_heads, four.kv_heads, four.kv_copies, four.padded_q_heads) == (1, 1, 2, 0)
    assert (five.q_heads, five.kv_heads, five.padded_q_heads) == (1, 1, 1)
