"""torch.compile(model, backend="piecegraph"): by entry point, with options, under torch's guards."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch import nn

import piecegraph as pg
from piecegraph.errors import UsageError
from tests.compiler.toy import SPLIT_OPS, Decoder, batch

OPTIONS: Any = {"split_ops": list(SPLIT_OPS), "compiler": "eager", "passes": ()}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    """torch keeps compiled code by code object; these tests share the decoder's."""
    torch._dynamo.reset()


def test_torch_compile_equals_the_module_at_several_sizes() -> None:
    model = Decoder().requires_grad_(False)
    compiled = torch.compile(model, backend="piecegraph", fullgraph=True, dynamic=True, options=OPTIONS)
    for num_tokens in (9, 5, 64):
        inputs = batch(num_tokens, 3)
        assert torch.equal(compiled(*inputs), model(*inputs))


def test_floats_that_torch_makes_inputs() -> None:
    """`dynamic=True` makes a norm's epsilon an input, until Inductor asks Dynamo for a constant."""
    model = Decoder(2).requires_grad_(False)
    options: Any = {"split_ops": list(SPLIT_OPS)}
    compiled = torch.compile(model, backend="piecegraph", fullgraph=True, dynamic=True, options=options)
    for num_tokens in (9, 5):
        inputs = batch(num_tokens, 3)
        torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=1e-5, atol=1e-5)


class Drawing(nn.Module):
    def __init__(self, draw: str) -> None:
        super().__init__()
        self.random, self.draw = random.Random(3), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        match self.draw:
            case "float":
                return x * random.uniform(2, 9)
            case "of an object":
                return x * self.random.randint(2, 9)
        return x * random.randint(2, 9)


def test_floats_drawn_at_random_are_refused() -> None:
    """Torch passes one as float64 where it traced float32."""
    compiled = torch.compile(Drawing("float"), backend="piecegraph", fullgraph=True, options={"compiler": "eager"})
    with pytest.raises(Exception, match=r"draws a float from a random\.Random \(random_value_0\)"):
        compiled(torch.ones(4))


def test_draws_from_an_object_are_right_or_refused() -> None:
    """Some versions of torch draw from the object's state at the trace in each call; others draw as the object does."""
    compiled = torch.compile(
        Drawing("of an object"), backend="piecegraph", fullgraph=True, options={"compiler": "eager"}
    )
    drawing = random.Random(3)
    wanted = [drawing.randint(2, 9) for _ in range(5)]
    found, refusal = [], ""
    try:
        found = [int(compiled(torch.ones(1))) for _ in wanted]
    except Exception as error:
        refusal = str(error)
    is_refused = re.search(r"draws from L\['self'\]\.random, a random\.Random, .* the same number", refusal)
    assert is_refused or found == wanted, (refusal, found)


def test_whole_numbers_of_the_random_module_are_drawn_anew() -> None:
    compiled = torch.compile(Drawing("int"), backend="piecegraph", fullgraph=True, options={"compiler": "eager"})
    compiled(torch.ones(1))
    random.seed(5)
    wanted = [random.randint(2, 9) for _ in range(5)]
    random.seed(5)
    assert [int(compiled(torch.ones(1))) for _ in range(5)] == wanted


def test_compiled_models_are_those_behind_one_module() -> None:
    """Each with its report and source; another module of the same class has its own."""
    one, other = Decoder(2).requires_grad_(False), Decoder(3).requires_grad_(False)
    compiled = [
        torch.compile(module, backend="piecegraph", fullgraph=True, dynamic=True, options=OPTIONS)
        for module in (one, other)
    ]
    assert pg.compiled_models(compiled[0]) == ()
    for module in compiled:
        module(*batch(9, 3))
    (first,), (second,) = pg.compiled_models(compiled[0]), pg.compiled_models(compiled[1])
    assert first.report().num_split_ops == 2
    assert second.report().num_split_ops == 3
    assert "op_pgtoy_attention" in first.source
    assert "keeps and checks its own guards" in str(first.guards)
    with pytest.raises(UsageError, match=r"takes what torch\.compile"):
        pg.compiled_models(one)


def test_a_function_compiles_too() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    compiled = torch.compile(double, backend="piecegraph", fullgraph=True, options={"compiler": "eager"})
    assert compiled(torch.ones(3)).tolist() == [2, 2, 2]
    (model,) = pg.compiled_models(compiled)
    assert model.report().num_pieces == 1


def test_wrong_options_and_gradients_are_errors() -> None:
    """torch wraps what a backend raises; our sentence is in it."""
    model = Decoder()
    wrong: list[tuple[Any, str]] = [
        ({"split_op": ["a::b"]}, "unknown compile option 'split_op'. Did you mean 'split_ops'"),
        ({"compiler": "inducto"}, "compiler='inducto' is unknown. Did you mean 'inductor'"),
        ({"split_ops": ["attention"]}, "an op is named as 'namespace::name'"),
        (OPTIONS, "piecegraph compiles for inference, but gradients are enabled"),
    ]
    for options, message in wrong:
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message):
            torch.compile(model, backend="piecegraph", fullgraph=True, options=options)(*batch(4))
        torch._dynamo.reset()


def test_torch_finds_the_backend_without_an_import_of_ours() -> None:
    """By the installed entry point, in a fresh process."""
    program = """
        import sys, torch
        model = torch.nn.Linear(3, 3).requires_grad_(False)
        compiled = torch.compile(model, backend="piecegraph", options={"compiler": "eager"})
        assert torch.equal(compiled(torch.ones(2, 3)), model(torch.ones(2, 3)))
        print("piecegraph" in sys.modules, any(name.startswith("piecegraph.runner") for name in sys.modules))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True False"
