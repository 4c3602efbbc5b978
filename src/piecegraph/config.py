"""The compiler's configuration: one frozen value that checks itself when it is made."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from piecegraph.errors import ConfigError, did_you_mean

DEFAULT_SPLIT_OPS = (
    "piecegraph::attention",
    "piecegraph::rope_attention",
    "piecegraph::latent_attention",
    "piecegraph::chunked_attention",
    "piecegraph::biased_attention",
    "piecegraph::varlen_attention",
    "piecegraph::linear_attention",
    "piecegraph::mamba_mixer",
    "piecegraph::short_conv",
    "aten::scaled_dot_product_attention",
    "higher_order::flex_attention",
    "vllm::unified_kv_cache_update",
    "vllm::unified_attention_with_output",
)
"""The ops that a graph is cut at unless the caller names others: ours, torch's and vLLM's (docs/other_runners.md).

Each may be absent from a graph."""

PASSES = (
    "eliminate-noops",
    "merge-projections",
    "fuse-add-rms-norm",
    "fuse-act-mul",
    "fuse-rope-kv-write",
    "fuse-int8-rope",
    "select-rows-early",
    "fuse-linear",
    "fuse-moe",
    "fuse-routing",
    "fuse-norm-quant",
    "fuse-act-quant",
    "fuse-all-reduce",
    "fuse-lookups",
    "use-onednn",
    "fuse-int8-layers",
)
"""The names of all built-in passes, in the order they run."""

RENAMED_PASSES: Mapping[str, str] = {"tail": "select-rows-early"}
"""The former names of passes, each with the name that replaces it. A former name is refused."""

COMPILERS = ("inductor", "eager")

CACHE_MODES: Mapping[str, bool | str] = {"off": False, "pieces": "pieces", "on": True}
"""The values that `PIECEGRAPH_CACHE` may have, each with the value of `CompileConfig.cache` it stands for, in ascending
order of what is kept."""

COMPILE_SIZES_OPTIONS: Mapping[str, Any] = {"coordinate_descent_tuning": True}
"""The Inductor options for static sizes unless the caller gives others (docs/decisions/001-static-sizes.md)."""

MAX_COMPILE_WORKERS = 1024
"""The largest number of processes that may compile at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileConfig:
    """A choice of how a graph is cut and its pieces are compiled.

    Every field is also a key of `torch.compile(..., options=...)`. Raises `ConfigError` for a field that is not a valid
    choice.
    """

    split_ops: tuple[str, ...] = DEFAULT_SPLIT_OPS
    """The ops to cut at, as `"namespace::name"`. A named op must appear in the graph; the default ones
    (`DEFAULT_SPLIT_OPS`) may be absent."""

    compiler: str = "inductor"
    """The compiler of a piece: `"inductor"`, or `"eager"`, which runs the piece's graph as it is."""

    compile_workers: int | None = None
    """The number of processes that compile unique pieces. None: one a core, at most 4 (a decoder has about as many
    unique pieces). 0 or 1: compile in this process."""

    inductor_options: Mapping[str, Any] = field(default_factory=dict)
    """The `torch._inductor.config` fields to set for our pieces only, e.g. `{"max_autotune": True}`."""

    compile_sizes: tuple[int, ...] = ()
    """The sizes, ascending, for which every piece is compiled once more with all its dynamic sizes fixed to that
    number. A call whose sizes match runs those pieces; any other runs the dynamic ones. Each size takes compile time
    (reported separately) and pays off at a decode batch of a few tokens. Has no effect with `compiler="eager"`."""

    compile_sizes_options: Mapping[str, Any] = field(default_factory=lambda: dict(COMPILE_SIZES_OPTIONS))
    """The `torch._inductor.config` fields for the pieces of `compile_sizes`, on top of `inductor_options`. Candidates
    are timed while nothing else of ours runs on the GPU."""

    compile_sizes_options_up_to: int = 32
    """The largest size that takes `compile_sizes_options`; larger ones take `inductor_options` alone. Tuning pays
    where a step is bound by reading weights: at 64 to 256 tokens it gained 1 % for 5 s a size (H200)."""

    passes: tuple[Any, ...] | None = None
    """The passes that rewrite the graph: names (`PASSES`, which is also their order) and the caller's `GraphPass`
    objects, which run after ours. None: the passes that pay off on the device. `merge-projections` makes linears over
    one input one matmul (through `torch.compile` by name, weights are the caller's arguments and none can be
    merged)."""

    expect: Mapping[str, int | str] = field(default_factory=dict)
    """The number of matches that a pass must have, by its name: a number, or `"all"` for at least one match and no
    miss. Anything else raises `PassExpectation`, which lists the misses with their reasons."""

    strict: bool = False
    """If True, a failure is an error: `PassFailed` for a pass that raises, breaks the graph or miscounts,
    `PieceCompileFailed` for a piece that Inductor cannot compile, and the original exception for a compiled piece that
    raises when it runs. If False, the model runs without that pass and runs that piece as its graph; a warning is
    logged and the row in the report has the error."""

    selfcheck: bool = False
    """If True, `LLM` compares at start each piece at each captured size with the graph as it was traced, and a replay
    with the pieces it was made of. A difference raises `SelfcheckFailed`, which names the first piece and the pass. The
    check takes about as long as a few steps of the model in float64 for each size. Has no effect on
    `piecegraph.compile`."""

    dump_dir: str | None = None
    """The directory that receives the traced graph, every unique piece and the stitched source as text, and the graph
    before and after every pass that matched. Nothing is loaded from the cache then, so that a compile is shown."""

    cache: bool | str = True
    """True: keep what is compiled, and load it instead of compiling again. `"pieces"`: trace the model each time, and
    keep compiled pieces only. False: keep and load nothing. `PIECEGRAPH_CACHE` (`on`, `pieces`, `off`) can only reduce
    what is kept."""

    cache_dir: str | None = None
    """The directory of the cache. None: `PIECEGRAPH_CACHE_DIR`, or the user's cache directory."""

    signing_key_file: str | None = None
    """The keys whose entries are trusted besides those of the user's own key, for a cache that another user made
    (docs/cache.md): a file, a directory of files, or several of either, joined by `os.pathsep`. None:
    `PIECEGRAPH_SIGNING_KEY_FILE`."""

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
        if self.passes is not None:
            object.__setattr__(self, "passes", _checked_passes(self.passes))
        object.__setattr__(self, "expect", _checked_expect(self.expect, self.passes))
        if self.cache not in CACHE_MODES.values():
            raise ConfigError(f"cache={self.cache!r}; it is True, False or 'pieces'.")
        for name in ("strict", "selfcheck"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}; it is True or False.")
        if self.compiler not in COMPILERS:
            raise ConfigError(f"compiler={self.compiler!r} is unknown.{did_you_mean(str(self.compiler), COMPILERS)}")
        workers = self.compile_workers
        is_number = isinstance(workers, int) and not isinstance(workers, bool)
        if workers is not None and not (is_number and 0 <= workers <= MAX_COMPILE_WORKERS):
            raise ConfigError(
                f"compile_workers={workers!r}; it is a number of processes from 0 to {MAX_COMPILE_WORKERS}, or None."
            )
        object.__setattr__(self, "compile_sizes", _checked_sizes(self.compile_sizes))
        most = self.compile_sizes_options_up_to
        if not isinstance(most, int) or isinstance(most, bool) or most < 0:
            raise ConfigError(f"compile_sizes_options_up_to={most!r}; it is a size, or 0 for none.")

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None) -> CompileConfig:
        """Return the config for `torch.compile(..., options=...)`. Raises `ConfigError` for an unknown name."""
        options = dict(options or {})
        known = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                raise ConfigError(f"unknown compile option {name!r}.{did_you_mean(name, known)}")
        return cls(**options)


