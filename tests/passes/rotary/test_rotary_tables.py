"""Tables that are cosines and sines of the same angles become one op; others stay as they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from piecegraph.passes.eliminate_noops import EliminateNoops
from piecegraph.passes.fuse_add_rms_norm import FuseAddRMSNorm
from piecegraph.passes.pipeline import all_passes
from piecegraph.passes.rotary import fuse_rope_kv_write
from piecegraph.passes.rotary.fuse_rope_kv_write import FuseRopeKVWrite
from piecegraph.passes.rotary.rotary_tables import fuse_rotary_tables
from tests.passes.family_runs import family, graph_inputs, prompt
from tests.passes.spelled import calls, graph_of, run, text

Tensor = torch.Tensor
Tables = tuple[Tensor, Tensor]
Function = Callable[[Tensor, Tensor], Tables]


def angles(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """`[1, num_tokens, dim / 2]`, as they are after `eliminate-noops`."""
    return (inv_freq[None, :, None] * positions[None][:, None, :].float()).transpose(1, 2)


def doubled(positions: Tensor, inv_freq: Tensor) -> Tensor:
    half = angles(positions, inv_freq)
    return torch.cat((half, half), dim=-1)


def plain(positions: Tensor, inv_freq: Tensor) -> Tables:
    both = doubled(positions, inv_freq)
    return both.cos(), both.sin()


def scaled(positions: Tensor, inv_freq: Tensor) -> Tables:
    both = doubled(positions, inv_freq)
    return both.cos() * 1.5, 1.5 * torch.sin(both)


def without_the_first_dim(positions: Tensor, inv_freq: Tensor) -> Tables:
    both = doubled(positions, inv_freq)
    return both.cos().squeeze(0), (both.sin() * 1.0).squeeze(0)


def outer_product(positions: Tensor, inv_freq: Tensor) -> Tables:
    half = positions.to(torch.float32)[:, None] * inv_freq
    both = half.repeat(1, 2)
    return both.cos(), both.sin()


def casts_that_change_nothing(positions: Tensor, inv_freq: Tensor) -> Tables:
    column = inv_freq[None, :, None].float().expand(1, -1, 1).to(torch.float32)
    half = (column.float() * positions.unsqueeze(0)[:, None, :].float()).transpose(1, 2)
    both = torch.cat([half, half], 2)
    return both.cos().to(torch.float32), both.sin().to(torch.float32)


def made_apart(positions: Tensor, inv_freq: Tensor) -> Tables:
    return doubled(positions, inv_freq).cos(), doubled(positions, inv_freq).sin()


MATCHES: dict[Function, float] = {
    plain: 1.0,
    scaled: 1.5,
    without_the_first_dim: 1.0,
    outer_product: 1.0,
    casts_that_change_nothing: 1.0,
    made_apart: 1.0,
}


def halves_alone(positions: Tensor, inv_freq: Tensor) -> Tables:
    half = angles(positions, inv_freq)
    return half.cos(), half.sin()


def interleaved(positions: Tensor, inv_freq: Tensor) -> Tables:
    both = angles(positions, inv_freq).repeat_interleave(2, dim=-1)
    return both.cos(), both.sin()


def scaled_apart(positions: Tensor, inv_freq: Tensor) -> Tables:
    both = doubled(positions, inv_freq)
    return both.cos() * 1.5, both.sin()


def other_frequencies(positions: Tensor, inv_freq: Tensor) -> Tables:
    return doubled(positions, inv_freq).cos(), doubled(positions, inv_freq * 2.0).sin()


def sine_of_cosines(positions: Tensor, inv_freq: Tensor) -> Tables:
    both = doubled(positions, inv_freq)
    return both.cos(), both.cos().sin()


def rounded_positions(positions: Tensor, inv_freq: Tensor) -> Tables:
    return plain(positions.half(), inv_freq)


def shifted_angles(positions: Tensor, inv_freq: Tensor) -> Tables:
    both = doubled(positions, inv_freq) + 1.0
    return both.cos(), both.sin()


def in_float64(positions: Tensor, inv_freq: Tensor) -> Tables:
    half = (inv_freq.double()[None, :, None] * positions[None][:, None, :].double()).transpose(1, 2)
    both = torch.cat((half, half), dim=-1)
    return both.cos(), both.sin()


def columns_of_more(positions: Tensor, inv_freq: Tensor) -> Tables:
    both = doubled(positions, inv_freq)
    return both.cos()[..., :4], both.sin()[..., :4]


def the_other_way_round(positions: Tensor, inv_freq: Tensor) -> Tables:
    """Positions along the last dim."""
    half = positions[None, None, :].float() * inv_freq[None, :, None]
    both = torch.cat((half, half), dim=-1)
    return both.cos(), both.sin()


def tokens_and_numbers_swapped(positions: Tensor, inv_freq: Tensor) -> Tables:
    """Return transposed tables, of as many tokens as numbers."""
    cos, sin = plain(positions, inv_freq)
    return cos.squeeze(0).t(), sin.squeeze(0).t()


def changed_in_place(positions: Tensor, inv_freq: Tensor) -> Tables:
    both = doubled(positions, inv_freq)
    return both.cos(), both.mul_(2.0).sin()


OTHERS: tuple[Function, ...] = (
    halves_alone,
    interleaved,
    scaled_apart,
    other_frequencies,
    sine_of_cosines,
    rounded_positions,
    shifted_angles,
    in_float64,
    columns_of_more,
    the_other_way_round,
    tokens_and_numbers_swapped,
    changed_in_place,
)


def inputs(num_tokens: int = 5, half: int = 4) -> Tables:
    return torch.arange(num_tokens) * 1001, 1.0 / (10_000.0 ** (torch.arange(half) / half))


def fuse(graph: fx.Graph) -> bool:
    cos, sin = graph.output_node().all_input_nodes
    found = fuse_rotary_tables(graph, cos, sin)
    graph.lint()
    return found


@pytest.mark.parametrize("function", MATCHES)
def test_every_spelling_becomes_one_op(function: Function) -> None:
    """The bits are the same for these numbers of tokens and frequencies, and for one of either."""
    for given in (inputs(), inputs(1), inputs(half=1), inputs(1, 1)):
        graph = graph_of(function, *given)
        assert fuse(graph)
        called = calls(graph)
        assert called[:3] == ["rotary_tables", "getitem", "getitem"]
        assert set(called[3:]) <= {"unsqueeze"}
        call = next(node for node in graph.nodes if node.op == "call_function")
        assert call.args[2] == MATCHES[function]
        assert all(map(torch.equal, run(graph, *given), function(*given)))


def test_the_graph_before_and_after() -> None:
    """A reader of a table without its first dim reads the op's result."""

    def with_readers(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, ...]:
        cos, sin = plain(positions, inv_freq)
        return cos, sin, cos.squeeze(0), sin.squeeze(0), sin.unsqueeze(1)

    graph = graph_of(with_readers, *inputs())
    cos, sin, *_ = graph.output_node().all_input_nodes
    assert fuse_rotary_tables(graph, cos, sin)
    assert text(graph) == [
        "rotary_tables_default = rotary_tables(positions, inv_freq, 1.0)",
        "getitem_3 = getitem(rotary_tables_default, 0)",
        "getitem_4 = getitem(rotary_tables_default, 1)",
        "unsqueeze_1 = unsqueeze(getitem_3, 0)",
        "unsqueeze_2 = unsqueeze(getitem_4, 0)",
        "unsqueeze = unsqueeze(unsqueeze_2, 1)",
        "return ((unsqueeze_1, unsqueeze_2, getitem_3, getitem_4, unsqueeze))",
    ]
    assert all(map(torch.equal, run(graph, *inputs()), with_readers(*inputs())))


