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
    from piecegraph.compiler.graphs.replay.prepared_ops import register_prepare
    from piecegraph.config import CompileConfig
    from piecegraph.runner.common.logits_processor import (
        AdapterLogitsProcessor,
        BatchUpdate,
        LogitsProcessor,
        MoveDirectionality,
    )
    from piecegraph.runner.common.logprobs import FlatLogprobs, Logprob
    from piecegraph.runner.common.outputs import CompletionOutput, RequestOutput
    from piecegraph.runner.common.sampling_params import RequestOutputKind, SamplingParams
    from piecegraph.runner.llm import LLM
    from piecegraph.runner.lora.request import LoRARequest
    from piecegraph.runner.output.beam_search import BeamSearchParams
    from piecegraph.runner.pooling.outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from piecegraph.runner.pooling.params import PoolingParams
    from piecegraph.runner.prompts.tokenize import EmbedsPrompt, TextPrompt, TokensPrompt
    from piecegraph.runner.structured_output.params import StructuredOutputsParams

__version__ = "0.1.0"

_HOME = {
    "BeamSearchParams": "piecegraph.runner.output.beam_search",
    "EmbedsPrompt": "piecegraph.runner.prompts.tokenize",
    "TextPrompt": "piecegraph.runner.prompts.tokenize",
    "TokensPrompt": "piecegraph.runner.prompts.tokenize",
    "capture": "piecegraph.compiler.graphs.capture",
    "Graphs": "piecegraph.compiler.graphs.graphs",
    "CUDAGraphMode": "piecegraph.compiler.graphs.cudagraph_mode",
    "BatchDescriptor": "piecegraph.compiler.graphs.batch_descriptor",
    "ClassificationRequestOutput": "piecegraph.runner.pooling.outputs",
    "EmbeddingRequestOutput": "piecegraph.runner.pooling.outputs",
    "PoolingParams": "piecegraph.runner.pooling.params",
    "PoolingRequestOutput": "piecegraph.runner.pooling.outputs",
    "ScoringRequestOutput": "piecegraph.runner.pooling.outputs",
    "CompileConfig": "piecegraph.config",
    "CompiledModel": "piecegraph.compiler.compiled_model",
    "CompletionOutput": "piecegraph.runner.common.outputs",
    "AdapterLogitsProcessor": "piecegraph.runner.common.logits_processor",
    "BatchUpdate": "piecegraph.runner.common.logits_processor",
    "LogitsProcessor": "piecegraph.runner.common.logits_processor",
    "MoveDirectionality": "piecegraph.runner.common.logits_processor",
    "FlatLogprobs": "piecegraph.runner.common.logprobs",
    "Logprob": "piecegraph.runner.common.logprobs",
    "RequestOutputKind": "piecegraph.runner.common.sampling_params",
    "LLM": "piecegraph.runner.llm",
    "LoRARequest": "piecegraph.runner.lora.request",
    "RequestOutput": "piecegraph.runner.common.outputs",
    "SamplingParams": "piecegraph.runner.common.sampling_params",
    "StructuredOutputsParams": "piecegraph.runner.structured_output.params",
    "compile": "piecegraph.compiler.api",
    "compiled_models": "piecegraph.compiler.api",
    "register_prepare": "piecegraph.compiler.graphs.replay.prepared_ops",
}

__all__ = [
    "LLM",
    "AdapterLogitsProcessor",
    "BatchDescriptor",
    "BatchUpdate",
    "BeamSearchParams",
    "CUDAGraphMode",
    "ClassificationRequestOutput",
    "CompileConfig",
    "CompiledModel",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EmbedsPrompt",
    "FlatLogprobs",
    "Graphs",
    "LoRARequest",
    "LogitsProcessor",
    "Logprob",
    "MoveDirectionality",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
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
