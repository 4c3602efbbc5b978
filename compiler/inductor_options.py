"""Options of Inductor: which there are, and what they mean for a compile of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

NOTHING_MEASURED: Mapping[str, Any] = {"triton.autotune_pointwise": False}
"""Of pieces for any size: else Inductor compiles each pointwise kernel in several forms and measures them when it first
runs, in every start anew, at whatever size that is; and two starts run different kernels."""


def unknown_inductor_options(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Names in `options` that are no `torch._inductor.config` field."""
    from torch._inductor import config

    known = config.get_config_copy()
    return tuple(name for name in options if name not in known)


def inductor_option_names() -> list[str]:
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
    """Inductor measures kernels while it compiles with these options."""
    from torch._inductor import config

    known = {**config.get_config_copy(), **options}
    return any(known.get(name) for name in _TUNED_AT_COMPILE_TIME)


@contextlib.contextmanager
def no_compile_workers() -> Iterator[None]:
    """Inside this block Inductor starts no processes in which to compile kernels."""
    from torch._inductor import config

    with config.patch(compile_threads=1):
        yield
