"""The choice of the kernel for int8 weights on a CPU, taken at the start of a model, before its weights are read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from piecegraph.compiler.own_kernels.cpp_library import NoLibrary, library_of
from piecegraph.compiler.store.compile_cache import CompileCache
from piecegraph.config import CompileConfig
from piecegraph.cpu_instructions import cpu_instructions
from piecegraph.passes.kernels.cpu import int8_rows

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NEEDED = ("avx512_vnni", "avx512bw", "avx512vl")
"""The instructions of the kernel, as Linux lists them."""


def choose_cpu_kernel(
    quantization: str | None, hf_config: PretrainedConfig, device_type: str, options: CompileConfig
) -> None:
    """Load our kernel for int8 weights where the model may have some and runs on a CPU, or note why it is not used.

    It is built where the cache does not have it. A process that has it does nothing. Raises `ConfigError` for the
    settings of the cache.
    """
    is_quantised = quantization is not None or getattr(hf_config, "quantization_config", None) is not None
    if device_type != "cpu" or not is_quantised or not int8_rows.why_not():
        return
    missing = [name for name in NEEDED if name not in cpu_instructions()]
    if missing:
        int8_rows.do_without(f"no {missing[0]}")
        return
    # The library is kept where eager pieces and what is dumped are not: it is the same beside any pieces.
    cache = CompileCache.open(replace(options, compiler="inductor", dump_dir=None))
    try:
        int8_rows.use(library_of(int8_rows.SOURCE, cache))
    except NoLibrary as error:
        int8_rows.do_without(str(error))
