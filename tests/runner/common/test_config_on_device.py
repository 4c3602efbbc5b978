"""What follows from a config on a device: how many tokens a step has, which pieces are static, which passes run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piecegraph.config import PASSES, CompileConfig
from piecegraph.passes.pipeline import ON_A_CPU
from piecegraph.runner.common.config_on_device import (
    DEFAULT_COMPILE_SIZES,
    batched_tokens,
    options_on,
    runs_ahead,
    static_sizes,
    static_sizes_note,
)
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource


def made(**fields: object) -> EngineConfig:
    return EngineConfig(source=ModelSource(model="m"), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "max_num_seqs", "max_num_tokens"),
    [
        ({}, 256, 2048),
        ({"max_num_batched_tokens": 64}, 64, 64),
        ({"max_num_batched_tokens": 300}, 256, 300),
        ({"max_num_seqs": 4000}, 4000, 4000),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 8}, 8, 8),
    ],
)
def test_a_step_has_room_for_a_token_of_every_running_request(
    options: dict[str, int], max_num_seqs: int, max_num_tokens: int
) -> None:
    """The argument that is left to its default follows the other one."""
    config = EngineConfig(source=ModelSource(model="m"), **options)  # type: ignore[arg-type]
    assert (config.max_num_seqs, batched_tokens(config, "cpu")) == (max_num_seqs, max_num_tokens)


def test_passes_over_collectives_run_for_several_ranks_only() -> None:
    one, two = (EngineConfig(source=ModelSource(model="a"), tensor_parallel_size=size) for size in (1, 2))
    assert options_on(one, "cuda").passes is None
    assert options_on(two, "cuda").passes == tuple(name for name in PASSES if name not in ON_A_CPU)
    on_cpu = options_on(two, "cpu").passes or ()
    assert "fuse-all-reduce" not in on_cpu
    assert "merge-projections" in on_cpu
    named = replace(two, compile=replace(two.compile, passes=("fuse-moe",)))
    assert options_on(named, "cuda").passes == ("fuse-moe",)


def test_static_sizes_are_of_compiled_pieces_on_a_gpu_unless_named() -> None:
    """They are none without Inductor, which a note says if any were named, and with several ranks."""
    inductor, eager = CompileConfig(compiler="inductor"), CompileConfig(compiler="eager")
    assert static_sizes(made(compile=inductor), is_cuda=True) == DEFAULT_COMPILE_SIZES
    assert static_sizes(made(compile=inductor), is_cuda=False) == ()
    assert static_sizes(made(compile=inductor, compile_sizes=[16]), is_cuda=False) == (16,)
    assert static_sizes(made(compile=inductor, tensor_parallel_size=2), is_cuda=True) == ()
    named = made(compile=eager, compile_sizes=[16])
    assert static_sizes(named, is_cuda=True) == ()
    assert static_sizes_note(named) == ("compile_sizes: eager pieces are not compiled, so no size is static",)
    assert static_sizes_note(replace(named, compile=inductor)) == ()


def test_steps_run_ahead_on_a_gpu_unless_told() -> None:
    assert runs_ahead(made(), "cuda") and not runs_ahead(made(), "cpu")
    assert runs_ahead(made(async_scheduling=True), "cpu") and not runs_ahead(made(async_scheduling=False), "cuda")
