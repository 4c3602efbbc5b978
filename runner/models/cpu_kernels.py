"""The choice of our C++ kernels for a model on a CPU, taken at its start, before its weights are read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piecegraph import environment
from piecegraph.compiler.own_kernels.cpp_library import NoLibrary, library_of
from piecegraph.compiler.store.compile_cache import CompileCache
from piecegraph.config import CompileConfig
from piecegraph.cpu_instructions import cpu_instructions
from piecegraph.errors import ConfigError
from piecegraph.passes.kernels.common.cpp_kernel import CppKernel
from piecegraph.passes.kernels.cpu import int8_layer, int8_rows
from piecegraph.runner.attention.kernels import decode_attention, norm_and_rotate
from piecegraph.runner.sampling.kernels import cpu_gumbel_sample, cpu_truncate
from piecegraph.runner.step.kernels import cpu_prepare_inputs

if TYPE_CHECKING:
    from transformers import PretrainedConfig

OF_EVERY_MODEL = {
    decode_attention.KERNEL: "attention of single tokens",
    norm_and_rotate.KERNEL: "rotary embedding",
    cpu_gumbel_sample.KERNEL: "drawing tokens",
    cpu_truncate.KERNEL: "min_p, top_k and top_p",
    cpu_prepare_inputs.KERNEL: "a step's inputs",
}
"""The kernels that any model may need, and what they compute. What quantised weights do is in a note of their own."""

OF_INT8 = (int8_rows.KERNEL, int8_layer.KERNEL, int8_layer.ADD_AND_NORM, int8_layer.GATE_ROWS)
"""The kernels that int8 weights may need, all of one library."""


def choose_cpu_kernels(
    quantization: str | None, hf_config: PretrainedConfig, device_type: str, options: CompileConfig
) -> None:
    """Load the kernels that the model may need on a CPU, or note why one is not used.

    They are built where the cache does not have them, a second for all. A process that has them does nothing. Raises
    `ConfigError` for the settings of the cache, and for a value of PIECEGRAPH_CPU_KERNELS that is not known.
    """
    _are_turned_off()  # checks the variable, also where every kernel is there
    missing = [kernel for kernel in _wanted(quantization, hf_config, device_type) if kernel.call is None]
    if missing:
        # Libraries are kept where eager pieces and what is dumped are not: they are the same beside any pieces.
        _load(missing, CompileCache.open(replace(options, compiler="inductor", dump_dir=None)))


def keep_cpu_kernels(
    quantization: str | None, hf_config: PretrainedConfig, device_type: str, cache: CompileCache
) -> None:
    """Put the kernels that the model may need on a CPU into `cache`, also those that this process has loaded.

    A start from `cache` then needs no C++ compiler. Where one cannot be built, `cpu_kernels_notes` says why.
    """
    _load(_wanted(quantization, hf_config, device_type), cache)


def cpu_kernels_notes(device_type: str) -> tuple[str, ...]:
    """Return notes about what torch computes on a CPU instead of our C++ kernels, one for each reason.

    Kernels that a process computes by are not turned off, which is a note, too.
    """
    if device_type != "cpu":
        return ()
    reasons: dict[str, list[str]] = {}
    for kernel, what in OF_EVERY_MODEL.items():
        if kernel.why_not:
            reasons.setdefault(kernel.why_not, []).append(what)
    notes = [f"{'; '.join(what)}: by torch, not by our C++ kernels: {why}" for why, what in reasons.items()]
    if _are_turned_off() and any(kernel.call is not None for kernel in OF_EVERY_MODEL):
        notes.append(
            f"{environment.CPU_KERNELS}=0 has no effect on kernels that this process has loaded for an earlier model; "
            "set it before the first one"
        )
    return tuple(notes)


def _wanted(quantization: str | None, hf_config: PretrainedConfig, device_type: str) -> Sequence[CppKernel]:
    if device_type != "cpu":
        return ()
    is_quantised = quantization is not None or getattr(hf_config, "quantization_config", None) is not None
    return (*OF_EVERY_MODEL, *(OF_INT8 if is_quantised else ()))


def _load(kernels: Sequence[CppKernel], cache: CompileCache) -> None:
    """Load or build `kernels`, those of several sources at the same time: a build waits for the C++ compiler."""
    by_source: dict[Path, list[CppKernel]] = {}
    for kernel in kernels:
        by_source.setdefault(kernel.source, []).append(kernel)

    def load_each(of_source: Sequence[CppKernel]) -> None:
        library = functools.cache(lambda: library_of(of_source[0].source, cache))
        for kernel in of_source:
            _load_one(kernel, library)

    if by_source:
        with ThreadPoolExecutor(len(by_source), "piecegraph C++ kernels") as pool:
            list(pool.map(load_each, by_source.values()))


def _load_one(kernel: CppKernel, load: Callable[[], Any]) -> None:
    """Compute by `kernel` of the library that `load` loads or builds.

    One that this process computes by stays as it is: another model may be running.
    """
    is_in_use = kernel.call is not None
    try:
        _check_is_of_use(kernel)
        library = load()
    except NoLibrary as error:
        if not is_in_use:
            kernel.do_without(str(error))
        return
    if not is_in_use:
        kernel.use(library)


def _are_turned_off() -> bool:
    """Return whether the user wants none of our kernels. Raises `ConfigError` for a value that is not known."""
    value = environment.read(environment.CPU_KERNELS)
    if value not in (None, "0", "1"):
        raise ConfigError(
            f"{environment.CPU_KERNELS}={value!r} is not known: 0 has torch compute, 1 or nothing our C++ kernels."
        )
    return value == "0"


def _check_is_of_use(kernel: CppKernel) -> None:
    """Raise `NoLibrary` if the user wants none of our kernels, or this processor lacks what `kernel` needs."""
    if _are_turned_off():
        raise NoLibrary(f"{environment.CPU_KERNELS}=0")
    for name in kernel.instructions:
        if name not in cpu_instructions():
            raise NoLibrary(f"no {name}")
