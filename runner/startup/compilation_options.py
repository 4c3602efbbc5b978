"""Conversion of `LLM(compilation_config=...)`, in all the forms that vLLM accepts, to a `CompileConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from piecegraph.config import CompileConfig
from piecegraph.errors import ConfigError
from piecegraph.runner.common.engine_config import check_boolean

_GRAPH_OPTIONS = ("cudagraph_mode", "cudagraph_capture_sizes")
"""Keys of vLLM's config that are arguments of `LLM` here."""

_LEVELS = ("level", "mode")
"""Keys of vLLM's config for the compilation level."""


class CompilationOptions(NamedTuple):
    """A compile config, and the arguments of `LLM` that were given inside it."""

    compile: CompileConfig
    graphs: Mapping[str, Any]  # by the names in `_GRAPH_OPTIONS`


def compilation_options(given: CompileConfig | Mapping[str, Any] | int | None) -> CompilationOptions:
    """Return the options for `given`: a `CompileConfig`, a dictionary of its fields, or one of vLLM's levels.

    Level 0 compiles nothing; levels 1 to 3 compile. A dictionary may hold the level as `mode`, and the keys in
    `_GRAPH_OPTIONS`. Raises `ConfigError`.
    """
    if isinstance(given, CompileConfig):
        return CompilationOptions(given, {})
    if isinstance(given, int):
        return CompilationOptions(_at_level(CompileConfig(), given, "compilation_config"), {})
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(
            f"compilation_config={given!r}; it must be a CompileConfig, a dictionary of its fields, or a level, 0 to 3."
        )
    options = dict(given or {})
    graphs = {name: options.pop(name) for name in _GRAPH_OPTIONS if name in options}
    levels = {name: options.pop(name) for name in _LEVELS if name in options}
    config = CompileConfig.from_options(options)
    for name, level in levels.items():
        if level is not None:
            config = _at_level(config, level, f"compilation_config[{name!r}]")
    return CompilationOptions(config, graphs)


def compile_config(
    compiler: str | None,
    enforce_eager: bool,
    compile_workers: int | None,
    config: CompileConfig,
) -> CompileConfig:
    """Return the compile config for `LLM`'s arguments; `compiler` and `compile_workers` override `config`.

    Raises `ConfigError` if `enforce_eager` and `compiler` contradict each other.
    """
    check_boolean("enforce_eager", enforce_eager)
    if enforce_eager:
        if compiler == "inductor":
            raise ConfigError("enforce_eager=True and compiler='inductor' contradict each other; give one of them.")
        compiler = "eager"
    if compiler is not None:
        config = replace(config, compiler=compiler)
    return config if compile_workers is None else replace(config, compile_workers=compile_workers)


def _at_level(config: CompileConfig, level: Any, name: str) -> CompileConfig:
    """Return `config`, which compiles nothing at level 0; `level` may be an `IntEnum`. Raises `ConfigError`."""
    if isinstance(level, bool) or not isinstance(level, int) or not 0 <= level <= 3:
        raise ConfigError(f"{name}={level!r}; a level is 0 (nothing is compiled) to 3.")
    return replace(config, compiler="eager") if level == 0 else config
