"""Rotary embedding and a head's norm become part of attention; where they do not, the reason is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from piecegraph.passes.eliminate_noops import EliminateNoops
from piecegraph.passes.fuse_add_rms_norm import FuseAddRMSNorm
from piecegraph.passes.matching.graph_pass import PassResult
from piecegraph.passes.ops.rms_norm import RMS_NORM
from piecegraph.passes.rotary.fuse_rope_kv_write import FuseRopeKVWrite
from piecegraph.runner.attention.interface import op as _op  # noqa: F401  (registers the ops the pass knows by name)
from piecegraph.runner.attention.interface.op_call import AttentionCall
from tests.passes.family_runs import family
from tests.passes.pass_context import FakeContext
from tests.passes.spelled import calls, graph_of, text
from tests.quick_families import families
from tests.runner.tiny_models import FAMILIES, UNLISTED

Tensor = torch.Tensor
ATTENTION, ROPE_ATTENTION = torch.ops.piecegraph.attention.default, torch.ops.piecegraph.rope_attention.default
SPLIT_OPS = (ATTENTION, ROPE_ATTENTION)
DIM, EPS = 8, 1e-6


@pytest.fixture(autouse=True)
def _attention_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are recorded by running them; there is no cache here."""
    monkeypatch.setattr("piecegraph.runner.attention.interface.op.get_forward_context", NoContext)


class NoContext:
    kv_caches = metadata_of = property(lambda self: self)

    def __getitem__(self, layer: str) -> None: ...

    def __call__(self, layer: str) -> None: ...

    @property
    def impl(self) -> NoContext:
        return self

    def forward(self, call: AttentionCall, *where: object) -> None:
        call.out.zero_()


def rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., 4:], x[..., :4]), dim=-1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)


def heads(x: Tensor) -> Tensor:
    return x.view(1, 5, -1, DIM).transpose(1, 2)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (each.transpose(1, 2).squeeze(0) for each in (query, key, value))
    out = query.new_empty((5, 4, DIM))
    ATTENTION(query, key, value, out, 0.5, 0, 0.0, None, None, "layer")
    return out


fx.wrap("attend")


