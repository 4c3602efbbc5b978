"""docs/other_runners.md: vLLM's ops are cut at by default, `weight.data` is read as a view, and runs are compared.

Neither vLLM nor nano-vllm is needed here: an op of vLLM's name stands for vLLM's.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import piecegraph as pg
from piecegraph.config import DEFAULT_SPLIT_OPS
from piecegraph.passes.matching.effects import is_pure, is_unmodified_input, view_source

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
ATTENTION = "vllm::unified_attention_with_output"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a script of docs/examples as it imports others: from its own folder."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def vllm_attention() -> Iterator[None]:
    library = torch.library.Library("vllm", "FRAGMENT")
    library.define("unified_attention_with_output(Tensor query, Tensor(a!) output) -> ()")
    library.impl("unified_attention_with_output", _double, "CPU")
    library.impl("unified_attention_with_output", lambda query, output: None, "Meta")
    yield
    library._destroy()


def _double(query: torch.Tensor, output: torch.Tensor) -> None:
    output.copy_(query * 2)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.project = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.project(x * self.weight.data)  # as vLLM's norms read their weights
        output = torch.empty_like(query)
        torch.ops.vllm.unified_attention_with_output.default(query, output)
        return self.project(output) * self.weight.data + x


@pytest.mark.usefixtures("vllm_attention")
def test_a_model_of_vllm_is_cut_at_its_attention_without_options() -> None:
    assert ATTENTION in DEFAULT_SPLIT_OPS
    model = Layer().requires_grad_(False)
    compiled = torch.compile(model, backend="piecegraph", fullgraph=True, options={"compiler": "eager"})
    x = torch.randn(3, 8)
    assert torch.equal(compiled(x), model(x))
    (graph,) = pg.compiled_models(compiled)
    assert len(graph.split_calls) == 1 and graph.report().num_pieces == 2


def test_data_of_a_weight_is_a_view_of_it_that_nobody_changes() -> None:
    found: list[tuple[bool, bool, bool]] = []

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        for node in gm.graph.nodes:
            if getattr(node.target, "__name__", "") == "_get_data_attr":
                found.append((view_source(node) is node.args[0], is_pure(node), is_unmodified_input(node)))
        forward: Callable[..., Any] = gm.forward
        return forward

    weight = torch.nn.Parameter(torch.ones(4))
    torch.compile(lambda x: x * weight.data, backend=backend)(torch.ones(4))
    assert found == [(True, True, True)]


def test_equal_tokens_counts_up_to_the_first_difference(example: Callable[[str], ModuleType]) -> None:
    compare = example("compare_runs")
    assert compare.equal_tokens([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 9, 6]]) == (4, 6)
    run = {"step_ms": 2.0, "tokens_per_s": 500.0, "tokens": [[1, 2]]}
    other = {"step_ms": 1.0, "tokens_per_s": 1000.0, "tokens": [[1, 3]]}
    assert compare.table({"runs": {"1": run}}, {"runs": {"1": other}})[1] == (
        "1 | 1 of 2 | 2.000 | 1.000 | 500 | 1000 | 0.500"
    )


def test_prompts_are_the_same_in_each_process(example: Callable[[str], ModuleType]) -> None:
    compare = example("compare_runs")
    assert compare.prompts_of(2, 5) == compare.prompts_of(2, 5)
    assert [len(prompt) for prompt in compare.prompts_of(2, 5)] == [5, 5]


def test_only_exact_runs_of_plain_vllm_have_settings(
    example: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "0")  # the script sets it where it is not set
    example("compare_runs")
    script = example("vllm_with_piecegraph")
    settings = {
        (plain, exact): script.engine_arguments(_Arguments(plain, exact)).get("compilation_config")
        for plain in (True, False)
        for exact in (True, False)
    }
    assert settings[True, False] is None
    assert settings[False, False] == script.COMPILATION
    assert settings[True, True]["mode"] == 0
    assert settings[False, True]["backend"] == "vllm_with_piecegraph.eager_pieces"


class _Arguments:
    def __init__(self, plain: bool, exact: bool) -> None:
        self.plain = plain
        self.exact = exact
