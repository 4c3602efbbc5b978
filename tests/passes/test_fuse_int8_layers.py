"""The linears between two calls of attention become one call; where they do not, the reason is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from piecegraph.passes.fuse_int8_layers import FuseInt8Layers
from piecegraph.passes.kernels.cpu.int8_layer import Layer
from piecegraph.passes.matching.graph_pass import PassResult
from piecegraph.passes.ops.cpu.int8_layer_linears import INT8_LAYER_LINEARS
from piecegraph.passes.ops.quantised.int8_linear import INT8_LINEAR
from tests.passes.int8_layers import INNER, flat, inputs, layer
from tests.passes.pass_context import FakeContext
from tests.passes.spelled import graph_of, run

Tensor = torch.Tensor
OF = layer(torch.float32)


def norm_of(x: Tensor, weight: Tensor | None, eps: float = 1e-5) -> Tensor:
    """As transformers writes it, without the casts that do nothing in float32."""
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return normed if weight is None else weight * normed


def norm_of_bfloat16(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return weight * normed.to(torch.bfloat16)


def gated(gate_up: Tensor) -> Tensor:
    return F.silu(gate_up[..., :INNER]) * gate_up[..., INNER:]


def decoder(x: Tensor, residual: Tensor, *of: Any) -> tuple[Tensor, Tensor]:
    """A layer of Llama."""
    out, norm, gate_up, down, next_norm, following = parts(of)
    total = residual + INT8_LINEAR(x, *out)
    result = total + INT8_LINEAR(gated(INT8_LINEAR(norm_of(total, norm[0]), *gate_up)), *down)
    return INT8_LINEAR(norm_of(result, next_norm[0]), *following), result


def decoder_in_bfloat16(x: Tensor, residual: Tensor, *of: Any) -> tuple[Tensor, Tensor]:
    out, norm, gate_up, down, next_norm, following = parts(of)
    total = residual + INT8_LINEAR(x, *out)
    result = total + INT8_LINEAR(gated(INT8_LINEAR(norm_of_bfloat16(total, norm[0]), *gate_up)), *down)
    return INT8_LINEAR(norm_of_bfloat16(result, next_norm[0]), *following), result


def swapped(x: Tensor, residual: Tensor, *of: Any) -> tuple[Tensor, Tensor]:
    """Sums the other way round, `F.rms_norm`, chunks, and a result that is read by more."""
    out, norm, gate_up, down, next_norm, following = parts(of)
    total = INT8_LINEAR(x, *out) + residual
    halves = INT8_LINEAR(F.rms_norm(total, (48,), norm[0], 1e-5), *gate_up).chunk(2, -1)
    result = INT8_LINEAR(halves[1] * F.silu(halves[0]), *down) + total
    normed = F.rms_norm(result, (48,), next_norm[0], 1e-5)
    return INT8_LINEAR(normed, *following) * 2, result * 3


def parts(of: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    return [of[start : start + 3] for start in range(0, 18, 3)]


def passed(graph: fx.Graph, context: Any = None) -> PassResult:
    result = FuseInt8Layers().apply(graph, context or FakeContext(graph))
    graph.lint()
    return result


def traced(function: Callable[..., Any], of: Layer = OF, *rows: int) -> tuple[fx.Graph, tuple[Any, ...]]:
    """Return the graph of a layer whose numbers are constants in it, and its inputs."""
    given = (*inputs(*(rows or (3,)), dtype=of.out.scale.dtype), *flat(of))
    tensors = [each for each in given if isinstance(each, Tensor)]

    def of_tensors(*some: Any) -> Any:
        rest = iter(some)
        return function(*(next(rest) if isinstance(each, Tensor) else each for each in given))

    names = ", ".join(f"x{number}" for number in range(len(tensors)))
    scope: dict[str, Any] = {"of_tensors": of_tensors}
    exec(f"def spelled({names}): return of_tensors({names})", scope)  # tracing wants arguments by name
    return graph_of(scope["spelled"], *tensors), tuple(tensors)


def assert_near(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """Up to rounding: linears round their inputs to bfloat16, or to 16 bits of fixed point where the kernel is loaded,
    and a norm that differs in its last bit may be rounded the other way."""
    for own, other in zip(found, wanted, strict=True):
        assert own.dtype is other.dtype
        bound = 2e-3 if own.dtype is torch.float32 else 0.05
        assert (own - other).abs().max() <= bound * other.abs().max()


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (decoder, torch.float32),
        (decoder_in_bfloat16, torch.bfloat16),
        (swapped, torch.float32),
        (swapped, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_becomes_one_call(function: Callable[..., Any], has_bias: bool, dtype: torch.dtype) -> None:
    graph, given = traced(function, layer(dtype, has_bias=has_bias), 1, 5)
    wanted = run(graph, *given)
    assert passed(graph) == PassResult(1)
    ours = [node for node in graph.nodes if node.op == "call_function" and "int8" in str(node.target)]
    assert [node.target for node in ours] == [INT8_LAYER_LINEARS]
    assert_near(run(graph, *given), wanted)


def test_norms_without_weights_and_with_an_offset_match() -> None:
    def without(x: Tensor, residual: Tensor, *of: Any) -> tuple[Tensor, Tensor]:
        out, _, gate_up, down, next_norm, following = parts(of)
        total = residual + INT8_LINEAR(x, *out)
        result = total + INT8_LINEAR(gated(INT8_LINEAR(norm_of(total, None, 0.5), *gate_up)), *down)
        return INT8_LINEAR(norm_of(result, 1.0 + next_norm[0]), *following), result

    graph, given = traced(without)
    wanted = run(graph, *given)
    assert passed(graph) == PassResult(1)
    (call,) = graph.find_nodes(op="call_function", target=INT8_LAYER_LINEARS)
    assert call.args[5:8] == (None, 0.5, 0.0) and call.args[15:17] == (1e-5, 1.0)
    assert_near(run(graph, *given), wanted)


def test_two_layers_after_each_other() -> None:
    """The result of one is the residual of the other; only a whole layer is a match."""

    def both(x: Tensor, residual: Tensor, *of: Any) -> tuple[Tensor, Tensor]:
        after, result = decoder(x, residual, *of)
        return decoder(torch.sin(after[..., :24]), result, *of)

    graph, given = traced(both)
    wanted = run(graph, *given)
    assert passed(graph) == PassResult(2)
    assert_near(run(graph, *given), wanted)


def refused(change: Callable[..., Any]) -> Callable[..., Any]:
    """A layer with `change(name, tensor)` applied to what is in it."""

    def function(x: Tensor, residual: Tensor, *of: Any) -> Any:
        out, norm, gate_up, down, next_norm, following = parts(of)
        kept: list[Any] = []

        def at(name: str, value: Tensor) -> Tensor:
            changed: Tensor = change(name, value, kept)
            return changed

        total = at("total", residual + at("out", INT8_LINEAR(x, *out)))
        both = at("gate_up", INT8_LINEAR(at("norm", norm_of(total, norm[0])), *gate_up))
        product = at("product", gated(both))
        result = at("result", total + at("down", INT8_LINEAR(product, *down)))
        after = INT8_LINEAR(at("next_norm", norm_of(result, next_norm[0])), *following)
        return (after, result, *kept)

    return function


def read_too(wanted: str) -> Callable[..., Any]:
    def change(name: str, value: Tensor, kept: list[Any]) -> Tensor:
        if name == wanted:
            kept.append(value * 2)
        return value

    return change


def replaced(wanted: str, by: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    return lambda name, value, kept: by(value) if name == wanted else value


REFUSED = {
    "out read too": (read_too("out"), "is not the sum of an int8 linear that it alone reads"),
    "total read too": (read_too("total"), "has other readers"),
    "norm read too": (read_too("norm"), "has other readers"),
    "gate_up read too": (read_too("gate_up"), "has other readers"),
    "down read too": (read_too("down"), "has 2 readers"),
    "next norm read too": (read_too("next_norm"), "has 2 readers"),
    "out scaled": (replaced("out", lambda x: x * 2), "is not the sum of an int8 linear"),
    "norm scaled": (replaced("norm", lambda x: x * 2), "wanted is a norm"),
    "down scaled": (replaced("down", lambda x: x * 2), "is no int8 linear|is not the sum"),
    "next norm scaled": (replaced("next_norm", lambda x: x * 2), "is no int8 linear"),
    "total changed in place": (replaced("down", lambda x: x.add_(1)), "is not the sum|int8 linear"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_layer_stays_and_has_a_reason(name: str) -> None:
    change, reason = REFUSED[name]
    graph, given = traced(refused(change))
    wanted = run(graph, *given)
    before = str(graph)
    result = passed(graph)
    assert result.matches == 0 and len(result.misses) == 1 and str(graph) == before
    assert any(part in result.misses[0].reason for part in reason.split("|")), result.misses
    assert all(map(torch.equal, run(graph, *given), wanted))


def test_other_activations_stay() -> None:
    def with_gelu(x: Tensor, residual: Tensor, *of: Any) -> Any:
        out, norm, gate_up, down, next_norm, following = parts(of)
        total = residual + INT8_LINEAR(x, *out)
        both = INT8_LINEAR(norm_of(total, norm[0]), *gate_up)
        result = total + INT8_LINEAR(F.gelu(both[..., :INNER]) * both[..., INNER:], *down)
        return INT8_LINEAR(norm_of(result, next_norm[0]), *following), result

    graph, _ = traced(with_gelu)
    (miss,) = passed(graph).misses
    assert miss.reason == "the activation is gelu; the kernel has silu"


def test_a_cut_inside_is_no_match() -> None:
    graph, _ = traced(decoder)
    context = FakeContext(graph)
    silu = next(node for node in graph.nodes if node.target is F.silu)
    context.is_split_op = lambda node: node is silu
    (miss,) = passed(graph, context).misses
    assert "is a cut between" in miss.reason


def test_a_weight_that_is_taken_later_is_no_match() -> None:
    """The call is where the first sum was."""

    def late(x: Tensor, residual: Tensor, *of: Any) -> tuple[Tensor, Tensor]:
        out, norm, gate_up, down, next_norm, following = parts(of)
        total = residual + INT8_LINEAR(x, *out)
        result = total + INT8_LINEAR(gated(INT8_LINEAR(norm_of(total, norm[0]), *gate_up)), *down)
        return INT8_LINEAR(norm_of(result, next_norm[0]), following[0][:32], following[1][:32], None), result

    graph, _ = traced(late)
    result = passed(graph)
    assert result.matches == 0 and "is taken behind" in result.misses[0].reason


def zeroed(x: Tensor) -> Tensor:
    x[..., :5].zero_()
    return x


def added_to_a_chunk(x: Tensor) -> Tensor:
    x.chunk(2, -1)[0].add_(1)
    return x


@pytest.mark.parametrize("write", [zeroed, added_to_a_chunk, lambda x: x.add_(1), lambda x: F.relu(x, inplace=True)])
def test_a_result_that_is_changed_before_its_norm_is_no_match(write: Callable[[Tensor], Tensor]) -> None:
    def changed(x: Tensor, residual: Tensor, *of: Any) -> tuple[Tensor, Tensor]:
        out, norm, gate_up, down, next_norm, following = parts(of)
        total = residual + INT8_LINEAR(x, *out)
        result = total + INT8_LINEAR(gated(INT8_LINEAR(norm_of(total, norm[0]), *gate_up)), *down)
        write(result)
        return INT8_LINEAR(norm_of(result, next_norm[0]), *following), result

    graph, given = traced(changed)
    wanted = run(graph, *given)
    assert passed(graph).matches == 0
    assert all(map(torch.equal, run(graph, *given), wanted))


@pytest.mark.parametrize("which", [3, 7, 10, 12, 16])
def test_a_weight_that_is_changed_under_another_name_is_no_match(which: int) -> None:
    """Scales and weights of norms, by their place among the op's arguments behind `x` and `residual`."""

    def changed(x: Tensor, residual: Tensor, *of: Any) -> tuple[Tensor, Tensor]:
        out, norm, gate_up, down, next_norm, following = parts(of)
        total = torch.sin(residual) + INT8_LINEAR(torch.sin(x), *out)
        of[which].view(-1).mul_(2)
        result = total + INT8_LINEAR(gated(INT8_LINEAR(norm_of(total, norm[0]), *gate_up)), *down)
        return INT8_LINEAR(norm_of(result, next_norm[0]), *following), result

    graph, _ = traced(changed)
    assert passed(graph).matches == 0


def test_arguments_by_name_are_no_match() -> None:
    def named(x: Tensor, residual: Tensor, *of: Any) -> tuple[Tensor, Tensor]:
        out, norm, gate_up, down, next_norm, following = parts(of)
        total = residual + INT8_LINEAR(x, *out)
        both = INT8_LINEAR(norm_of(total, norm[0]), gate_up[0], scale=gate_up[1], bias=None)
        result = total + INT8_LINEAR(gated(both), *down)
        return INT8_LINEAR(norm_of(result, next_norm[0]), *following), result

    graph, _ = traced(named)
    (miss,) = passed(graph).misses
    assert "has arguments by name" in miss.reason


def test_plain_linears_are_no_sites() -> None:
    graph = graph_of(lambda x, weight: F.linear(gated(x), weight), torch.randn(3, 2 * INNER), torch.randn(4, INNER))
    assert passed(graph) == PassResult(0)
