"""What an `EngineConfig` leaves open until its device is known: budgets, static sizes, passes."""

from __future__ import annotations

from dataclasses import replace

from piecegraph.config import CompileConfig
from piecegraph.runner.common.engine_config import EngineConfig

DEFAULT_COMPILE_SIZES = (1,)
"""Sizes compiled statically on a GPU unless the caller names others: one token, for which a matmul becomes a reduction
that reads the weights once. docs/decisions/001-static-sizes.md says what others gain, and what tuning them takes."""


def batched_tokens(config: EngineConfig, device_type: str) -> int:
    """Return the largest number of tokens that a step computes."""
    return config.max_num_batched_tokens or max(config.max_num_seqs, 2048 if device_type == "cpu" else 8192)


def runs_ahead(config: EngineConfig, device_type: str) -> bool:
    """Return whether a step is launched while the preceding step runs, which pays only on an asynchronous device."""
    if config.logits_processors:
        return False
    return device_type != "cpu" if config.async_scheduling is None else config.async_scheduling


def static_sizes_note(config: EngineConfig) -> tuple[str, ...]:
    """Return a note if `compile_sizes` were requested and have no effect, else nothing."""
    if not config.compile_sizes or config.compile.compiler == "inductor":
        return ()
    return (f"compile_sizes: {config.compile.compiler} pieces are not compiled, so no size is static",)


def static_sizes(config: EngineConfig, *, is_cuda: bool) -> tuple[int, ...]:
    """Return the sizes at which pieces that become faster are compiled with static shapes.

    These are the requested sizes, else on a GPU `DEFAULT_COMPILE_SIZES`; none unless Inductor compiles.
    """
    if config.compile.compiler != "inductor" or config.num_ranks > 1:  # one rank alone times nothing
        return ()
    if config.compile_sizes is not None:
        return config.compile_sizes
    return config.compile.compile_sizes or (DEFAULT_COMPILE_SIZES if is_cuda else ())


def options_on(config: EngineConfig, device_type: str) -> CompileConfig:
    """Return the compile config for a device: with its static sizes and, unless passes are named, those of its ranks.

    Imports the passes, and with them torch, only if there are several ranks.
    """
    compile = replace(config.compile, compile_sizes=static_sizes(config, is_cuda=device_type == "cuda"))
    if compile.passes is not None or config.tensor_parallel_size == 1:
        return compile
    from piecegraph.passes.pipeline import default_passes

    names = tuple(each.name for each in default_passes(device_type, config.tensor_parallel_size))
    return replace(compile, passes=names)
