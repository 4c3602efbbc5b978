"""The options of Inductor that exist, and those that matter to how piecegraph compiles."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

NOTHING_MEASURED: Mapping[str, Any] = {"triton.autotune_pointwise": False}
"""Options of dynamic pieces. By default Inductor compiles each pointwise kernel in several forms and measures them at
the first run of every start, at the size of that run, so that two starts could run different kernels."""


def unknown_inductor_options(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names in `options` that are not fields of `torch._inductor.config`."""
    from torch._inductor import config

    known = config.get_config_copy()
    return tuple(name for name in options if name not in known)


def inductor_option_names() -> list[str]:
    """Return the names of all fields of `torch._inductor.config`."""
    from torch._inductor import config

    return list(config.get_config_copy())


_TUNED_AT_COMPILE_TIME = (
    "max_autotune",
    "max_autotune_gemm",
    "benchmark_fusion",
    "benchmark_combo_kernel",
    "triton.autotune_at_compile_time",
)


def is_tuned_at_compile_time(options: Mapping[str, Any]) -> bool:
    """Return whether Inductor measures kernels during a compile with these options."""
    from torch._inductor import config

    known = {**config.get_config_copy(), **options}
    return any(known.get(name) for name in _TUNED_AT_COMPILE_TIME)


@contextlib.contextmanager
def no_compile_workers() -> Iterator[None]:
    """Keep Inductor from starting its own compile processes inside this block."""
    from torch._inductor import config

    with config.patch(compile_threads=1):
        yield
