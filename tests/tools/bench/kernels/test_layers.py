"""Tests of the `layers` bench: its chain of layers, the layouts of a sweep, and timing on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from piecegraph.passes.kernels.linear.linear_parts import parts_config
from piecegraph.passes.kernels.linear.split_linear_config import SplitConfig
from piecegraph.passes.kernels.linear.streamed_config import StreamedConfig
from piecegraph.tools.bench.kernels.layer_chain import LayerChain, LayerShape, is_in_parts
from piecegraph.tools.bench.kernels.layers import linear_layouts, linear_setting, main
from piecegraph.tools.bench.kernels.linear import linears_of
from tests.gpus import H200


def test_shapes_are_those_of_bench_linear() -> None:
    for model, num_ranks in (("qwen3-0.6b", 1), ("llama-8b", 1), ("llama-8b", 2), ("llama-70b", 8)):
        shape = LayerShape.of(model, num_ranks)
        linears = {each.name: each for each in linears_of(model, num_ranks) if each.name != "head"}
        assert {name: size for name, (_, size) in shape.weight_shapes.items()} == {
            name: each.size for name, each in linears.items()
        }
        assert {name: rows for name, (rows, _) in shape.weight_shapes.items()} == {
            name: each.num_weight_rows for name, each in linears.items()
        }
        assert shape.weight_bytes == sum(each.weight_bytes for each in linears.values())
    assert LayerShape.of("qwen3-0.6b").kv_bytes(8, 580) == 8 * 580 * 2 * 8 * 128 * 2


@pytest.mark.parametrize("batch", [1, 2, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("model", ["qwen3-0.6b", "llama-8b"])
def test_a_sweep_has_parts_where_a_norm_follows(model: str, batch: int) -> None:
    """The default layout is among them, where it is streamed or of a large weight; all layouts differ in their text."""
    for linear in linears_of(model)[:4]:
        found = linear_layouts(model, linear.name, batch)
        assert len(set(found)) == len(found) == len({linear_setting(each) for each in found})
        in_parts = [each for each in found if is_in_parts(each)]
        assert bool(in_parts) == (not linear.follows_norm)
        taken = parts_config(batch, linear.num_columns, linear.size, itemsize=2, gpu=H200)
        if not linear.follows_norm and taken is not None and batch <= 32:
            assert taken in in_parts
        if isinstance(taken, SplitConfig) and model == "llama-8b":  # sweeps fill a multiprocessor's shared memory
            alike = [each for each in in_parts if isinstance(each, SplitConfig)]
            assert taken in [replace(each, num_stages=taken.num_stages) for each in alike]


@pytest.mark.parametrize("batch", [1, 8])
def test_a_sweep_of_a_share_has_streamed_layouts_and_no_parts(batch: int) -> None:
    for linear in linears_of("llama-8b", 2)[:4]:
        found = linear_layouts("llama-8b", linear.name, batch, 2)
        assert len(set(found)) == len(found)
        assert any(isinstance(each, StreamedConfig) for each in found) and not any(map(is_in_parts, found))


@pytest.mark.parametrize("is_share", [False, True])
def test_without_attention_a_chain_runs_anywhere(is_share: bool) -> None:
    """The chain computes each layer's linears, norms and residuals once each, as the written-out form does.

    So does the share of a rank, which ends with the last layer.
    """
    shape = LayerShape(
        num_layers=2, hidden=64, inner=96, heads=LayerShape.of("qwen3-0.6b").heads, has_head_norm=True, max_len=64,
        is_share=is_share,
    )  # fmt: skip
    chain = LayerChain(shape, 3, 20, 2, torch.device("cpu"))
    found = chain.run(None, {})

    def normed(x: torch.Tensor) -> torch.Tensor:
        return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).bfloat16()

    residual = chain.x + chain.residual
    qkv = normed(residual) @ chain.weights[0]["qkv"].T
    for layer, weights in enumerate(chain.weights):
        residual = residual + qkv[:, :2048] @ weights["output"].T
        gate, up = (normed(residual) @ weights["gate_up"].T).chunk(2, -1)
        last = (torch.nn.functional.silu(gate) * up) @ weights["down"].T
        residual = residual + last
        qkv = normed(residual) @ chain.weights[(layer + 1) % 2]["qkv"].T
    torch.testing.assert_close(found, last if is_share else qkv, atol=0.05, rtol=0.05)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 1 and "needs one" in result.output


def test_ranks_that_cannot_share_the_heads_are_refused() -> None:
    result = CliRunner().invoke(main, ["--model", "llama-8b", "--shard-of", "3"])
    assert result.exit_code == 2 and "3 ranks cannot divide" in result.output


@pytest.mark.gpu
def test_it_times_and_sweeps() -> None:
    """No layout of a sweep gives other numbers than the default layouts."""
    for sweep in ("attention", "down"):
        result = CliRunner().invoke(main, ["--batch", "1,8", "--layers", "3", "--sweep", sweep, "--top", "99"])
        assert result.exit_code == 0, result.output
        assert "WRONG" not in result.output and result.output.count("all kernels") == 2
        assert result.output.count(f"us  {sweep}") > 8
    share = ["--model", "llama-8b", "--shard-of", "2", "--batch", "1,8", "--layers", "3", "--sweep", "down"]
    share += ["--seconds", "0.05"]
    result = CliRunner().invoke(main, share)
    assert result.exit_code == 0 and "WRONG" not in result.output, result.output
