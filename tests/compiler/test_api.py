"""piecegraph.compile: one trace for every size, equal to the module, nothing of the runner needed."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import piecegraph as pg
from piecegraph.compiler.splitting.plan import SplitCall, TensorSpec
from piecegraph.compiler.tracing.dynamic_dims import DynamicDims
from piecegraph.errors import (
    CompileError,
    ConfigError,
    GraphBreak,
    InputMismatch,
    NotCompiled,
    SizeSpecialized,
    SplitOpNotFound,
    SplitOpUnused,
    UsageError,
)
from piecegraph.progress import Phase
from tests.compiler.toy import DIMS, SPLIT_OPS, VOCABULARY, Decoder, batch

EAGER = pg.CompileConfig(split_ops=SPLIT_OPS, compiler="eager", passes=())  # bitwise the module, cut as it is


def compiled_decoder(num_layers: int = 3, config: pg.CompileConfig = EAGER) -> tuple[Decoder, pg.CompiledModel]:
    model = Decoder(num_layers)
    return model, pg.compile(model, config, dynamic_dims=DIMS, example_inputs=batch(9, 2))


def test_eager_pieces_are_bitwise_the_module_at_every_size() -> None:
    """The same torch calls in the same order, whatever the sizes; one trace serves them all."""
    model, compiled = compiled_decoder()
    for num_tokens in (1, 2, 3, 9, 64, 257):
        for num_logits in (1, 2, num_tokens):
            inputs = batch(num_tokens, num_logits, seed=num_tokens)
            with torch.no_grad():
                assert torch.equal(compiled(*inputs), model(*inputs))


def test_no_size_traces_or_compiles_again() -> None:
    """0 recompiles over 1..max, with two named sizes at once, by Dynamo's own counters."""
    _, compiled = compiled_decoder()
    before = Counter(torch._dynamo.utils.counters["stats"])
    for num_tokens in range(1, 130):
        compiled(*batch(num_tokens, 1 + num_tokens % 7))
    assert Counter(torch._dynamo.utils.counters["stats"]) == before


def test_an_example_of_size_one_serves_every_size() -> None:
    """No 0/1 specialisation: sizes are the caller's to declare, not torch's to guess."""
    model = Decoder()
    compiled = pg.compile(model, EAGER, dynamic_dims=DIMS, example_inputs=batch(1, 1))
    inputs = batch(33, 5)
    with torch.no_grad():
        assert torch.equal(compiled(*inputs), model(*inputs))


def test_inductor_pieces_are_close_to_the_module() -> None:
    """float32 on CPU: Inductor may reorder sums, so a tolerance of a few ulps of the values' scale."""
    model, compiled = compiled_decoder(config=pg.CompileConfig(split_ops=SPLIT_OPS, compile_workers=0))
    for num_tokens in (1, 7, 100):
        inputs = batch(num_tokens, 3, seed=num_tokens)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=1e-5, atol=1e-5)
    report = compiled.report()
    assert report.compiler == "inductor"
    assert all(row.kernels for row in report.unique_pieces)


@pytest.mark.parametrize("num_layers", [2, 8, 24])
def test_unique_pieces_do_not_grow_with_depth(num_layers: int) -> None:
    """Embedding and first layer, middle layer, last layer, head: 4 at any depth."""
    _, compiled = compiled_decoder(num_layers)
    report = compiled.report()
    assert report.num_split_ops == num_layers
    assert report.num_pieces == num_layers + 2  # the gather of sampled rows starts a piece of its own
    assert report.num_unique_pieces == min(4, num_layers + 2)


def test_logits_are_computed_for_sampled_rows_only() -> None:
    """The graph is cut where `num_logits` enters, so that no piece mixes the two sizes before it."""
    _, compiled = compiled_decoder()
    tail = compiled.plan.piece_steps[-1]
    assert "logits_indices" in [slot.name for slot in tail.inputs]
    assert all("logits_indices" not in [s.name for s in step.inputs] for step in compiled.plan.piece_steps[:-1])
    assert compiled(*batch(50, 3)).shape == (3, VOCABULARY)


def test_tracing_waits_for_the_first_call_without_examples() -> None:
    model = Decoder()
    compiled = pg.compile(model, EAGER, dynamic_dims=DIMS)
    with pytest.raises(NotCompiled, match="no example_inputs"):
        compiled.report()
    inputs = batch(5, 2)
    with torch.no_grad():
        assert torch.equal(compiled(*inputs), model(*inputs))
    assert compiled.report().num_unique_pieces == 4


def test_fake_examples_and_fake_weights_compile() -> None:
    """Shapes, dtypes and devices are read, values are not."""
    with FakeTensorMode():
        model = Decoder()
        examples = batch(6, 2)
    assert pg.compile(model, EAGER, dynamic_dims=DIMS, example_inputs=examples).report().num_unique_pieces == 4


