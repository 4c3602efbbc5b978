"""piecegraph: cut a model at attention, compile each unique piece once, replay the pieces.

Importing this package imports neither torch nor anything else of weight, and changes nothing in
the process; each public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from piecegraph.compiler.api import compile, compiled_models
    from piecegraph.compiler.compiled_model import CompiledModel
    from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
    from piecegraph.compiler.graphs.capture import capture
    from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
    from piecegraph.compiler.graphs.graphs import Graphs
    from piecegraph.compiler.graphs.prepared_ops import register_prepare
    from piecegraph.config import CompileConfig
    from piecegraph.runner.llm import LLM
    from piecegraph.runner.outputs import CompletionOutput, RequestOutput
    from piecegraph.runner.sampling_params import SamplingParams

__version__ = "0.1.0"

_HOME = {
    "capture": "piecegraph.compiler.graphs.capture",
    "Graphs": "piecegraph.compiler.graphs.graphs",
    "CUDAGraphMode": "piecegraph.compiler.graphs.cudagraph_mode",
    "BatchDescriptor": "piecegraph.compiler.graphs.batch_descriptor",
    "CompileConfig": "piecegraph.config",
    "CompiledModel": "piecegraph.compiler.compiled_model",
    "CompletionOutput": "piecegraph.runner.outputs",
    "LLM": "piecegraph.runner.llm",
    "RequestOutput": "piecegraph.runner.outputs",
    "SamplingParams": "piecegraph.runner.sampling_params",
    "compile": "piecegraph.compiler.api",
    "compiled_models": "piecegraph.compiler.api",
    "register_prepare": "piecegraph.compiler.graphs.prepared_ops",
}

__all__ = [
    "LLM",
    "BatchDescriptor",
    "CUDAGraphMode",
    "CompileConfig",
    "CompiledModel",
    "CompletionOutput",
    "Graphs",
    "RequestOutput",
    "SamplingParams",
    "capture",
    "compile",
    "compiled_models",
    "register_prepare",
]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'piecegraph' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