def plain(x: Tensor, qkv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = torch.nn.functional.linear(x, qkv)
    q, k, v = heads(y[..., :32]), heads(y[..., 32:48]), heads(y[..., 48:])
    return attend(rotated(q, cos, sin), rotated(k, cos, sin), v)


def tables_rounded(x: Tensor, qkv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return plain(x, qkv, weight, cos.to(torch.bfloat16), sin.to(torch.bfloat16))


def in_float64(x: Tensor, qkv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = torch.nn.functional.linear(x, qkv)
    q, k, v = heads(y[..., :32]), heads(y[..., 32:48]), heads(y[..., 48:])
    q, k = (rotated(each.double(), cos, sin).to(torch.float32) for each in (q, k))
    return attend(q, k, v)


def normed(x: Tensor, qkv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = torch.nn.functional.linear(x, qkv)
    q, k, v = heads(y[..., :32]), heads(y[..., 32:48]), heads(y[..., 48:])
    q, k = RMS_NORM(q, weight, EPS, 1.0), RMS_NORM(k, weight, EPS, 1.0)
    return attend(rotated(q, cos, sin), rotated(k, cos, sin), v)


def normed_before_the_transpose(x: Tensor, qkv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = torch.nn.functional.linear(x, qkv)
    q, k = (RMS_NORM(each.view(1, 5, -1, DIM), weight, EPS, 0.0) for each in (y[..., :32], y[..., 32:48]))
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    return attend(rotated(q, cos, sin), rotated(k, cos, sin), heads(y[..., 48:]))


def four_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = x[..., :4]
    half = torch.cat((-turned[..., 2:], turned[..., :2]), dim=-1)
    return turned * cos.unsqueeze(1) + half * sin.unsqueeze(1)


def partly_rotated(x: Tensor, qkv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = torch.nn.functional.linear(x, qkv)
    cos, sin = cos[..., :4], sin[..., :4]
    q, k, v = heads(y[..., :32]), heads(y[..., 32:48]), heads(y[..., 48:])
    q, k = (torch.cat([four_rotated(each, cos, sin), each[..., 4:]], dim=-1) for each in (q, k))
    return attend(q, k, v)


def by_chunks(x: Tensor, qkv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Query, key and value of a head next to each other, halves by `chunk`, tables for heads behind the tokens."""
    q, k, v = torch.nn.functional.linear(x, qkv)[..., :48].view(1, 5, 2, 24).chunk(3, dim=-1)

    def turned(part: Tensor) -> Tensor:
        first, second = part.chunk(2, dim=-1)
        return sin.unsqueeze(2) * torch.cat((second.neg(), first), -1) + cos.unsqueeze(2) * part

    return attend(*(part.transpose(1, 2) for part in (turned(q), turned(k), v)))


SPELLINGS: dict[Callable[..., Tensor], str] = {
    plain: "None, None, None, 0.0",
    tables_rounded: "None, None, None, 0.0",
    in_float64: "None, None, None, 0.0",
    normed: "weight, weight, 1e-06, 1.0",
    normed_before_the_transpose: "weight, weight, 1e-06, 0.0",
    partly_rotated: "None, None, None, 0.0",
    by_chunks: "None, None, None, 0.0",
}


def traced(function: Callable[..., Any]) -> fx.Graph:
    random = torch.Generator().manual_seed(0)
    shapes = ((1, 5, 16), (64, 16), (DIM,), (1, 5, DIM), (1, 5, DIM))
    graph = graph_of(function, *(torch.randn(*shape, generator=random) for shape in shapes))
    (call,) = [node for node in graph.nodes if node.target is attend] or [None]
    return graph if call is None else inlined(graph, call)


def arguments_of(call: fx.Node) -> Any:
    return call.args


def inlined(graph: fx.Graph, call: fx.Node) -> fx.Graph:
    """Return attention as Dynamo records it: `attend` written out, its op without a result that is read."""
    arguments = arguments_of(call)
    with graph.inserting_before(call):
        parts = [graph.call_method("squeeze", (graph.call_method("transpose", (x, 1, 2)), 0)) for x in arguments]
        num_heads = arguments[0].meta["example_value"].shape[1]
        out = graph.call_method("new_empty", (parts[0], (5, num_heads, DIM)))
        attention = graph.call_function(ATTENTION, (*parts, out, 0.5, 0, 0.0, None, None, "layer"))
    call.replace_all_uses_with(out)
    graph.erase_node(call)
    for node in graph.nodes:
        if "example_value" not in node.meta:
            values = fx.map_arg(node.args, lambda used: used.meta["example_value"])
            if node is attention or node.op == "output":
                node.meta["example_value"] = None
            else:
                node.meta["example_value"] = getattr(values[0], node.target)(*values[1:])
    return graph


def fuse(graph: fx.Graph) -> PassResult:
    result = FuseRopeKVWrite().apply(graph, FakeContext(graph, lambda node: node.target in SPLIT_OPS))
    graph.lint()
    return result


def the_call(graph: fx.Graph) -> fx.Node:
    (node,) = [node for node in graph.nodes if node.target in SPLIT_OPS]
    return node


@pytest.mark.parametrize("function", SPELLINGS)
def test_every_spelling_becomes_one_op(function: Callable[..., Any]) -> None:
    """Given query and key as projected `[tokens, heads, dim]`, and the tables as they were made."""
    graph = traced(function)
    assert fuse(graph) == PassResult(matches=1)
    call = the_call(graph)
    assert call.target is ROPE_ATTENTION
    query, key, value, _out, cos, sin, *norm = arguments_of(call)[:10]
    assert ", ".join(map(str, norm)) == SPELLINGS[function]
    assert call.args[10:] == (0.5, 0, 0.0, None, None, "layer")
    for table in (cos, sin):
        assert table.meta["example_value"].dtype == torch.float32
        assert table.meta["example_value"].shape == (5, 4 if function is partly_rotated else DIM)
    for part in (query, key, value):
        assert part.meta["example_value"].shape[0::2] == (5, DIM)
    assert not {"mul", "cat", "neg", "add", "rms_norm"} & set(calls(graph)), calls(graph)


def test_the_graph_before_and_after() -> None:
    graph = traced(normed)
    before = text(graph)
    fuse(graph)
    assert text(graph) == [
        "squeeze_5 = squeeze(cos, 0)",
        "squeeze_6 = squeeze(sin, 0)",
        *before[:3],
        "getitem_1 = getitem(linear, (Ellipsis, slice(32, 48, None)))",
        "view_1 = view(getitem_1, 1, 5, -1, 8)",
        "getitem_2 = getitem(linear, (Ellipsis, slice(48, None, None)))",
        "view_2 = view(getitem_2, 1, 5, -1, 8)",
        "transpose_2 = transpose(view_2, 1, 2)",
        "squeeze_3 = squeeze(view, 0)",
        "squeeze_4 = squeeze(view_1, 0)",
        "transpose_5 = transpose(transpose_2, 1, 2)",
        "squeeze_2 = squeeze(transpose_5, 0)",
        "new_empty = new_empty(squeeze_3, (5, 4, 8))",
        "rope_attention_default = rope_attention(squeeze_3, squeeze_4, squeeze_2, new_empty, squeeze_5, squeeze_6, "
        "weight, weight, 1e-06, 1.0, 0.5, 0, 0.0, None, None, layer)",
        "return (new_empty)",
    ]
    assert before[:3] == [
        "linear = linear(x, qkv)",
        "getitem = getitem(linear, (Ellipsis, slice(None, 32, None)))",
        "view = view(getitem, 1, 5, -1, 8)",
    ]
    assert len(before) == 39


def no_rotary(x: Tensor, qkv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = torch.nn.functional.linear(x, qkv)
    return attend(heads(y[..., :32]), heads(y[..., 32:48]), heads(y[..., 48:]))


def norm_alone(x: Tensor, qkv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = torch.nn.functional.linear(x, qkv)
    q, k = (RMS_NORM(heads(part), weight, EPS, 0.0) for part in (y[..., :32], y[..., 32:48]))
    return attend(q, k, heads(y[..., 48:]))


def interleaved(x: Tensor, qkv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = torch.nn.functional.linear(x, qkv)

    def turned(part: Tensor) -> Tensor:
        half = torch.stack((-part[..., 1::2], part[..., ::2]), dim=-1).flatten(-2)
        return part * cos.unsqueeze(1) + half * sin.unsqueeze(1)

    return attend(turned(heads(y[..., :32])), turned(heads(y[..., 32:48])), heads(y[..., 48:]))


def other_sine(x: Tensor, qkv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = torch.nn.functional.linear(x, qkv)
    q, k = rotated(heads(y[..., :32]), cos, sin), rotated(heads(y[..., 32:48]), cos, cos)
    return attend(q, k, heads(y[..., 48:]))


def query_normed_alone(x: Tensor, qkv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = torch.nn.functional.linear(x, qkv)
    q = rotated(RMS_NORM(heads(y[..., :32]), weight, EPS, 0.0), cos, sin)
    return attend(q, rotated(heads(y[..., 32:48]), cos, sin), heads(y[..., 48:]))


def other_epsilon(x: Tensor, qkv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = torch.nn.functional.linear(x, qkv)
    q = rotated(RMS_NORM(heads(y[..., :32]), weight, EPS, 0.0), cos, sin)
    k = rotated(RMS_NORM(heads(y[..., 32:48]), weight, 1e-5, 0.0), cos, sin)
    return attend(q, k, heads(y[..., 48:]))


def read_before_it_is_rotated(x: Tensor, qkv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = torch.nn.functional.linear(x, qkv)
    out = attend(rotated(heads(y[..., :32]), cos, sin), rotated(heads(y[..., 32:48]), cos, sin), heads(y[..., 48:]))
    return out + y[..., 30:31].squeeze(0).unsqueeze(1)


def read_after_it_is_rotated(x: Tensor, qkv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = torch.nn.functional.linear(x, qkv)
    q = rotated(heads(y[..., :32]), cos, sin)
    return attend(q, rotated(heads(y[..., 32:48]), cos, sin), heads(y[..., 48:])) + q.squeeze(0).transpose(0, 1)


def value_is_the_query(x: Tensor, qkv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q = heads(torch.nn.functional.linear(x, qkv)[..., :32])
    turned = rotated(q, cos, sin)
    return attend(turned, turned, q)


def table_for_tokens_of_another_dim(x: Tensor, qkv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = torch.nn.functional.linear(x, qkv)
    one = cos[:, :1]
    q, k = rotated(heads(y[..., :32]), one, one), rotated(heads(y[..., 32:48]), one, one)
    return attend(q, k, heads(y[..., 48:]))


def not_the_rest(x: Tensor, qkv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = torch.nn.functional.linear(x, qkv)
    cos, sin = cos[..., :4], sin[..., :4]
    q, k, v = heads(y[..., :32]), heads(y[..., 32:48]), heads(y[..., 48:])
    q, k = (torch.cat([four_rotated(each, cos, sin), each[..., :4]], dim=-1) for each in (q, k))
    return attend(q, k, v)


def half_turned_the_other_way(x: Tensor, qkv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = torch.nn.functional.linear(x, qkv)

    def turned(part: Tensor) -> Tensor:
        half = torch.cat((part[..., 4:], -part[..., :4]), dim=-1)
        return part * cos.unsqueeze(1) + half * sin.unsqueeze(1)

    return attend(turned(heads(y[..., :32])), turned(heads(y[..., 32:48])), heads(y[..., 48:]))


def an_input_is_rotated(x: Tensor, qkv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q, k, v = (part.view(1, 5, 4, 8).transpose(1, 2) for part in (qkv[:10], qkv[10:20], qkv[20:30]))
    return attend(rotated(q, cos, sin), rotated(k, cos, sin), v)


def key_changes(x: Tensor, qkv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = torch.nn.functional.linear(x, qkv[:32])
    k = heads(torch.nn.functional.linear(x, qkv[32:48]))
    turned = rotated(k, cos, sin)
    k.mul_(2.0)
    return attend(rotated(heads(y), cos, sin), turned, k)


def table_changes(x: Tensor, qkv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = torch.nn.functional.linear(x, qkv)
    doubled = cos * 2.0
    q, k = rotated(heads(y[..., :32]), doubled, sin), rotated(heads(y[..., 32:48]), doubled, sin)
    doubled.mul_(2.0)
    return attend(q, k, heads(y[..., 48:]))


MISSES: dict[Callable[..., Tensor], str] = {
    no_rotary: "is not a rotary embedding",
    norm_alone: "norms its heads, and nothing rotates them afterwards",
    interleaved: "rotates numbers next to each other (interleaved); wanted is half against half",
    other_sine: "query is rotated by cos and sin, key by cos and cos; wanted are the same",
    query_normed_alone: "query is normed and the other is not",
    other_epsilon: "query is normed with (epsilon, offset) (1e-06, 0.0), key with (1e-05, 0.0)",
    read_before_it_is_rotated: "query: linear has a second reader: ",
    read_after_it_is_rotated: "query: add has a second reader: ",
    value_is_the_query: "has a second reader: ",
    table_for_tokens_of_another_dim: "is a table [1, 1, 8]; wanted is [1, tokens, 8]",
    not_the_rest: "which is not the rest of the same heads",
    half_turned_the_other_way: "is not a rotary embedding",
    key_changes: "transpose is changed in place by something else",
    table_changes: "mul is changed in place by something else",
    an_input_is_rotated: "may be the memory of an input",
}


@pytest.mark.parametrize("function", MISSES)
def test_a_miss_says_why(function: Callable[..., Any]) -> None:
    graph = traced(function)
    before = str(graph)
    result = fuse(graph)
    (miss,) = result.misses
    assert result.matches == 0
    assert MISSES[function] in miss.reason, miss
    assert miss.node == the_call(graph).name
    assert str(graph) == before


def test_a_graph_without_attention_is_no_site() -> None:
    graph = graph_of(lambda x: x + 1, torch.zeros(3))
    assert fuse(graph) == PassResult()


def test_the_names_of_its_ops_are_options_of_the_pass() -> None:
    """A runner with ops of its own names them; the pass knows no runner."""
    graph = traced(plain)
    result = FuseRopeKVWrite(attention_op="other::attention").apply(graph, FakeContext(graph))
    assert result == PassResult()
    assert FuseRopeKVWrite().uuid() != FuseRopeKVWrite(fused_op="other::attention").uuid()


LAYERS = {  # attention calls that fuse; the others of a family are misses
    **dict.fromkeys(FAMILIES, 2),
    "gemma3": 3,
    "opt": 0,
    "granite": 2,
    "olmo2": 2,
    "starcoder2": 2,
    "mixtral": 2,
    "phi": 2,
    "smollm3": 1,
}
WHY_NOT = {
    "opt": "is not a rotary embedding",
    "gpt2": "is not a rotary embedding",
    "smollm3": "is not a rotary embedding",
    "cohere": "(interleaved)",
    "glm4": "(interleaved)",
    "ernie4.5": "(interleaved)",
    "gpt-oss": "is not a rotary embedding",
    "deepseek-v3": "is not a rotary embedding",
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*families((*FAMILIES, *UNLISTED), torch.bfloat16), ("qwen3", torch.float32), ("phi3", torch.float16)],
)
def test_every_layer_of_a_model_family_matches(name: str, dtype: torch.dtype) -> None:
    """Every one fuses or says why not; norms of heads are gone from the pieces, and tables are there once."""
    run = family(name, dtype)
    *_, outcome = run.apply(EliminateNoops(), FuseAddRMSNorm(), FuseRopeKVWrite())
    assert outcome.matches == LAYERS.get(name, 0)
    called = [node for node in run.graph.nodes if node.target in SPLIT_OPS]
    assert len(outcome.misses) == len(called) - outcome.matches
    assert all(WHY_NOT.get(name, "") in miss.reason for miss in outcome.misses[:1]), outcome.misses
    fused = [node for node in called if node.target is ROPE_ATTENTION]
    assert len({node.args[4] for node in fused}) <= (2 if name == "gemma3" else 1)
    has_norm = name in ("qwen3", "qwen3-moe", "gemma3")
    for node in fused:
        assert (node.args[8] is not None) == has_norm
        assert arguments_of(node)[4].meta["example_value"].dtype == torch.float32


def test_equal_layers_stay_equal_pieces() -> None:
    """Tables cross the cut to attention alone."""
    plain_run, fused_run = family("qwen3", torch.bfloat16, 4), family("qwen3", torch.bfloat16, 4)
    plain_run.apply(EliminateNoops(), FuseAddRMSNorm())
    fused_run.apply(EliminateNoops(), FuseAddRMSNorm(), FuseRopeKVWrite())
    assert len(fused_run.unique_pieces()) == len(plain_run.unique_pieces()) == 4