def test_example_tensors_are_left_alone() -> None:
    """Tracing marks copies, not the caller's tensors."""
    inputs = batch(6, 2)
    before = [set(vars(tensor)) for tensor in inputs]
    pg.compile(Decoder(), EAGER, dynamic_dims=DIMS, example_inputs=inputs)
    assert [set(vars(tensor)) for tensor in inputs] == before


def test_keyword_examples_and_nested_paths() -> None:
    """Arguments may be nested; a path names the leaf, and keywords may come in any order."""

    class Nested(nn.Module):
        def forward(
            self, xs: list[torch.Tensor], options: dict[str, torch.Tensor], flag: bool = False
        ) -> dict[str, object]:
            return {"sum": xs[0] + xs[1], "scaled": options["w"] * 2, "rows": xs[0].shape[0], "flag": flag}

    dims: DynamicDims = {"xs[0]": {0: "n"}, "xs[1]": {0: "n"}, "options['w']": 0}
    examples = {"xs": [torch.ones(3, 2), torch.ones(3, 2)], "options": {"w": torch.ones(5)}}
    compiled = pg.compile(Nested(), EAGER_ANY, dynamic_dims=dims, example_inputs=examples)
    result = compiled(options={"w": torch.ones(1)}, xs=[torch.ones(7, 2), torch.ones(7, 2)])
    assert result["sum"].shape == (7, 2)
    assert result["scaled"].shape == (1,)
    assert result["rows"] == 7
    assert result["flag"] is False
    with pytest.raises(InputMismatch, match=r"flag is True; the model was traced with False"):
        compiled([torch.ones(7, 2), torch.ones(7, 2)], {"w": torch.ones(1)}, flag=True)


EAGER_ANY = pg.CompileConfig(compiler="eager")


def test_several_models_and_graphs_live_in_one_process() -> None:
    """Two modules of one class share source, not graphs or weights; nothing global is changed."""
    one, other = Decoder(2, seed=1), Decoder(3, seed=2)
    compiled_one = pg.compile(one, EAGER, dynamic_dims=DIMS, example_inputs=batch(4, 1))
    compiled_other = pg.compile(other, EAGER, dynamic_dims=DIMS, example_inputs=batch(4, 1))
    inputs = batch(11, 2)
    with torch.no_grad():
        assert torch.equal(compiled_one(*inputs), one(*inputs))
        assert torch.equal(compiled_other(*inputs), other(*inputs))
    compiled_one.close()
    compiled_one.close()
    with torch.no_grad():
        assert torch.equal(compiled_other(*inputs), other(*inputs))
    with pytest.raises(CompileError, match="closed"):
        compiled_one(*inputs)


def test_before_compile_sees_every_split_call_and_may_refuse() -> None:
    seen: list[SplitCall] = []

    def refuse(calls: tuple[SplitCall, ...]) -> None:
        seen.extend(calls)
        raise ConfigError("no")

    phases: list[Phase] = []
    with pytest.raises(ConfigError, match=r"^no$"):
        pg.compile(
            Decoder(2), EAGER, dynamic_dims=DIMS, example_inputs=batch(4), before_compile=refuse, on_phase=phases.append
        )
    assert [call.args[-1] for call in seen] == ["layer.0", "layer.1"]
    query = seen[0].args[0]
    assert isinstance(query, TensorSpec)
    assert query.shape[1] == 16
    assert isinstance(query.shape[0], str)
    assert {phase.name for phase in phases} == {"trace", "passes", "split"}


def test_changed_weights_are_seen_and_replaced_ones_refused() -> None:
    """Parameters are bound as tensors: values may change in place, the tensor may not be another."""
    model, compiled = compiled_decoder()
    inputs = batch(4, 1)
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.fill_(2.0)
        assert torch.equal(compiled(*inputs), torch.full((1, VOCABULARY), 2.0))
    fresh, compiled = compiled_decoder()
    fresh.head.weight = nn.Parameter(torch.ones_like(fresh.head.weight))
    with pytest.raises(InputMismatch, match=r"head\.weight was replaced"):
        compiled(*inputs)


def test_calls_that_do_not_fit_the_trace_are_refused() -> None:
    _, compiled = compiled_decoder()
    ids, rows = batch(4, 1)
    for call, message in [
        ((ids.int(), rows), r"input_ids has dtype torch.int32; it was compiled for torch.int64"),
        ((ids[None], rows), r"input_ids has shape \(1, 4\); wanted \(num_tokens,\)"),
        ((ids.repeat(2)[::2], rows), r"has strides \(2,\); it was compiled contiguous"),
        ((ids, 3), r"logits_indices is int; the compiled model takes a tensor"),
        ((ids,), r"missing a required argument: 'logits_indices'"),
        ((ids[:0], rows), r"sizes {'num_tokens': 0, 'num_logits': 1} do not satisfy num_tokens >= 1"),
        ((ids.to("meta"), rows), r"input_ids is on meta; it was compiled for cpu"),
    ]:
        with pytest.raises(InputMismatch, match=message):
            compiled(*call)


