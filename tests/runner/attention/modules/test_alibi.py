"""The slopes of biases are read off the code of transformers that makes them, and only if they are slopes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import nn
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt

from piecegraph.runner.attention.modules.alibi import adds_position_bias, alibi_slopes
from piecegraph.runner.attention.modules.clipped import ClippedAttention


def module_of(source: str) -> nn.Module:
    kind: type[nn.Module] = type("Attention", (nn.Module,), {"__module__": source})
    return kind()


@pytest.mark.parametrize("num_heads", [4, 6, 16])
def test_slopes_give_the_tables_of_transformers(num_heads: int) -> None:
    """In full for BLOOM; rounded as Falcon rounds; for MPT up to the bias of the first key."""
    positions = torch.arange(500)
    mask = torch.ones(1, 500, dtype=torch.long)
    bloom, falcon, mpt = (
        alibi_slopes(module_of(each.__name__), num_heads) for each in (modeling_bloom, modeling_falcon, modeling_mpt)
    )
    assert bloom is not None and falcon is not None and mpt is not None
    assert (bloom.dtype, falcon.dtype, mpt.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    table = modeling_bloom.build_alibi_tensor(mask, num_heads, torch.float32)[:, 0]
    assert torch.equal(bloom[:, None] * positions, table)
    table = modeling_falcon.build_alibi_tensor(mask, num_heads, torch.float32)[:, 0]
    assert torch.equal((falcon[:, None] * positions).float(), table)
    table = modeling_mpt.build_mpt_alibi_tensor(num_heads, 500)[:, 0]
    assert torch.equal(mpt[:, None] * (positions - 499), table)


def squares(mask: torch.Tensor, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(mask.shape[1]).to(dtype) ** 2).expand(num_heads, 1, -1)


def of_one_head(mask: torch.Tensor, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(mask.shape[1]).to(dtype)


@pytest.mark.parametrize("function", [squares, of_one_head, None])
def test_other_biases_are_not_taken_for_slopes(
    function: Callable[..., torch.Tensor] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"biases_of_{getattr(function, '__name__', None)}"
    code = ModuleType(name)
    if function is not None:
        code.build_alibi_tensor = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, code)
    assert alibi_slopes(module_of(name), 4) is None


def test_slopes_are_a_buffer_that_is_not_saved() -> None:
    layer = module_of(modeling_mpt.__name__)
    vars(layer)["n_heads"] = 2
    ClippedAttention.take_over(layer)
    layer.__class__ = ClippedAttention
    assert dict(layer.named_buffers()).keys() == {"alibi_slopes"} and not layer.state_dict()
    assert adds_position_bias(nn.ModuleList([layer])) and not adds_position_bias(nn.Linear(2, 2))
