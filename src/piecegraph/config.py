"""What a caller may choose about compiling: one frozen value, checked when it is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from piecegraph.errors import ConfigError, did_you_mean

DEFAULT_SPLIT_OPS = (
    "piecegraph::attention",
    "aten::scaled_dot_product_attention",
    "higher_order::flex_attention",
)
"""Ops a graph is cut at unless the caller names others; each may be absent from a graph."""

PASSES = ("merge-projections",)
"""Every pass there is, in the order they run."""

COMPILERS = ("inductor", "eager")

COMPILE_SIZES_OPTIONS: Mapping[str, Any] = {"coordinate_descent_tuning": True}
"""Inductor options for static sizes unless the caller gives others. docs/decisions/001-static-sizes.md says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileConfig:
    """How a graph is cut and its pieces are compiled. Every field is also an `options` key by name."""

    split_ops: tuple[str, ...] = DEFAULT_SPLIT_OPS
    """Ops to cut at, as `"namespace::name"`. A named op must appear in the graph; the default ones
    (`DEFAULT_SPLIT_OPS`) may be absent."""

    compiler: str = "inductor"
    """What compiles a piece: `"inductor"`, or `"eager"` (runs the piece's graph as it is)."""

    compile_workers: int | None = None
    """Processes that compile unique pieces. None: one a core, at most 4 (a decoder has about as many unique
    pieces). 0 or 1: compile in this process."""

    inductor_options: Mapping[str, Any] = field(default_factory=dict)
    """`torch._inductor.config` fields to set for our pieces only, e.g. `{"max_autotune": True}`."""

    compile_sizes: tuple[int, ...] = ()
    """Sizes, ascending, for which every piece is compiled once more with all its dynamic sizes fixed to
    that number. A call whose sizes match runs those pieces; any other runs the dynamic ones. Takes compile
    time for each size (reported apart), and pays at a decode batch of a few tokens. No effect with
    `compiler="eager"`."""

    compile_sizes_options: Mapping[str, Any] = field(default_factory=lambda: dict(COMPILE_SIZES_OPTIONS))
    """`torch._inductor.config` fields for the pieces of `compile_sizes`, on top of `inductor_options`. What
    they have tuned is measured while nothing else of ours runs on the GPU."""

    compile_sizes_options_up_to: int = 32
    """The largest size that takes `compile_sizes_options`; larger ones take `inductor_options` alone. Tuning
    pays where a step is bound by reading weights: at 64 to 256 tokens it gained 1 % for 5 s a size (H200)."""

    passes: tuple[Any, ...] | None = None
    """Passes that rewrite the graph: names (`PASSES`, which is also their order) and `GraphPass` objects of the
    caller's, which run after ours. None: those that pay on the device. `merge-projections`: linears over one
    input become one matmul (by name, through `torch.compile`, weights are the caller's arguments and none can
    be merged)."""

    dump_dir: str | None = None
    """Folder that receives the traced graph, every unique piece and the stitched source as text."""

    def __post_init__(self) -> None:
        if isinstance(self.split_ops, str):
            raise ConfigError(
                f"split_ops is one string, {self.split_ops!r}; give a tuple of names: ({self.split_ops!r},)"
            )
        object.__setattr__(self, "split_ops", tuple(self.split_ops))
        for name in self.split_ops:
            namespace, _, op = name.partition("::") if isinstance(name, str) else ("", "", "")
            if not namespace or not op:
                raise ConfigError(
                    f"split_ops has {name!r}; an op is named as 'namespace::name', e.g. 'mylib::attention'."
                )
        if isinstance(self.passes, str):
            raise ConfigError(f"passes is one string, {self.passes!r}; give a tuple of names: ({self.passes!r},)")
        if self.passes is not None:
            object.__setattr__(self, "passes", tuple(self.passes))
            for each in self.passes:
                if isinstance(each, str) and each not in PASSES:
                    raise ConfigError(f"passes has {each!r}, which is unknown.{did_you_mean(each, PASSES)}")
                if not isinstance(each, str) and not hasattr(each, "apply"):
                    raise ConfigError(f"passes has {each!r}; give names ({', '.join(PASSES)}) and `GraphPass` objects.")
        if self.compiler not in COMPILERS:
            raise ConfigError(f"compiler={self.compiler!r} is unknown.{did_you_mean(str(self.compiler), COMPILERS)}")
        if self.compile_workers is not None and self.compile_workers < 0:
            raise ConfigError(
                f"compile_workers={self.compile_workers}; it is a number of processes, 0 or more, or None."
            )
        object.__setattr__(self, "compile_sizes", _checked_sizes(self.compile_sizes))
        most = self.compile_sizes_options_up_to
        if not isinstance(most, int) or isinstance(most, bool) or most < 0:
            raise ConfigError(f"compile_sizes_options_up_to={most!r}; it is a size, or 0 for none.")

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None) -> CompileConfig:
        """The config that `torch.compile(..., options=...)` means. Raises `ConfigError` on an unknown name."""
        options = dict(options or {})
        known = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                raise ConfigError(f"unknown compile option {name!r}.{did_you_mean(name, known)}")
        return cls(**options)


def _checked_sizes(sizes: Any) -> tuple[int, ...]:
    """`compile_sizes` as a tuple. Raises `ConfigError`."""
    if isinstance(sizes, str | int) or not isinstance(sizes, Iterable):
        raise ConfigError(f"compile_sizes is {sizes!r}; give a tuple of sizes, e.g. (1, 2, 4), or () for none.")
    found: tuple[Any, ...] = tuple(sizes)
    for size in found:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"compile_sizes has {size!r}; a size is a whole number, 1 or more, e.g. (1, 2, 4).")
    wanted = tuple(sorted(set(found)))
    if found != wanted:
        raise ConfigError(f"compile_sizes is {found}; sizes ascend and appear once: give {wanted}.")
    return found
