"""The result of a start: a running engine, and everything else that an `LLM` holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from piecegraph.compiler.compiled_model import CompiledModel
from piecegraph.paths import traffic_folder
from piecegraph.runner.attention.select import BackendChoice
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.cudagraphs.graph_plan import GraphPlan
from piecegraph.runner.device_memory.growing_memory import GrowingMemory
from piecegraph.runner.device_memory.mapped_weights import MappedWeights
from piecegraph.runner.engine.engine import Engine
from piecegraph.runner.engine.model_runner import ModelRunner
from piecegraph.runner.late_start.fast_start import FastStart
from piecegraph.runner.models.load import LoadedModel
from piecegraph.runner.startup.drafts.draft import (
    CompiledDraft,
)
from piecegraph.runner.traffic.kept import Kept, add_to_kept

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from piecegraph.runner.inspect.selfcheck import SelfcheckReport


class Mapped(NamedTuple):
    """The memory of an engine on a GPU that sleeps: it is unmapped, and mapped again at the same addresses."""

    weights: MappedWeights
    cache: GrowingMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A running engine and everything else that an `LLM` holds."""

    source: ModelSource
    kept: Kept  # what was known of the model's traffic when the start ended: its measured times
    model: LoadedModel
    seed: int  # for random weights
    hf_config: PretrainedConfig
    engine: Engine
    runner: ModelRunner
    compiled: CompiledModel
    draft: CompiledDraft | None  # the model that drafts, if there is one
    tokenizer: PreTrainedTokenizerBase | None
    max_model_len: int
    sampling_defaults: Mapping[str, Any]  # the fields of SamplingParams that the generation config sets
    attention: BackendChoice
    plan: GraphPlan
    notes: tuple[str, ...]
    selfcheck: SelfcheckReport | None  # None: not requested
    start: FastStart | None  # what remains of the start; None: nothing does
    mapped: Mapped | None  # memory that a sleep unmaps; None: torch has allocated it
    incoming: dict[str, torch.Tensor] = field(default_factory=dict)  # weights that were read and not written yet

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's weights."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """The device that steps run on."""
        return self.model.device

    @property
    def max_num_seqs(self) -> int:
        """The largest number of requests that run at once."""
        return self.runner.step.buffers.max_num_reqs

    def keep_traffic(self) -> None:
        """Add the shapes of all steps to those in the cache directory, with the times that were measured.

        To be called once, when the engine ends. Nothing is written if there were no steps.
        """
        counters, times = self.runner.counters, self.runner.graphs.times
        decode, mixed = (counters.shapes(is_decode=is_decode) for is_decode in (True, False))
        if decode or mixed or times != self.kept.times:
            add_to_kept(traffic_folder(), replace(self.kept, decode=decode, mixed=mixed, times=times))
