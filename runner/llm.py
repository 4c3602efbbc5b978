"""`LLM`, the offline entry point: a model that generates or pools. Its names follow vLLM's offline API.

Importing this module does not import torch; constructing an `LLM` does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from piecegraph.config import CompileConfig
from piecegraph.errors import ConfigError, UsageError
from piecegraph.progress import OnPhase
from piecegraph.runner.clusters.make_executor import make_executor
from piecegraph.runner.common.logits_processor import LogitsProcessor
from piecegraph.runner.common.logprobs_mode import LogprobsMode
from piecegraph.runner.common.vllm_interface import OLDER_METHODS, UNAVAILABLE_METHODS
from piecegraph.runner.data_parallel.engine_processes import EngineProcesses
from piecegraph.runner.data_parallel.loaded_elsewhere import LoadedElsewhere
from piecegraph.runner.distributed.external_launcher import ExternalLauncherExecutor
from piecegraph.runner.models.generation_defaults import GenerationDefaults
from piecegraph.runner.offline.arguments import refuse_unknown, resolve_arguments
from piecegraph.runner.offline.generating import GeneratingLLM
from piecegraph.runner.offline.load import load
from piecegraph.runner.offline.pooling import PoolingLLM
from piecegraph.runner.prompts.chat import read_chat_template

if TYPE_CHECKING:
    import torch

    from piecegraph.runner.late_start.fast_start import StartProgress
    from piecegraph.runner.sleeping.sleep import Sleep
    from piecegraph.runner.startup.reload_weights import NewWeights


class LLM(GeneratingLLM, PoolingLLM):
    """A language model that is loaded and compiled on construction, and then generates, embeds, classifies or scores.

    `model`: a folder, a .gguf file or a hub id; None is the embedded default, SmolLM2-135M-Instruct. `runner`:
    "generate"; "pooling", for `embed`, `classify`, `score` and `encode`; or "auto", which decides by the model's files.
    `convert`: the kind of result of a pooling model, "embed", "classify", or "auto", which decides by the model's
    files. `enforce_eager` disables both compilation and CUDA graphs. `on_phase` is called with every phase of loading.
    docs/generation.md lists the other arguments. An `LLM` is a context manager; `close` frees the model and its cache.

    Raises `ConfigError` for an argument that is out of range, unknown or not available in this version (by name),
    `ModelError` or a subclass for a model that cannot be read or run, `OutOfMemory` when the model and its KV cache do
    not fit, and `CompileError` or a subclass when compilation fails.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        runner: str = "auto",
        convert: str = "auto",
        tokenizer: str | None = None,
        skip_tokenizer_init: bool = False,
        chat_template: str | Path | None = None,
        enable_prompt_embeds: bool = False,
        generation_config: str = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        dtype: str | torch.dtype = "auto",
        quantization: str | None = None,
        enable_lora: bool = False,
        max_loras: int = 1,
        max_lora_rank: int = 16,
        max_cpu_loras: int | None = None,
        lora_target_modules: Sequence[str] | None = None,
        device: str | torch.device | None = None,
        load_format: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        block_size: int | None = None,
        num_kv_blocks: int | None = None,
        kv_cache_dtype: str = "auto",
        calculate_kv_scales: bool = False,
        kv_cache_memory_bytes: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enable_prefix_caching: bool | None = True,
        cached_states: int | None = None,
        async_scheduling: bool | None = None,
        attention_backend: str | None = "auto",
        compiler: str | None = None,
        cudagraph_mode: str = "FULL_AND_PIECEWISE",
        cudagraph_capture_sizes: Sequence[int] | str | None = None,
        compile_sizes: Sequence[int] | None = None,
        graph_kind: str = "auto",
        measure_graphs: bool = False,
        compilation_config: CompileConfig | Mapping[str, Any] | int | None = None,
        enforce_eager: bool = False,
        start: str = "full",
        enable_sleep_mode: bool = False,
        strict: bool = False,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        enable_expert_parallel: bool = False,
        data_parallel_size: int = 1,
        nnodes: int = 1,
        node_rank: int = 0,
        master_addr: str = "127.0.0.1",
        master_port: int = 29501,
        distributed_executor_backend: str | None = None,
        distributed_timeout_seconds: float | None = None,
        hf_overrides: Mapping[str, Any] | None = None,
        max_logprobs: int = -1,
        logprobs_mode: str = "raw_logprobs",
        logits_processors: Sequence[str | type[LogitsProcessor]] | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        seed: int = 0,
        compile_workers: int | None = None,
        on_phase: OnPhase | None = None,
        **unknown: object,
    ) -> None:
        arguments = dict(locals())  # every parameter by name, because no other local variable exists yet
        refuse_unknown(unknown, _argument_names())
        self._chat_template = read_chat_template(chat_template)
        self._generation = GenerationDefaults(kind=generation_config, override=override_generation_config)
        config = resolve_arguments(arguments)
        self._executor = make_executor(config) if config.data_parallel_size == 1 else EngineProcesses(config)
        try:
            self._loaded, self._loaded_pooler = load(config, on_phase, self._executor)
        except BaseException:
            self._executor.close()
            raise
        self._model, self._seed = config.source.model, config.seed
        self._logprobs_mode, self._num_requests = LogprobsMode.parse(config.logprobs_mode), 0

    @property
    def start_progress(self) -> StartProgress:
        """How far the start is: with `start="fast"`, "compiling n of m", "capturing n of m", at last "full speed"."""
        from piecegraph.runner.late_start.fast_start import FULL_SPEED, StartProgress

        start = None if self._model_in_use is self._loaded_pooler else self._generator.start
        return StartProgress(FULL_SPEED) if start is None else start.progress

    def use_idle_moment(self) -> float | None:
        """Do what a program that runs its own loop should do while no request is unfinished.

        That is a part of what remains of a start with `start="fast"`, and a look at the other ranks and engines: one
        that has ended is noticed here, and otherwise by the next call that needs it.

        Returns the seconds after which to call it again, or None if nothing will be left to do. No step may be running.
        Raises what `finish_start` raises, and `WorkerError`, as all later calls do, if a rank or an engine has ended.
        """
        start = self._generator.start
        waits = (self._executor.check_idle(), None if start is None else start.use_idle_moment())
        return min((each for each in waits if each is not None), default=None)

    def finish_start(self) -> None:
        """With `start="fast"`, wait until everything is compiled and captured; then all runs at full speed.

        No step may be running. Raises `CompileError` and `CaptureError` if `strict` and something failed.
        """
        if self._loaded is not None and self._loaded.start is not None:
            self._loaded.start.finish()

    def reload_weights(self, weights: NewWeights | None = None, *, draft_weights: NewWeights | None = None) -> int:
        """Replace the model's weights in place and return how many tensors were written.

        Nothing is compiled or captured again. `weights`: None reads the model's own files again; a path or hub id
        names another version of the model with the same config; a mapping, or an iterable of pairs, holds tensors
        under the names of the model's `state_dict`, with the model's shapes and any floating-point dtype and device,
        and may cover only some of the names. The contents of the prefix cache are discarded.

        With several ranks or engines, weights are read from files only, and each rank reads its part.

        `draft_weights`: the same for the model that drafts (`speculative_config`). None: the draft's own files are read
        again if `weights` is None too; otherwise it keeps its weights. No output depends on which these are.

        Raises `UsageError` while requests are unfinished or the engine sleeps, and for `draft_weights` without such a
        model, `ConfigError` if the other model's config differs, and `CheckpointError` for names or tensors that do
        not fit. Nothing has been written then, except an iterable's tensors before the faulty one, and weights whose
        keys and values cannot be calibrated (`calculate_kv_scales`), as the message says.
        """
        from piecegraph.runner.startup.reload_weights import reload_on_ranks, reload_weights

        loaded = self._generator
        if not isinstance(loaded, LoadedElsewhere) and self._sleep.is_asleep:
            raise UsageError("the engine sleeps, and the memory of its weights may be gone; call wake_up first.")
        if isinstance(loaded, LoadedElsewhere):
            return reload_on_ranks(loaded.engine, self._call_ranks, weights, draft_weights)
        sleep = self._sleep
        before, sleep.has_other_weights = sleep.has_other_weights, sleep.has_other_weights or weights is not None
        try:
            if loaded.model.is_part:
                num_written = reload_on_ranks(loaded.engine, self._call_ranks, weights, draft_weights)
            else:
                num_written = reload_weights(loaded, weights, draft_weights)
        except (UsageError, ConfigError):  # nothing has been written
            sleep.has_other_weights = before
            raise
        sleep.has_other_weights = weights is not None
        return num_written

    def sleep(self, level: int = 1, mode: str = "abort") -> int:
        """Give memory back while there is nothing to do, and return how many bytes; requests are refused meanwhile.

        `level` 1 drops the KV cache and, on a GPU, moves the weights to host memory; 2
        drops both. Nothing is compiled or captured again after `wake_up`, because addresses stay. A GPU's LLM must have
        been made with `enable_sleep_mode=True`. `mode` has no effect: unfinished requests are never aborted.

        Any thread may call it, also beside one that steps the engine. Raises `UsageError`, with nothing changed, while
        requests are unfinished, before the end of a start with `start="fast"`, and for what cannot be restored.
        """
        if isinstance(self._executor, ExternalLauncherExecutor):
            raise UsageError("sleep is not yet available with distributed_executor_backend='external_launcher'.")
        return self._sleep.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Restore the memory that `sleep` gave back; outputs are as before. Dropped weights are read from files.

        Idempotent. If reading fails, or a GPU has too little memory (`OutOfMemory`), that is raised, and the engine
        sleeps on. Raises `UsageError` for `tags`, because everything wakes up together.
        """
        if tags is not None:
            raise UsageError(f"tags={tags!r}; everything wakes up together, so leave them out.")
        self._sleep.wake_up()

    @property
    def is_sleeping(self) -> bool:
        """Whether `sleep` was called, and `wake_up` was not. Any thread may ask."""
        return "_sleep" in self.__dict__ and self._sleep.is_asleep

    @cached_property
    def _sleep(self) -> Sleep:
        from piecegraph.runner.sleeping.sleep import Sleep

        loaded = self._generator
        if isinstance(loaded, LoadedElsewhere):
            raise UsageError("sleep is not yet available with data_parallel_size.")
        return Sleep(loaded, self._call_ranks)

    def _call_ranks(self, method: str, args: Sequence[Any]) -> list[Any]:
        return self.collective_rpc(method, args=args)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method on every rank, and return the results by rank.

        `method`: the name of a method of `runner.distributed.worker.Worker`, or a function whose first argument is one,
        which must be importable in another process. `timeout`: seconds that other ranks may take.

        Raises `UsageError` if the call cannot be sent, and `WorkerError` if a rank raises, which ends the ranks.
        """
        loaded = self._generator
        if isinstance(loaded, LoadedElsewhere):
            return loaded.engine.collective_rpc(method, timeout, args, kwargs or {})
        assert not isinstance(self._executor, EngineProcesses), "its engines are elsewhere"
        return self._executor.collective_rpc(loaded, method, timeout, args, kwargs or {})

    def close(self) -> None:
        """Free the model and its cache. Idempotent; any other call afterwards raises `UsageError`."""
        if self._loaded is not None:
            if self._loaded.start is not None:
                self._loaded.start.close()
            if not isinstance(self._loaded, LoadedElsewhere):
                self._loaded.keep_traffic()
            self._loaded.engine.close()
        for loaded in (self._loaded, self._loaded_pooler):
            if loaded is not None and not isinstance(loaded, LoadedElsewhere):
                loaded.runner.close()  # graphs first: they read the model's memory
                loaded.compiled.close()
        self._executor.close()
        self._loaded = self._loaded_pooler = None
        self.__dict__.pop("_sleep", None)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    if not TYPE_CHECKING:  # else a type checker would accept any name as an attribute

        def __getattr__(self, name: str) -> object:
            instead = UNAVAILABLE_METHODS.get(name) or OLDER_METHODS.get(name)
            if instead is not None:
                raise AttributeError(f"LLM has no {name}, unlike vLLM's LLM: {instead}.")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _argument_names() -> tuple[str, ...]:
    """Return the names of the arguments of `LLM`."""
    parameters = inspect.signature(LLM.__init__).parameters
    return tuple(name for name in parameters if name not in ("self", "unknown"))
