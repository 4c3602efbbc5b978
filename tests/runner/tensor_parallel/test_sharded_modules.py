"""Models cut to ranks compute what the whole model computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from piecegraph.runner.tensor_parallel.expert_ranks import ExpertRanks
from piecegraph.runner.tensor_parallel.plan import rank_plan
from piecegraph.runner.tensor_parallel.sharded_modules import fill_rank_buffers, shard_model
from tests.runner.tensor_parallel.ranks_in_threads import ThreadGroup, run_ranks
from tests.runner.tiny_models import FAMILIES, UNLISTED, llama_config, make_model, random_model

PLANNED = sorted({*FAMILIES, *UNLISTED} - {"opt", "gpt2", "gpt-oss", "llama3-rope", "llama-yarn", "phi3-longrope-long"})


def cut(model: Any, rank: int, num_ranks: int, *, experts: ExpertRanks | None = None) -> Any:
    """Return a copy of `model` with one rank's weights, that transformers' own attention can run."""
    part = copy.deepcopy(model).requires_grad_(False)
    plan = rank_plan(part, rank, num_ranks, experts=experts)
    shard_model(part, plan)
    fill_rank_buffers(part, plan)
    for module in part.modules():  # which ours does not read
        if hasattr(module, "num_key_value_groups") and plan.heads is not None:
            module.num_key_value_groups = plan.heads.group
    return part


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", PLANNED)
def test_ranks_together_compute_the_model(name: str, num_ranks: int) -> None:
    """Heads, channels and vocabularies that do not divide, tied embeddings, experts, gathered projections."""
    model = make_model(name)
    input_ids = torch.randint(1, 128, (1, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(input_ids, use_cache=False).logits
    parts = [cut(model, rank, num_ranks) for rank in range(num_ranks)]

    def run(group: ThreadGroup) -> torch.Tensor:
        logits: torch.Tensor = parts[group.rank](input_ids, use_cache=False).logits
        return logits

    for logits in run_ranks(num_ranks, run):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_ranks_with_whole_experts_compute_the_model(name: str, num_ranks: int) -> None:
    """Three ranks have four experts: two, two and none."""
    model = make_model(name)
    input_ids = torch.randint(1, 128, (1, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(input_ids, use_cache=False).logits
    parts = [cut(model, rank, num_ranks, experts=ExpertRanks()) for rank in range(num_ranks)]
    held = [parameter.shape[0] for name, parameter in parts[0].named_parameters() if name.endswith("experts.down_proj")]
    assert set(held) == {2}

    def run(group: ThreadGroup) -> torch.Tensor:
        logits: torch.Tensor = parts[group.rank](input_ids, use_cache=False).logits
        return logits

    for logits in run_ranks(num_ranks, run):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("num_q_heads", [4, 6])
def test_four_ranks_pad_heads_and_vocabulary(num_q_heads: int, num_ranks: int) -> None:
    """Two KV heads for four or six query heads, held twice by four ranks; 125 tokens, of which a rank has 63 or 32."""
    model = random_model(
        llama_config(vocab_size=125, hidden_size=24, head_dim=8, num_attention_heads=num_q_heads, num_key_value_heads=2)
    )
    input_ids = torch.randint(1, 125, (1, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(input_ids, use_cache=False).logits
    parts = [cut(model, rank, num_ranks) for rank in range(num_ranks)]
    assert {part.lm_head.weight.shape[0] for part in parts} == {-(-125 // num_ranks)}

    def run(group: ThreadGroup) -> torch.Tensor:
        logits: torch.Tensor = parts[group.rank](input_ids, use_cache=False).logits
        return logits

    for logits in run_ranks(num_ranks, run):
        assert logits.shape[-1] == 125
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-5)


def test_a_rank_holds_its_share() -> None:
    """Where all divides, only norms are on every rank; tied embeddings are one tensor still."""
    model = make_model("gemma3")
    part = cut(model, 1, 2)
    assert part.lm_head.weight is part.get_input_embeddings().weight
    share = sum(each.nbytes for each in part.parameters()) / sum(each.nbytes for each in model.parameters())
    assert share < 0.5 * 1.05
