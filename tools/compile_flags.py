"""What the flags that are fields of `CompileConfig` come to: the `compilation_config` of an `LLM`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from piecegraph.tools.options import COMPILE_FLAGS, given


def with_compile_flags(
    arguments: Mapping[str, Any], values: dict[str, Any], *, assume_gpu: bool = False
) -> dict[str, Any]:
    """`LLM`'s arguments, with a `compilation_config` of the flags among `values` that were set, if any was.

    Passes that are dropped (`-name`) are dropped from those that pay on the device `arguments` mean; with
    `assume_gpu` on a GPU. Imports torch only then. Raises `ConfigError` on a device there is none of.
    """
    options = given(COMPILE_FLAGS, values)
    if not options:
        return dict(arguments)
    if any(word.startswith("-") for word in options.get("passes", ())):
        options["passes"] = passes_without(
            [word.removeprefix("-") for word in options["passes"]],
            "cuda" if assume_gpu else _device_type(arguments.get("device")),
        )
    return {**arguments, "compilation_config": options}


def passes_without(dropped: Sequence[str], device_type: str) -> tuple[str, ...]:
    """The names of the passes that pay on a device, but those dropped."""
    from piecegraph.passes.pipeline import default_passes

    return tuple(each.name for each in default_passes(device_type) if each.name not in dropped)


def _device_type(device: Any) -> str:
    from piecegraph.runner.model_loader import resolve_device

    return resolve_device(device).type
