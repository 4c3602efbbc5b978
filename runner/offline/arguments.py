"""The arguments of `LLM`: unknown ones are refused, the others resolved into an `EngineConfig`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from piecegraph.errors import ConfigError, did_you_mean
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.logits_processor import logits_processor_classes
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.common.speculative_config import SpeculativeConfig
from piecegraph.runner.common.vllm_interface import OLDER_ARGUMENTS, UNAVAILABLE_ARGUMENTS
from piecegraph.runner.startup.compilation_options import compilation_options, compile_config


def resolve_arguments(arguments: Mapping[str, Any]) -> EngineConfig:
    """Return the `EngineConfig` for the arguments of `LLM`, given by name. Raises `ConfigError`.

    An argument with the name of a field is passed on unchanged, unless it is converted below.
    """
    compilation = compilation_options(arguments["compilation_config"])
    graphs, enforce_eager = compilation.graphs, arguments["enforce_eager"]
    capture_sizes = graphs.get("cudagraph_capture_sizes", arguments["cudagraph_capture_sizes"])
    compile_sizes, block_size, backend = (
        arguments[name] for name in ("compile_sizes", "block_size", "attention_backend")
    )
    model = arguments["model"]
    if model is None:
        from piecegraph.runner.models.embedded_model import embedded_model_dir

        model = embedded_model_dir(arguments["on_phase"], keeps_blocks=arguments["quantization"] == "gguf")
    if not isinstance(model, str | Path):
        raise ConfigError(f"model={model!r}; it must be a folder, a .gguf file or a hub id, as a string or a path.")
    source = ModelSource(
        model=os.path.expanduser(model),
        revision=arguments["revision"],
        trust_remote_code=arguments["trust_remote_code"],
        load_format=arguments["load_format"],
        hf_overrides={} if arguments["hf_overrides"] is None else arguments["hf_overrides"],
        keeps_blocks=arguments["quantization"] == "gguf",
    )
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    converted = {
        "source": source,
        "block_size": 16 if block_size is None else block_size,
        "may_raise_block_size": block_size is None,
        "attention_backend": "auto" if backend is None else backend,
        "cudagraph_mode": "NONE" if enforce_eager else graphs.get("cudagraph_mode", arguments["cudagraph_mode"]),
        "cudagraph_capture_sizes": capture_sizes,
        "compile_sizes": None if compile_sizes is None else tuple(compile_sizes),
        "compile": compile_config(
            arguments["compiler"], enforce_eager, arguments["compile_workers"], compilation.compile
        ),
        "logits_processors": logits_processor_classes(arguments["logits_processors"]),
        "speculative": SpeculativeConfig.parse(arguments["speculative_config"]),
    }
    return EngineConfig(**{**{name: arguments[name] for name in arguments if name in fields}, **converted})


def refuse_unknown(arguments: Mapping[str, object], known: tuple[str, ...]) -> None:
    """Raise `ConfigError` for an argument that `LLM` does not have, by name.

    An argument of vLLM's is accepted if its value asks for what happens anyway.
    """
    for name, value in arguments.items():
        unavailable = UNAVAILABLE_ARGUMENTS.get(name) or OLDER_ARGUMENTS.get(name)
        if unavailable is None:
            raise ConfigError(f"LLM has no argument {name!r}.{did_you_mean(name, known)}")
        if not (unavailable.accepts_any or any(_is_same(value, one) for one in unavailable.accepted)):
            raise ConfigError(f"{name}={value!r} is not available here: {unavailable.instead}")


def _is_same(value: object, accepted: object) -> bool:
    """Return whether two values are equal; a value whose comparison is not a single bool is equal to nothing."""
    try:
        return value is accepted or bool(value == accepted)
    except (TypeError, ValueError, RuntimeError):
        return False
