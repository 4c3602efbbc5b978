"""The part of an `LLM` that generating and pooling ones share: what it holds once loaded, as properties."""

from __future__ import annotations

from typing import TYPE_CHECKING

from piecegraph.errors import UsageError
from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.data_parallel.engine_processes import EngineProcesses
from piecegraph.runner.data_parallel.loaded_elsewhere import LoadedElsewhere
from piecegraph.runner.distributed.protocol import Executor
from piecegraph.runner.engine.metrics import Metric, pooling_metrics
from piecegraph.runner.engine.vllm_engine import LLMEngine, ModelConfig
from piecegraph.runner.models.generation_defaults import GenerationDefaults, default_sampling_params

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from piecegraph.compiler.common.report import CompileReport
    from piecegraph.compiler.compiled_model import CompiledModel
    from piecegraph.runner.engine.engine import Engine
    from piecegraph.runner.engine.model_runner import ModelRunner
    from piecegraph.runner.inspect.selfcheck import SelfcheckReport
    from piecegraph.runner.pooling.load import LoadedPooler
    from piecegraph.runner.startup.loaded import Loaded


class LoadedLLM:
    """The loaded model, its engine and tokenizer, and their properties.

    One of `_loaded` and `_loaded_pooler` is None; both are once the `LLM` is closed.
    """

    _loaded: Loaded | LoadedElsewhere | None  # what generates; None: this LLM pools, or is closed
    _loaded_pooler: LoadedPooler | None  # what pools; None: this LLM generates, or is closed
    _executor: Executor | EngineProcesses
    _generation: GenerationDefaults
    _model: str
    _seed: int

    @property
    def compiled(self) -> CompiledModel:
        """The compiled model; see its `report()`, `source` and `guards`.

        Raises `UsageError` with `data_parallel_size`: the engines are in other processes then.
        """
        return self._model_in_use.compiled

    @property
    def report(self) -> CompileReport:
        """Pieces, unique pieces and seconds per phase; with `data_parallel_size` those of the first engine."""
        loaded = self._model_in_use
        return loaded.report if isinstance(loaded, LoadedElsewhere) else loaded.compiled.report()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer, or None with `skip_tokenizer_init`."""
        return self._model_in_use.tokenizer

    @property
    def max_model_len(self) -> int:
        """The largest number of tokens of a prompt and its output together."""
        return self._model_in_use.max_model_len

    @property
    def max_num_seqs(self) -> int:
        """The largest number of requests that run at once; with `data_parallel_size`, on all engines together."""
        return self._generator.max_num_seqs

    @property
    def device(self) -> torch.device:
        """The device that this process runs steps on; the CPU if its engines are in other processes."""
        return self._generator.device

    @property
    def engine(self) -> Engine:
        """The engine, for a program that runs its own loop over `add_request`, `step` and `abort`."""
        return self._generator.engine

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine as an object with the interface of vLLM's `LLMEngine`."""
        return LLMEngine(
            engine=self.engine,
            tokenizer=self.tokenizer,
            model_config=self.model_config,
            default_sampling_params=self.get_default_sampling_params,
        )

    @property
    def model_config(self) -> ModelConfig:
        """The configuration of the model that runs, under vLLM's names."""
        return ModelConfig(
            model=self._model,
            hf_config=self.hf_config,
            dtype=self._generator.dtype,
            max_model_len=self.max_model_len,
            vocab_size=self.engine.vocab_size,
            seed=self._seed,
        )

    @property
    def model_name(self) -> str:
        """The folder, file or hub id that the model was loaded from."""
        return str(self._model)

    @property
    def pooling_task(self) -> str | None:
        """The task that a model was loaded to pool for, "embed" or "classify"; None if it generates.

        Raises `UsageError` if the `LLM` is closed.
        """
        loaded = self._model_in_use
        return loaded.task.value if loaded is self._loaded_pooler else None

    @property
    def pooler(self) -> LoadedPooler:
        """The pooling engine and what prepares texts for it, for a program that runs its own loop over them.

        `engine` has `add_request`, `step` and `abort`. Raises `UsageError` unless the `LLM` was made for pooling.
        """
        return self._pooler

    @property
    def hf_config(self) -> PretrainedConfig:
        """The model's configuration, as transformers has read it from the model's config file."""
        return self._model_in_use.hf_config

    @property
    def runner(self) -> ModelRunner:
        """The model runner; see its `graphs`, `dispatcher` and `counters`."""
        return self._generator.runner

    @property
    def notes(self) -> tuple[str, ...]:
        """Decisions made while loading that a caller may want to know, one sentence for each.

        With `start="fast"`, also what failed since.
        """
        start = None if self._loaded is None else self._loaded.start
        return (*self._model_in_use.notes, *(() if start is None else start.notes))

    @property
    def selfcheck(self) -> SelfcheckReport | None:
        """The result of the check at start that `compilation_config={"selfcheck": True}` asks for, else None."""
        return self._generator.selfcheck

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer. Raises `UsageError` if there is none."""
        return self.llm_engine.get_tokenizer()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Discard all cached prefixes and return True; see `LLMEngine.reset_prefix_cache`."""
        return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def get_metrics(self) -> list[Metric]:
        """Return counters since the start and current gauges, under vLLM's names."""
        pooler = self._loaded_pooler
        if pooler is not None:
            return pooling_metrics(pooler.engine.stats, self.model_name)
        start = self._generator.start
        return [*self.llm_engine.get_metrics(), *([] if start is None else start.metrics(self.model_name))]

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that `sampling_params=None` stands for, as a new object that may be changed.

        The values of the model's generation_config.json replace the defaults. Raises `RequestError` if one of these
        values is out of range.
        """
        return default_sampling_params(self._generation.over(self._generator.sampling_defaults))

    @property
    def _shows_progress(self) -> bool:
        """Whether this process shows how far requests are; of ranks that run the same program, one does."""
        return isinstance(self._executor, EngineProcesses) or self._executor.shows_progress

    @property
    def _model_in_use(self) -> Loaded | LoadedElsewhere | LoadedPooler:
        """Return what was loaded, to generate or to pool. Raises `UsageError` if this LLM is closed."""
        return self._loaded_pooler if self._loaded_pooler is not None else self._generator

    @property
    def _generator(self) -> Loaded | LoadedElsewhere:
        """Return what was loaded to generate. Raises `UsageError` if this LLM pools, or is closed."""
        if self._loaded is None:
            if self._loaded_pooler is not None:
                raise UsageError(
                    "this LLM pools: it turns texts into vectors or classes and generates nothing. Use "
                    f"{self._loaded_pooler.task.value} or score; if the model can generate, make an LLM with "
                    "runner='generate'."
                )
            raise UsageError("this LLM is closed; make a new one.")
        return self._loaded

    @property
    def _pooler(self) -> LoadedPooler:
        """Return what was loaded to pool. Raises `UsageError` if this LLM generates, or is closed."""
        if self._loaded_pooler is None:
            if self._loaded is not None:
                raise UsageError(
                    "this LLM generates: it was loaded with a head that predicts tokens. To embed texts with the same "
                    "model, make an LLM with runner='pooling'."
                )
            raise UsageError("this LLM is closed; make a new one.")
        return self._loaded_pooler
