"""Modules whose code is no graph compute the same by a forward that is one; others stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.aria import modeling_aria

from piecegraph.compiler.tracing.trace import trace
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.models.causal_lm import DYNAMIC_DIMS, CausalLMForward, example_inputs
from piecegraph.runner.models.config.load_config import load_config
from piecegraph.runner.models.load import load_model
from piecegraph.runner.traceable.experts import GatedExperts, ProductByExpert, ZeroExperts
from piecegraph.runner.traceable.replace import make_traceable
from piecegraph.runner.traceable.tables import KeepsItsTable, WholeTable
from tests.runner.architectures import save_tiny, tiny_model
from tests.runner.traced_once import is_shareable

KINDS = {
    "dbrx": GatedExperts,
    "longcat_flash": ZeroExperts,
    "aria_text": ProductByExpert,
    "xglm": WholeTable,
    "ctrl": KeepsItsTable,
}
"""The kind of module in a model of each type."""
CPU = torch.device("cpu")

needs_rows_by_expert = pytest.mark.skipif(
    not hasattr(modeling_aria, "AriaGroupedExpertsGemm"), reason="transformers computes Aria's experts as a graph now"
)
MODEL_TYPES = [
    pytest.param(model_type, marks=needs_rows_by_expert if kind is ProductByExpert else ())
    for model_type, kind in KINDS.items()
]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_model_computes_the_same(model_type: str) -> None:
    """Parameters and buffers stay the same tensors, under the same names."""
    model: Any = tiny_model(model_type)
    text = torch.tensor([[5, 9, 30, 31, 5, 77, 12, 60]])
    before = model.state_dict(keep_vars=True)
    with torch.no_grad():
        wanted = model(text, use_cache=False).logits
        make_traceable(model)
        assert any(isinstance(module, KINDS[model_type]) for module in model.modules())
        found = model(text, use_cache=False).logits
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)


@pytest.mark.parametrize("top_k", [2, 3])
def test_experts_that_return_their_input(top_k: int) -> None:
    """Every token, whichever experts it chose: routed ones, and those that compute nothing."""
    layer: Any = next(each for each in tiny_model("longcat_flash").modules() if hasattr(each, "zero_expert_num"))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 32, generator=generator)
    chosen = torch.stack([torch.randperm(8, generator=generator)[:top_k] for _ in range(6)])
    weights = torch.rand(6, top_k, generator=generator)
    with torch.no_grad():
        wanted = layer(x, chosen, weights)
        make_traceable(layer)
        assert type(layer) is ZeroExperts
        torch.testing.assert_close(layer(x, chosen, weights), wanted, atol=1e-5, rtol=1e-5)


@needs_rows_by_expert
@pytest.mark.parametrize("counts", [[0, 3, 0, 4], [7, 0, 0, 0], [0, 0, 0, 0]])
def test_products_of_rows_sorted_by_expert(counts: list[int]) -> None:
    """Experts that no token chose have no rows; no count is read on the host."""
    generator = torch.Generator().manual_seed(0)
    layer: Any = next(each for each in tiny_model("aria_text").modules() if hasattr(each, "groups"))
    layer.weight = torch.nn.Parameter(torch.randn(len(counts), 8, 16, generator=generator))
    layer.groups, layer.in_features, layer.out_features = layer.weight.shape
    rows, chosen = torch.randn(sum(counts), 8, generator=generator), torch.tensor(counts)
    with torch.no_grad():
        wanted = layer(rows, chosen)
        make_traceable(layer)
        assert type(layer) is ProductByExpert
        torch.testing.assert_close(layer(rows, chosen), wanted, atol=1e-5, rtol=1e-5)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # raises where a value is read
        layer.weight = torch.nn.Parameter(layer.weight.bfloat16())
        assert layer(mode.from_tensor(rows).bfloat16(), mode.from_tensor(chosen)).shape == wanted.shape


def test_a_module_that_differs_stays_as_it_is() -> None:
    """Experts with one matrix more, and classes of other packages."""
    for change in ("parameter", "package"):
        model = tiny_model("dbrx")
        layers: list[Any] = [
            each for each in model.modules() if hasattr(each, "ffn_hidden_size") and "mlp" in each._modules
        ]
        for layer in layers:
            if change == "parameter":
                layer.mlp.bias = torch.nn.Parameter(torch.zeros(4))
            else:
                layer.__class__ = type("Experts", (type(layer),), {"__module__": "remote.modeling"})
        kinds = [type(module) for module in model.modules()]
        make_traceable(model)
        assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize(
    "model_type", ["ctrl", *(pytest.param(name, marks=pytest.mark.slow) for name in KINDS if name != "ctrl")]
)
def test_all_that_a_trace_depends_on_is_known(model_type: str, tmp_path: Path) -> None:
    """So that the cache may keep it."""
    source = ModelSource(model=str(save_tiny(model_type, tiny_model(model_type), tmp_path)))
    loaded = load_model(source, load_config(source), dtype=torch.float32, device=CPU)
    with torch.no_grad():
        traced = trace(CausalLMForward(loaded.model), example_inputs(CPU), {}, DYNAMIC_DIMS)
    assert is_shareable(traced)