def test_sizes_of_one_name_must_agree() -> None:
    class Add(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    compiled = pg.compile(
        Add(), EAGER_ANY, dynamic_dims={"x": 0, "y": 0}, example_inputs=(torch.ones(3), torch.ones(3))
    )
    with pytest.raises(InputMismatch, match=r"y.shape\[0\] is 1, but num_tokens is 4"):
        compiled(torch.ones(4), torch.ones(1))
    with pytest.raises(ConfigError, match=r"'num_tokens' is 1 in y.shape\[0\] but 3 in x.shape\[0\]"):
        pg.compile(Add(), EAGER_ANY, dynamic_dims={"x": 0, "y": 0}, example_inputs=(torch.ones(3), torch.ones(1)))


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 5:  # depends on the size
            return x + 1
        return x


class Views(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(9) + 1


class Prints(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("hello")  # noqa: T201  a graph break
        return x + 1


class Remembers(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x + 1
        return x + 2


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (Branches(), SizeSpecialized, r"(?s)num_tokens.*test_api.py:\d+ \(if x.shape\[0\] > 5.*depends on the size"),
        (
            Views(),
            SizeSpecialized,
            r"'num_tokens', but tracing fixed it to 9 at .*test_api.py:\d+ \(return x.view\(9\)",
        ),
        (Prints(), GraphBreak, r"not one graph at .*test_api.py:\d+ \(print\(\"hello\"\)"),
        (Remembers(), CompileError, r"forward changes objects that outlive the call: .*last"),
    ],
)
def test_what_cannot_be_one_graph_names_the_line(module: nn.Module, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pg.compile(module, EAGER_ANY, dynamic_dims={"x": 0}, example_inputs=(torch.ones(9),))


def attend(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    torch.ops.pgtoy.attention.default(x, x, x, out, "layer")
    return out


class AttendsInAutocast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attend(x + 1) + 1


class ReturnsItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.weight, attend(x)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (AttendsInAutocast(), "a split op lies inside a `with` block of forward"),
        (ReturnsItsWeight(), r"forward returns a tensor of shape \(2,\) that its graph does not compute"),
    ],
)
def test_what_cannot_be_cut_or_returned_is_refused_in_plain_words(module: nn.Module, message: str) -> None:
    with pytest.raises(CompileError, match=message):
        pg.compile(module, EAGER, dynamic_dims={"x": 0}, example_inputs=(torch.ones(3, 2, 4),))


def test_buffers_changed_in_place_change() -> None:
    """State that lives in a buffer works as in eager."""

    class Counts(nn.Module):
        calls: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return x + self.calls

    module = Counts()
    compiled = pg.compile(module, EAGER_ANY, dynamic_dims={"x": 0}, example_inputs=(torch.zeros(3),))
    assert module.calls.item() == 0
    assert [compiled(torch.zeros(2))[0].item() for _ in range(3)] == [1, 2, 3]
    assert module.calls.item() == 3


def test_split_ops_that_do_not_exist_or_appear() -> None:
    for name, error, message in [
        ("pgtoy::atention", SplitOpNotFound, r"not registered. Did you mean 'pgtoy::attention'\?"),
        ("aten::mm", SplitOpUnused, r"never calls it; registered ops it does call: pgtoy::attention"),
    ]:
        config = pg.CompileConfig(split_ops=(name,), compiler="eager")
        with pytest.raises(error, match=message):
            pg.compile(Decoder(), config, dynamic_dims=DIMS, example_inputs=batch(4))
    assert pg.compile(Decoder(), EAGER_ANY, dynamic_dims=DIMS, example_inputs=batch(4)).report().num_split_ops == 0


def test_wrong_dynamic_dims_say_what_is_right() -> None:
    wrong: list[tuple[DynamicDims, str]] = [
        ({"inputs_ids": 0}, r"'inputs_ids', which is not an argument. Did you mean 'input_ids'\?"),
        ({"input_ids": 1}, r"has dim 1, but the tensor has 1 dims"),
        ({"input_ids": {0: "num tokens"}}, r"a size name is an identifier"),
    ]
    for dims, message in wrong:
        with pytest.raises(ConfigError, match=message):
            pg.compile(Decoder(), EAGER, dynamic_dims=dims, example_inputs=batch(4))
    with pytest.raises(UsageError, match=r"takes a torch.nn.Module, not function"):
        pg.compile(lambda x: x)  # type: ignore[arg-type]  # the point


def test_the_runner_is_not_imported() -> None:
    """Someone with a runner of their own imports none of ours."""
    program = (
        "import sys, torch, piecegraph as pg\n"
        "model = torch.nn.Linear(3, 3)\n"
        "compiled = pg.compile(model, pg.CompileConfig(compiler='eager'), dynamic_dims={'input': 0})\n"
        "assert compiled(torch.ones(2, 3)).shape == (2, 3)\n"
        "ours = ('piecegraph.runner', 'piecegraph.tools', 'transformers')\n"
        "print([name for name in sys.modules if name.startswith(ours)])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