@pytest.mark.parametrize("function", OTHERS)
def test_calls_that_must_stay_are_not_rewritten(function: Function) -> None:
    for given in (inputs(4), inputs(8)):
        graph = graph_of(function, *given)
        before = str(graph)
        assert not fuse(graph)
        assert str(graph) == before


MADE_OF = {"cos", "sin", "mul", "cat", "repeat"}
"""Calls that tables are made of, and nothing else in a first piece after all passes."""


@pytest.mark.parametrize(("name", "num_ops"), [("llama", 1), ("qwen3", 1), ("gemma3", 2)])
def test_the_tables_of_a_family_become_one_op(name: str, num_ops: int) -> None:
    """The first piece has one op for each kind of frequencies."""
    whole = family(name, torch.bfloat16)
    whole.apply(*all_passes())
    first = calls(whole.unique_pieces()[0].graph_module.graph)
    assert first.count("rotary_tables") == num_ops
    left = MADE_OF - {"mul"} if name == "gemma3" else MADE_OF  # its embedding is scaled
    assert not left & set(first)
    assert not {"cos", "sin"} & set(calls(whole.graph))


@pytest.mark.parametrize("name", ["cohere", "gpt-oss"])
def test_a_family_whose_halves_are_not_repeated_keeps_its_tables(name: str) -> None:
    whole = family(name, torch.bfloat16)
    whole.apply(*all_passes())
    called = calls(whole.graph)
    assert "rotary_tables" not in called
    assert {"cos", "sin"} <= set(called)


@pytest.mark.parametrize("name", ["llama", "llama-yarn", "gemma3", "phi3-longrope-long", "phi", "gpt-neox"])
def test_attention_is_given_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits agree for every table: for partial rotary embedding, several kinds of frequencies and a scaling too."""
    fused = tables_given(name)
    monkeypatch.setattr(fuse_rope_kv_write, "fuse_rotary_tables", lambda graph, cos, sin: False)
    kept = tables_given(name)
    assert fused[0] == ["rotary_tables"] and not kept[0]
    assert len(fused[1]) == len(kept[1]) > 0
    assert all(map(torch.equal, fused[1], kept[1]))


def tables_given(name: str) -> tuple[list[str], list[Tensor]]:
    """Calls of the op by name, each once, and all tables that attention is given in turn."""
    whole = family(name, torch.bfloat16)
    whole.apply(EliminateNoops(), FuseAddRMSNorm(), FuseRopeKVWrite())
    given: list[Tensor] = []

    def attend(*arguments: Tensor) -> None:
        arguments[3].zero_()
        given.extend(arguments[4:6])

    called = sorted({call for call in calls(whole.graph) if call == "rotary_tables"})
    for node in whole.graph.find_nodes(
        op="call_function", target=torch.ops.piecegraph.rope_attention.default, sort=False
    ):
        node.target = attend
    for node in whole.graph.find_nodes(op="call_function", target=torch.ops.piecegraph.attention.default, sort=False):
        node.target = lambda *arguments: arguments[3].zero_()
    ids = prompt(7)
    arguments = graph_inputs(whole.traced, (ids, torch.arange(7) * 37, torch.tensor([6])))
    with torch.no_grad():
        fx.Interpreter(fx.GraphModule(nn.Module(), whole.graph)).run(*arguments)
    return called, given
