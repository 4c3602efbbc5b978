"""`LLM`, the offline entry point: a model that generates text or pools it. Its names follow vLLM's offline API.

Importing this module does not import torch; constructing an `LLM` does.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from piecegraph.compiler.workers.prestart import started_early
from piecegraph.config import CompileConfig
from piecegraph.errors import ConfigError, RequestError, UsageError, translate_out_of_memory
from piecegraph.paused_gc import paused_gc
from piecegraph.progress import OnPhase, Phase, timed_phase
from piecegraph.runner.clusters.make_executor import make_executor
from piecegraph.runner.common.engine_config import EngineConfig, compile_config, refuse_unknown
from piecegraph.runner.common.logits_processor import LogitsProcessor, logits_processor_classes
from piecegraph.runner.common.logprobs_mode import LogprobsMode
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.common.outputs import RequestOutput
from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.common.speculative_config import SpeculativeConfig
from piecegraph.runner.common.vllm_interface import OLDER_METHODS, UNAVAILABLE_METHODS
from piecegraph.runner.data_parallel.engine_processes import EngineProcesses
from piecegraph.runner.data_parallel.loaded_elsewhere import LoadedElsewhere, load_elsewhere
from piecegraph.runner.distributed.protocol import Executor
from piecegraph.runner.engine.metrics import Metric, pooling_metrics
from piecegraph.runner.engine.progress_bar import progress_bar
from piecegraph.runner.engine.vllm_engine import LLMEngine, ModelConfig
from piecegraph.runner.lora.request import LoRARequest, per_prompt_loras
from piecegraph.runner.models.generation_defaults import GenerationDefaults, default_sampling_params
from piecegraph.runner.output.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from piecegraph.runner.output.outbox import Outbox
from piecegraph.runner.pooling.params import PoolingParams
from piecegraph.runner.prompts.chat import (
    ChatOptions,
    Message,
    conversation_sequence,
    read_chat_template,
    tokenize_chat,
)
from piecegraph.runner.prompts.request_options import per_request_priority, refuse_lora, refuse_unknown_options
from piecegraph.runner.prompts.tokenize import Prompts, TokenizedPrompt, prompt_sequence, tokenize
from piecegraph.runner.startup.compilation_options import compilation_options
from piecegraph.weight_files import prefetch

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from piecegraph.compiler.common.report import CompileReport
    from piecegraph.compiler.compiled_model import CompiledModel
    from piecegraph.runner.engine.engine import Engine
    from piecegraph.runner.engine.model_runner import ModelRunner
    from piecegraph.runner.inspect.selfcheck import SelfcheckReport
    from piecegraph.runner.late_start.fast_start import StartProgress
    from piecegraph.runner.pooling.engine import PooledOutput
    from piecegraph.runner.pooling.load import LoadedPooler
    from piecegraph.runner.pooling.outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        ScoringRequestOutput,
    )
    from piecegraph.runner.sleeping.sleep import Sleep
    from piecegraph.runner.startup.load_engine import Loaded
    from piecegraph.runner.startup.reload_weights import NewWeights


class LLM:
    """A language model that is loaded and compiled on construction, and then generates text or pools it.

    `model`: a folder, a .gguf file or a hub id; None is the embedded default, SmolLM2-135M-Instruct. `runner`:
    "generate"; "pooling", for `embed`, `classify`, `score` and `encode`; or "auto", which decides by the model's files.
    `convert`: the kind of result of a pooling model, "embed", "classify", or "auto", which decides by the model's
    files. `enforce_eager` disables both compilation and CUDA graphs. `on_phase` is called with every phase of loading.
    docs/generation.md lists the other arguments. An `LLM` is a context manager; `close` frees the model and its cache.

    Raises `ConfigError` for an argument that is out of range, unknown or not available in this version (by name),
    `ModelError` or a subclass for a model that cannot be read or run, `OutOfMemory` when the model and its KV cache do
    not fit, and `CompileError` or a subclass when compilation fails.
    """

    _loaded: Loaded | LoadedElsewhere | None  # what generates; None: this LLM pools, or is closed
    _loaded_pooler: LoadedPooler | None  # what pools; None: this LLM generates, or is closed

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
        config = _engine_config(arguments)
        self._executor: Executor | EngineProcesses
        self._executor = make_executor(config) if config.data_parallel_size == 1 else EngineProcesses(config)
        try:
            self._loaded, self._loaded_pooler = _load(config, on_phase, self._executor)
        except BaseException:
            self._executor.close()
            raise
        self._model, self._seed = config.source.model, config.seed
        self._logprobs_mode, self._num_requests = LogprobsMode.parse(config.logprobs_mode), 0

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
    def chat_template(self) -> str | None:
        """The text of the chat template that was given to the `LLM`; None: the tokenizer's own is used."""
        return self._chat_template

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
    def start_progress(self) -> StartProgress:
        """How far the start is: with `start="fast"`, "compiling n of m", "capturing n of m", at last "full speed"."""
        from piecegraph.runner.late_start.fast_start import FULL_SPEED, StartProgress

        start = None if self._model_in_use is self._loaded_pooler else self._generator.start
        return StartProgress(FULL_SPEED) if start is None else start.progress

    def use_idle_moment(self) -> float | None:
        """Do a part of what remains of a start with `start="fast"`, for a program that runs its own loop.

        Returns the seconds after which there may be more to do, or None if nothing remains. No step may be running.
        Raises what `finish_start` raises.
        """
        start = self._generator.start
        return None if start is None else start.use_idle_moment()

    def finish_start(self) -> None:
        """With `start="fast"`, wait until everything is compiled and captured; then all runs at full speed.

        No step may be running. Raises `CompileError` and `CaptureError` if `strict` and something failed.
        """
        if self._loaded is not None and self._loaded.start is not None:
            self._loaded.start.finish()

    @property
    def selfcheck(self) -> SelfcheckReport | None:
        """The result of the check at start that `compilation_config={"selfcheck": True}` asks for, else None."""
        return self._generator.selfcheck

    def generate(
        self,
        prompts: Prompts = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **unknown: object,
    ) -> list[RequestOutput]:
        """Return one finished output for each prompt, in the order of the prompts.

        `prompts`: one prompt or several, each a string, token ids or a dictionary (docs/generation.md).
        `sampling_params`, `lora_request` and `priority` (lower values are scheduled first): one for all prompts, or one
        for each; an adapter is read from its folder unless it is loaded;
        without `sampling_params`, those of `get_default_sampling_params`. `use_tqdm`: True shows a progress bar on a
        terminal, False shows none, and a callable, called like `tqdm.tqdm`, makes one. `tokenization_kwargs` are passed
        to the tokenizer.

        Raises `RequestError`, before any prompt runs, if one of the prompts or parameters is refused, and
        `CheckpointError`, `UnsupportedModel` or `ConfigError` for an adapter that cannot be applied.
        """
        refuse_unknown_options("generate", unknown, mm_processor_kwargs=mm_processor_kwargs)
        tokenized = self._tokenize(prompts, tokenization_kwargs)
        return self._generate(tokenized, sampling_params, use_tqdm, priority, lora_request)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **unknown: object,
    ) -> list[RequestOutput]:
        """Return what `generate` returns, for one conversation or several rendered with a chat template.

        The template is the argument `chat_template`, else that given to the `LLM`, else the model's own. `ChatOptions`
        documents the other options.
        """
        refuse_unknown_options("chat", unknown, mm_processor_kwargs=mm_processor_kwargs)
        options = ChatOptions(
            chat_template=chat_template if chat_template is not None else self._chat_template,
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs={} if chat_template_kwargs is None else chat_template_kwargs,
            tokenization_kwargs=tokenization_kwargs,
        )
        conversations = conversation_sequence(messages)
        prompts = [tokenize_chat(conversation, self.tokenizer, options) for conversation in conversations]
        return self._generate(prompts, sampling_params, use_tqdm, priority, lora_request)

    def stream(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield outputs as tokens arrive. Each has all text of its prompt so far, unless `output_kind` says otherwise.

        The `request_id`s ascend in the order of the prompts. Ending the iteration early aborts the prompts that are
        unfinished.
        """
        return self._run(self._requests(self._tokenize(prompts), sampling_params, priority, lora_request))

    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the likeliest continuations of each prompt, in the order of the prompts.

        `concurrency_limit`: how many prompts are searched at a time; None: all. `use_tqdm` is accepted as in vLLM, but
        no progress bar is shown. `lora_request`: one adapter for all prompts. Raises `RequestError` if the `LLM`
        has a `logprobs_mode` other than the default.
        """
        if isinstance(lora_request, Sequence):
            raise RequestError(
                "beam search takes one lora_request for all prompts; search in one call for each adapter."
            )
        if self._logprobs_mode is not LogprobsMode.RAW_LOGPROBS:
            raise RequestError(
                "beam search adds up the model's own log probabilities, and "
                f"logprobs_mode={self._logprobs_mode.value!r} returns other values; make an LLM without it."
            )
        tokenized = self._tokenize(prompts)
        tokenizer = self.tokenizer

        def decode(tokens: Sequence[int]) -> str:
            assert tokenizer is not None
            return str(tokenizer.decode(list(tokens), skip_special_tokens=params.skip_special_tokens))

        return beam_search(
            tokenized,
            params,
            lambda beams, one_token, priorities: self._generate(beams, one_token, False, priorities, lora_request),
            priorities=per_request_priority(priority, len(tokenized)),
            eos_token_ids=self.engine.eos_token_ids,
            max_model_len=self.max_model_len,
            decode=None if tokenizer is None else decode,
            concurrency_limit=concurrency_limit,
        )

    def embed(
        self,
        prompts: Prompts,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: object = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return an output for each prompt, in their order, with its embedding as `outputs.embedding`.

        Raises `UsageError` unless the `LLM` was made for pooling, and `RequestError`, before any prompt runs, if one of
        the prompts or parameters is refused.
        """
        from piecegraph.runner.pooling.requests import embed

        refuse_lora(lora_request)
        return embed(self._pooler, prompts, pooling_params, use_tqdm, tokenization_kwargs)

    def classify(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: object = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Return an output for each prompt, in their order, with the probabilities of its classes as `outputs.probs`.

        The `LLM` must have been made for pooling, with a model for sequence classification. Raises the same errors as
        `embed`.
        """
        from piecegraph.runner.pooling.requests import classify

        refuse_lora(lora_request)
        return classify(self._pooler, prompts, pooling_params, use_tqdm, tokenization_kwargs)

    def encode(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: object = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PooledOutput]:
        """Return the results of `embed` or `classify` as tensors, `outputs.data`.

        `pooling_task`: "embed" or "classify"; any other task than the one that the model was loaded for is refused.
        None: that task. "token_embed", of a model that embeds: an embedding of each token, `[num_tokens, size]`.
        """
        from piecegraph.runner.pooling.requests import checked_task, encode

        refuse_lora(lora_request)
        of_tokens = checked_task(self._pooler, pooling_task)
        return encode(self._pooler, prompts, pooling_params, use_tqdm, tokenization_kwargs, of_tokens=of_tokens)

    def score(
        self,
        data_1: Prompts,
        data_2: Prompts,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None,
        lora_request: object = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well each text of `data_1` matches that of `data_2`, `outputs.score`.

        A single text in `data_1` is compared with every text of `data_2`. A classifier with one label (a cross-encoder)
        reads both texts together; with any other model, the score is the cosine similarity of the two embeddings.
        Raises the same errors as `embed`.
        """
        from piecegraph.runner.pooling.requests import score

        refuse_lora(lora_request)
        if chat_template is not None:
            raise RequestError("score takes no chat_template: pairs are joined by the tokenizer. Leave it out.")
        return score(self._pooler, data_1, data_2, pooling_params, use_tqdm, tokenization_kwargs)

    def reload_weights(self, weights: NewWeights | None = None, *, draft_weights: NewWeights | None = None) -> int:
        """Replace the model's weights in place and return how many tensors were written.

        Nothing is compiled or captured again. `weights`: None reads the model's own files again; a path or hub id
        names another version of the model with the same config; a mapping, or an iterable of pairs, holds tensors
        under the names of the model's `state_dict`, with the model's shapes and any floating-point dtype and device,
        and may cover only some of the names. The contents of the prefix cache are discarded.

        `draft_weights`: the same for the model that drafts (`speculative_config`). None: the draft's own files are read
        again if the model's are, and else it keeps its weights; which these are changes no answer.

        Raises `UsageError` while requests are unfinished or the engine sleeps, and for `draft_weights` without such a
        model, `ConfigError` if the other model's config differs, and `CheckpointError` for names or tensors that do
        not fit. Nothing has been written then; only with an iterable, the tensors before the faulty one have been.
        """
        from piecegraph.runner.startup.reload_weights import reload_weights

        loaded = self._generator
        if isinstance(loaded, LoadedElsewhere):
            raise UsageError("reload_weights is not yet available with data_parallel_size; make a new LLM.")
        sleep = self._sleep
        if sleep.is_asleep:
            raise UsageError("the engine sleeps, and the memory of its weights may be gone; call wake_up first.")
        sleep.has_other_weights = sleep.has_other_weights or weights is not None
        num_written = reload_weights(loaded, weights, draft_weights)
        sleep.has_other_weights = weights is not None
        return num_written

    def sleep(self, level: int = 1, mode: str = "abort") -> int:
        """Give memory back while there is nothing to do, and return how many bytes; requests are refused meanwhile.

        `level` 1 drops the KV cache, and on a GPU moves the weights to host memory, where a CPU has them already; 2
        drops both. Nothing is compiled or captured again after `wake_up`, because addresses stay. A GPU's LLM must have
        been made with `enable_sleep_mode=True`. `mode` has no effect: unfinished requests are never aborted.

        Raises `UsageError`, with nothing changed, while requests are unfinished, before the end of a start with
        `start="fast"`, and for what cannot be restored.
        """
        return self._sleep.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Restore what `sleep` has given back; answers are those from before. Dropped weights are read from files.

        Idempotent. If reading fails, or a GPU has too little memory (`OutOfMemory`), that is raised, and the engine
        sleeps on. Raises `UsageError` for `tags`, because everything wakes up together.
        """
        if tags is not None:
            raise UsageError(f"tags={tags!r}; everything wakes up together, so leave them out.")
        self._sleep.wake_up()

    @property
    def is_sleeping(self) -> bool:
        """Whether `sleep` was called, and `wake_up` was not."""
        return self._sleep.is_asleep

    @cached_property
    def _sleep(self) -> Sleep:
        from piecegraph.runner.sleeping.sleep import Sleep

        loaded = self._generator
        if isinstance(loaded, LoadedElsewhere):
            raise UsageError("sleep is not yet available with data_parallel_size.")
        return Sleep(loaded)

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

    if not TYPE_CHECKING:  # else a type checker would accept any name as an attribute

        def __getattr__(self, name: str) -> object:
            instead = UNAVAILABLE_METHODS.get(name) or OLDER_METHODS.get(name)
            if instead is not None:
                raise AttributeError(f"LLM has no {name}, unlike vLLM's LLM: {instead}.")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _tokenize(
        self, prompts: Prompts, tokenization_kwargs: Mapping[str, Any] | None = None
    ) -> list[TokenizedPrompt]:
        return [tokenize(prompt, self.tokenizer, tokenization_kwargs) for prompt in prompt_sequence(prompts)]

    def _generate(
        self,
        prompts: Sequence[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Any],
        priority: int | Sequence[int] | None,
        lora_request: object = None,
    ) -> list[RequestOutput]:
        requests = self._requests(prompts, sampling_params, priority, lora_request)
        finished: dict[str, RequestOutput] = {}
        with progress_bar(len(requests), self.engine, shown=use_tqdm if self._shows_progress else False) as advance:
            for output in self._run(requests, is_final_only=True, on_step=advance):
                finished[output.request_id] = output
        return [finished[request_id] for request_id in requests]

    def _requests(
        self,
        prompts: Sequence[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        lora_request: object,
    ) -> dict[str, _Queued]:
        """Return what is queued by new request id, in order. All are checked, and none is queued."""
        params = sampling_params if sampling_params is not None else self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            per_prompt = [params] * len(prompts)
        elif isinstance(params, Sequence) and not isinstance(params, str | bytes):
            per_prompt = list(params)
        else:
            raise RequestError(f"sampling_params={params!r}; it must be SamplingParams, one or one per prompt.")
        if len(per_prompt) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts, but {len(per_prompt)} sampling_params; give one, or one per prompt."
            )
        per_prompt = _snapshots(per_prompt)
        for prompt, one in zip(prompts, per_prompt, strict=True):
            self.engine.check_request(prompt.token_ids, one, prompt.embeds)
        priorities = per_request_priority(priority, len(prompts))
        loras = per_prompt_loras(lora_request, len(prompts))
        for each in dict.fromkeys(loras):
            self.engine.check_lora(each)
        first_id = self._first_free_id(len(prompts))
        self._num_requests = first_id + len(prompts)
        queued = map(_Queued, prompts, per_prompt, priorities, loras)
        return {str(first_id + i): each for i, each in enumerate(queued)}

    def _first_free_id(self, count: int) -> int:
        """Return the first of `count` consecutive numbers that are no ids of requests added directly to the engine."""
        first = self._num_requests
        for number in itertools.count(first):
            if number == first + count:
                return first
            if str(number) in self.engine:
                first = number + 1
        raise AssertionError("unreachable: itertools.count is infinite")

    def _run(
        self,
        requests: Mapping[str, _Queued],
        *,
        is_final_only: bool = False,
        on_step: Callable[[Sequence[RequestOutput]], None] = lambda outputs: None,
    ) -> Iterator[RequestOutput]:
        """Queue `requests` and yield their outputs until all are finished. Abort the unfinished ones if closed early.

        Several such iterators may be read in turns, and other callers may run steps of the engine meanwhile: each call
        has an outbox of its own, in which its outputs wait.
        """
        running: set[str] = set()
        outbox = Outbox()
        try:
            for request_id, (prompt, params, priority, lora_request) in requests.items():
                self.engine.add_request(
                    request_id,
                    prompt.token_ids,
                    params,
                    prompt=prompt.text,
                    priority=priority,
                    cache_salt=prompt.cache_salt,
                    prompt_embeds=prompt.embeds,
                    lora_request=lora_request,
                    is_final_only=is_final_only,
                    is_checked=True,  # by `_requests`, which checks all before any is queued
                    outbox=outbox,
                )
                running.add(request_id)
            while running:
                outputs = self.engine.collect(outbox) if outbox else self.engine.step(outbox)
                on_step(outputs)
                for output in outputs:
                    if output.finished:
                        running.discard(output.request_id)
                    yield output
        finally:
            for request_id in running:
                if self._loaded is not None:
                    self._loaded.engine.abort(request_id)


class _Queued(NamedTuple):
    """A prompt with everything that it is queued with."""

    prompt: TokenizedPrompt
    params: SamplingParams
    priority: int
    lora_request: LoRARequest | None


def _snapshots(params: Sequence[SamplingParams]) -> list[SamplingParams]:
    """Return a snapshot of each element, one for each distinct object. Raises `RequestError` for another type."""
    taken: dict[int, SamplingParams] = {}
    for one in params:
        if not isinstance(one, SamplingParams):
            raise RequestError(f"sampling_params has {one!r}; it must be SamplingParams, one or one per prompt.")
        if id(one) not in taken:
            taken[id(one)] = one.snapshot()
    return [taken[id(one)] for one in params]


def _argument_names() -> tuple[str, ...]:
    """Return the names of the arguments of `LLM`."""
    parameters = inspect.signature(LLM.__init__).parameters
    return tuple(name for name in parameters if name not in ("self", "unknown"))


def _engine_config(arguments: Mapping[str, Any]) -> EngineConfig:
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


def _load(
    config: EngineConfig, on_phase: OnPhase | None, executor: Executor | EngineProcesses
) -> tuple[Loaded | LoadedElsewhere | None, LoadedPooler | None]:
    """Import torch and transformers, then load the engine or the pooler; the other of the two results is None.

    Before the imports, compile processes are started if the model will probably be compiled, and the operating system
    is asked to read the weight files.
    """
    early = started_early(
        config.compile.compile_workers,
        partial(_will_compile, config),
        has_kernels=config.device is None or str(config.device).startswith("cuda"),
    )
    if "torch" in sys.modules:  # an earlier model may be garbage whose memory is needed
        gc.collect()
    prefetch(config.source.weight_files)
    with paused_gc(), early, executor.while_loading():
        if on_phase is not None:
            on_phase(Phase(name="import", detail="torch, transformers"))
        with timed_phase(on_phase, "import"):
            import transformers  # noqa: F401  here, so that no later phase is charged for the import

            from piecegraph.runner.pooling.task import pooling_task

            task = pooling_task(config)
            if task is None:
                from piecegraph.runner.startup.load_engine import load_engine
            else:
                from piecegraph.runner.pooling.load import load_pooler

                if config.num_ranks > 1:
                    raise ConfigError(
                        "a model that pools runs on one rank only; leave tensor_parallel_size and "
                        "pipeline_parallel_size out."
                    )
                if config.data_parallel_size > 1:
                    raise ConfigError("a model that pools runs in one engine only; leave data_parallel_size out.")
                if config.sizes_from_traffic:
                    raise ConfigError(
                        "a model that pools counts no batches; leave cudagraph_capture_sizes='traffic' out."
                    )
                if config.quantization is not None:
                    raise ConfigError("a model that pools cannot be quantised yet; leave quantization out.")
        if isinstance(executor, EngineProcesses):
            return load_elsewhere(config, executor, on_phase), None
        with translate_out_of_memory():
            if task is None:
                return load_engine(config, executor.watched(on_phase), executor.parallel()), None
            return None, load_pooler(config, task, on_phase)


def _will_compile(config: EngineConfig) -> bool:
    """Return whether the model will probably be compiled, as a look at the cache suggests."""
    from piecegraph.runner.startup.compile_guess import will_compile

    return config.start == "full" and will_compile(config)
