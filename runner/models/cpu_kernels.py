"""The choice of our C++ kernels for a model on a CPU, taken at its start, before its weights are read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from piecegraph import environment
from piecegraph.compiler.own_kernels.cpp_library import NoLibrary, library_of
from piecegraph.compiler.store.compile_cache import CompileCache
from piecegraph.config import CompileConfig
from piecegraph.cpu_instructions import cpu_instructions
from piecegraph.passes.kernels.common.cpp_kernel import CppKernel
from piecegraph.passes.kernels.cpu import int8_rows
from piecegraph.runner.attention.kernels import decode_attention

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def choose_cpu_kernels(
    quantization: str | None, hf_config: PretrainedConfig, device_type: str, options: CompileConfig
) -> None:
    """Load the kernels that the model may need on a CPU, or note why one is not used.

    They are built where the cache does not have them, half a second each. A process that has them does nothing.
    Raises `ConfigError` for the settings of the cache.
    """
    missing = [kernel for kernel in _wanted(quantization, hf_config, device_type) if kernel.call is None]
    if missing:
        # Libraries are kept where eager pieces and what is dumped are not: they are the same beside any pieces.
        cache = CompileCache.open(replace(options, compiler="inductor", dump_dir=None))
        for kernel in missing:
            _load(kernel, cache)


def keep_cpu_kernels(
    quantization: str | None, hf_config: PretrainedConfig, device_type: str, cache: CompileCache
) -> None:
    """Put the kernels that the model may need on a CPU into `cache`, also those that this process has loaded.

    A start from `cache` then needs no C++ compiler. Where one cannot be built, `cpu_kernels_note` says why.
    """
    for kernel in _wanted(quantization, hf_config, device_type):
        _load(kernel, cache)


def cpu_kernels_note(device_type: str) -> tuple[str, ...]:
    """Return the note about attention on a CPU where torch computes all of it."""
    if device_type != "cpu" or not decode_attention.KERNEL.why_not:
        return ()
    return (f"attention of single tokens by torch, not by our C++ kernel: {decode_attention.KERNEL.why_not}",)


def _wanted(quantization: str | None, hf_config: PretrainedConfig, device_type: str) -> tuple[CppKernel, ...]:
    if device_type != "cpu":
        return ()
    is_quantised = quantization is not None or getattr(hf_config, "quantization_config", None) is not None
    return (decode_attention.KERNEL, int8_rows.KERNEL) if is_quantised else (decode_attention.KERNEL,)


def _load(kernel: CppKernel, cache: CompileCache) -> None:
    lacking = [name for name in kernel.instructions if name not in cpu_instructions()]
    if environment.read(environment.CPU_KERNELS) == "0":
        kernel.do_without(f"{environment.CPU_KERNELS}=0")
    elif lacking:
        kernel.do_without(f"no {lacking[0]}")
    else:
        try:
            kernel.use(library_of(kernel.source, cache))
        except NoLibrary as error:
            kernel.do_without(str(error))