def _checked_sizes(sizes: Any) -> tuple[int, ...]:
    """Return `compile_sizes` as a tuple. Raises `ConfigError`."""
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


def _checked_passes(passes: Any) -> tuple[Any, ...]:
    """Return `passes` as a tuple of known names and of pass objects. Raises `ConfigError`."""
    if isinstance(passes, str) or not isinstance(passes, Iterable):
        raise ConfigError(f"passes is {passes!r}; give a tuple of names and passes, e.g. {PASSES[:1]}, or ().")
    found = tuple(passes)
    for each in found:
        if isinstance(each, str):
            _check_not_renamed(each)
            if each not in PASSES:
                raise ConfigError(f"passes has {each!r}, which is unknown.{did_you_mean(each, PASSES)}")
        else:
            _check_pass(each)
    names = [each if isinstance(each, str) else each.name for each in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"passes has {twice!r} twice; a report and `expect` know a pass by its name.")
    return found


def _check_not_renamed(name: str) -> None:
    """Raise `ConfigError` with the new name if `name` is the former name of a pass."""
    if name in RENAMED_PASSES:
        raise ConfigError(f"pass {name!r} is named {RENAMED_PASSES[name]!r} now.")


def _check_pass(each: Any) -> None:
    """Raise `ConfigError` unless `each` has the attributes of `GraphPass`, a class that this file cannot import because
    its module imports torch."""
    if isinstance(each, type):
        raise ConfigError(f"passes has the class {each.__name__}; give an object of it: {each.__name__}().")
    missing = [name for name in ("name", "place", "apply", "uuid") if not hasattr(each, name)]
    if missing:
        raise ConfigError(
            f"passes has {each!r}, which has no {missing[0]}; give names ({', '.join(PASSES)}) and objects of "
            "subclasses of piecegraph.passes.matching.graph_pass.GraphPass (docs/writing_a_pass.md)."
        )
    if not isinstance(each.name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", each.name):
        raise ConfigError(f"passes has one named {each.name!r}; a name is of letters, digits, '-', '_' and '.'.")
    if each.name in PASSES:
        raise ConfigError(
            f"passes has {each!r}, whose name {each.name!r} is one of ours; name yours otherwise, or give the name "
            "alone to have ours."
        )
    if not dataclasses.is_dataclass(each) or not getattr(each, "__dataclass_params__").frozen:  # noqa: B009
        raise ConfigError(
            f"passes has {each!r}, which is not a frozen dataclass; put @dataclass(frozen=True) on "
            f"{type(each).__name__}: its options are part of cache keys."
        )
    try:
        hash(each)
    except TypeError as error:
        raise ConfigError(f"passes has {each!r}, which is not hashable ({error}); its fields must be.") from None


def _checked_expect(expect: Any, passes: Sequence[Any] | None) -> Mapping[str, int | str]:
    """Return `expect` as a mapping whose keys are names of passes that may run. Raises `ConfigError`."""
    if not isinstance(expect, Mapping):
        raise ConfigError(f"expect is {expect!r}; give a mapping of pass to matches, e.g. {{'{PASSES[0]}': 'all'}}.")
    known = PASSES if passes is None else tuple(each if isinstance(each, str) else each.name for each in passes)
    for name, wanted in expect.items():
        if name not in known:
            _check_not_renamed(name)
            raise ConfigError(f"expect has {name!r}, which is not among the passes.{did_you_mean(str(name), known)}")
        if wanted != "all" and (not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 0):
            raise ConfigError(f"expect has {name!r}: {wanted!r}; give a number of matches, 0 or more, or 'all'.")
    return dict(expect)
