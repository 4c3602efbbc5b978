"""The ops: what each hands to the backend, and what the graph says a layer is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from piecegraph.compiler.graphs.replay.prepared_ops import PatchableLaunch, prepared_ops
from piecegraph.compiler.graphs.replay.step_kinds import value_kind
from piecegraph.compiler.splitting.plan import SplitCall, TensorSpec
from piecegraph.errors import UnsupportedModel
from piecegraph.runner.attention.interface import op as _op  # noqa: F401  (registers the ops)
from piecegraph.runner.attention.interface.forward_context import ForwardContext, set_forward_context
from piecegraph.runner.attention.interface.kv_cache import KVCache
from piecegraph.runner.attention.interface.layer import AttentionLayer, attention_layers
from piecegraph.runner.attention.interface.op import launch_of_group
from piecegraph.runner.attention.interface.op_call import (
    ATTENTION_OP,
    ATTENTION_OPS,
    BIASED_ATTENTION_OP,
    CHUNKED_ATTENTION_OP,
    LATENT_ATTENTION_OP,
    ROPE_ATTENTION_OP,
)
from piecegraph.runner.attention.triton.backend import TritonBackend
from tests.runner.attention.rotary_case import RotaryCase, check_rotated_cache, make_rotary_case


def context_of(case: RotaryCase) -> ForwardContext:
    raw, backend = case.raw, TritonBackend()
    builder = backend.metadata_builder([raw.layer], raw.kv_cache.key.shape[1], raw.query.device, max_num_reqs=8)
    return ForwardContext(
        impl=backend.impl(), metadata=builder.build(raw.metadata), kv_caches={raw.layer.name: raw.kv_cache}
    )


def arguments(case: RotaryCase, out: torch.Tensor) -> tuple[object, ...]:
    raw, rotary = case.raw, case.rotary
    return (
        raw.query, raw.key, raw.value, out, rotary.cos, rotary.sin, rotary.q_norm_weight, rotary.k_norm_weight,
        rotary.norm_eps, rotary.norm_offset, raw.layer.scale, 0, 0.0, None, None, raw.layer.name,
    )  # fmt: skip


@pytest.mark.parametrize("norm", ["no norm", "norm of 1 + weight"])
def test_rope_attention_rotates_and_attends(norm: str) -> None:
    case = make_rotary_case(lens=[(9, 1), (0, 7)], norm=norm)
    out = torch.empty_like(case.raw.query)
    with set_forward_context(context_of(case)):
        torch.ops.piecegraph.rope_attention.default(*arguments(case, out))
    torch.testing.assert_close(out.double(), case.rotated.expected, atol=5e-6, rtol=1e-4)
    check_rotated_cache(case)


def test_rope_attention_is_prepared_as_attention_is() -> None:
    case = make_rotary_case(lens=[(9, 1), (0, 7)], norm="norm")
    out = torch.empty_like(case.raw.query)
    rope, plain = prepared_ops()[ROPE_ATTENTION_OP], prepared_ops()[ATTENTION_OP]
    assert rope.metadata is plain.metadata, "asked once a replay for both"
    with set_forward_context(context_of(case)):
        launch = rope.prepare(*arguments(case, out))
        assert callable(launch)
        launch(rope.metadata())
    torch.testing.assert_close(out.double(), case.rotated.expected, atol=5e-6, rtol=1e-4)


def test_a_layer_of_another_name_is_of_the_same_kind() -> None:
    """What is found under its name counts instead: the cache, and which group it is of."""
    case = make_rotary_case(lens=[(9, 1), (0, 7)], norm="norm")
    raw, context, name = case.raw, context_of(case), case.raw.layer.name
    *same, _ = arguments(case, torch.empty_like(raw.query))
    other = KVCache(raw.kv_cache.key[:2], raw.kv_cache.value[:2])
    caches = {name: raw.kv_cache, "twin": raw.kv_cache, "smaller": other, "apart": raw.kv_cache}
    groups = {name: 0, "twin": 0, "smaller": 0, "apart": 1}
    kind = prepared_ops()[ROPE_ATTENTION_OP].kind
    assert kind is not None and kind is prepared_ops()[ATTENTION_OP].kind
    with set_forward_context(replace(context, kv_caches=caches, group_of=groups)):
        kinds = {layer: value_kind(kind(*same, layer)) for layer in caches}
        kinds["wider window"] = value_kind(kind(*same[:-4], 8, *same[-3:], name))
    assert kinds[name] == kinds["twin"]
    assert len(set(kinds.values())) == 4


def test_the_schemas_say_what_is_written() -> None:
    written = {
        op: [a.name for a in getattr(torch.ops.piecegraph, op.split("::")[1]).default._schema.arguments if a.is_write]
        for op in ATTENTION_OPS
    }
    assert written == {
        ATTENTION_OP: ["out"],
        ROPE_ATTENTION_OP: ["query", "out"],
        LATENT_ATTENTION_OP: ["out"],
        CHUNKED_ATTENTION_OP: ["out"],
        BIASED_ATTENTION_OP: ["out"],
    }


def call(op: str, unsupported: str | None = None) -> SplitCall:
    def spec(*shape: int) -> TensorSpec:
        return TensorSpec(shape=shape, dtype=torch.float16, device=torch.device("cpu"))

    middle = {
        ROPE_ATTENTION_OP: (spec(3, 6), spec(3, 6), None, None, 1e-6, 0.0),
        CHUNKED_ATTENTION_OP: (16,),
        BIASED_ATTENTION_OP: (spec(4), 1.0),
    }.get(op, ())
    value = () if op == LATENT_ATTENTION_OP else (spec(3, 2, 5),)  # else in the key
    args = (spec(3, 4, 8), spec(3, 2, 8), *value, spec(3, 4, 5), *middle, 0.5, 7, 30.0, None, unsupported, "l.0")
    return SplitCall(index=0, op=op, args=args)


@pytest.mark.parametrize("op", ATTENTION_OPS)
def test_layers_are_read_off_each_op(op: str) -> None:
    chunk_size = 16 if op == CHUNKED_ATTENTION_OP else 0
    assert attention_layers([call(op)]) == (
        AttentionLayer(
            name="l.0", num_q_heads=4, num_kv_heads=2, key_dim=8, value_dim=5, dtype=torch.float16, scale=0.5,
            window=7, softcap=30.0, has_sinks=False, is_latent=op == LATENT_ATTENTION_OP,
            chunk_size=chunk_size, has_slopes=op == BIASED_ATTENTION_OP,
        ),
    )  # fmt: skip
    with pytest.raises(UnsupportedModel, match=r"l\.0: cannot"):
        attention_layers([call(op, unsupported="cannot")])


def test_a_bias_by_position_beside_sinks_is_refused() -> None:
    """The bias counts from the last key, which would move the scores of keys and not those of sinks."""
    found = call(BIASED_ATTENTION_OP)
    sinks = TensorSpec(shape=(4,), dtype=torch.float16, device=torch.device("cpu"))
    with pytest.raises(UnsupportedModel, match=r"l\.0: it has both sinks and a bias by position"):
        attention_layers([replace(found, args=(*found.args[:-3], sinks, *found.args[-2:]))])


class RecordedLaunch:
    """A patchable launch that records what it is given."""

    def __init__(self, reason: str | None = None) -> None:
        self.seen: list[object] = []
        self.reason = reason

    def __call__(self, metadata: object) -> None:
        self.seen.append(("launch", metadata))

    def unpatchable_reason(self) -> str | None:
        return self.reason

    def record(self, metadata: object) -> Callable[[int, Any], None]:
        self.seen.append(("record", metadata))
        return lambda graph_exec, metadata: self.seen.append((graph_exec, metadata))


def test_a_launch_takes_the_metadata_of_its_group() -> None:
    seen: list[object] = []
    launch = launch_of_group(seen.append, 1)
    assert not isinstance(launch, PatchableLaunch)
    launch(("first", "second"))
    assert seen == ["second"]


def test_a_patchable_launch_of_a_group_stays_patchable() -> None:
    inner = RecordedLaunch()
    launch = launch_of_group(inner, 1)
    assert isinstance(launch, PatchableLaunch) and launch.unpatchable_reason() is None
    launch(("a", "b"))
    patch = launch.record(("c", "d"))
    patch(7, ("e", "f"))
    assert inner.seen == [("launch", "b"), ("record", "d"), (7, "f")]


def test_a_launch_of_a_group_passes_on_why_it_cannot_be_in_a_graph() -> None:
    launch = launch_of_group(RecordedLaunch("no node can become it"), 0)
    assert isinstance(launch, PatchableLaunch) and launch.unpatchable_reason() == "no node can become it"
