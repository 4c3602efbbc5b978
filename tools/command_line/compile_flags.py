"""The `compilation_config` of an `LLM`, made from the flags that are fields of `CompileConfig`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from piecegraph.tools.command_line.options import COMPILE_FLAGS, given

if TYPE_CHECKING:
    from piecegraph.runner.common.engine_config import EngineConfig


def with_compile_flags(
    arguments: Mapping[str, Any], values: dict[str, Any], *, assume_gpu: bool = False
) -> dict[str, Any]:
    """Return `LLM`'s arguments with a `compilation_config` of the flags in `values` that were set, if any was.

    Passes that are dropped (`-name`) are dropped from those that pay on the device that `arguments` choose; with
    `assume_gpu`, on a GPU. Imports torch only then. Raises `ConfigError` for a device that is not there.
    """
    options = given(COMPILE_FLAGS, values)
    if not options:
        return dict(arguments)
    if any(word.startswith("-") for word in options.get("passes", ())):
        options["passes"] = passes_without(
            [word.removeprefix("-") for word in options["passes"]],
            "cuda" if assume_gpu else _device_type(arguments.get("device")),
            arguments.get("tensor_parallel_size", 1),
        )
    return {**arguments, "compilation_config": options}


def passes_without(dropped: Sequence[str], device_type: str, num_ranks: int = 1) -> tuple[str, ...]:
    """Return the names of the passes that pay on a device, except the dropped ones; see `default_passes`."""
    from piecegraph.passes.pipeline import default_passes

    return tuple(each.name for each in default_passes(device_type, num_ranks) if each.name not in dropped)


def _device_type(device: Any) -> str:
    from piecegraph.runner.models.config.device import resolve_device

    return resolve_device(device).type


def engine_config(model: str, arguments: dict[str, Any]) -> EngineConfig:
    """Return the config that `LLM(model, **arguments)` would make."""
    from piecegraph.runner.common.engine_config import EngineConfig
    from piecegraph.runner.common.model_source import ModelSource
    from piecegraph.runner.common.speculative_config import SpeculativeConfig
    from piecegraph.runner.startup.compilation_options import compilation_options, compile_config

    fields = dict(arguments)
    source = ModelSource(model=os.path.expanduser(model), load_format=fields.pop("load_format", "auto"))
    is_eager = fields.pop("enforce_eager", False)
    if is_eager:
        fields["cudagraph_mode"] = "NONE"
    if "speculative_config" in fields:
        fields["speculative"] = SpeculativeConfig.parse(fields.pop("speculative_config"))
    compilation = compilation_options(fields.pop("compilation_config", None))
    fields |= compilation.graphs
    compile = compile_config(fields.pop("compiler", None), is_eager, None, compilation.compile)
    return EngineConfig(source=source, compile=compile, **fields)
