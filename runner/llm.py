"""`LLM`: a model that answers prompts. Names and meanings follow vLLM's offline API.

Importing it imports no torch: an `LLM` does once it is made, and has its weights read from the disk meanwhile.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from piecegraph.compiler.early_processes import started_early
from piecegraph.config import CompileConfig
from piecegraph.context_ahead import making_context
from piecegraph.errors import RequestError, UsageError
from piecegraph.paused_gc import paused_gc
from piecegraph.progress import OnPhase, Phase, timed_phase
from piecegraph.read_ahead import reading_ahead
from piecegraph.runner.engine_config import EngineConfig, compile_config, refuse_unavailable, refuse_unknown
from piecegraph.runner.model_source import ModelSource
from piecegraph.runner.outputs import RequestOutput
from piecegraph.runner.progress_bar import progress_bar
from piecegraph.runner.prompts import Message, Prompt, TokenizedPrompt, tokenize, tokenize_chat
from piecegraph.runner.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from piecegraph.compiler.compiled_model import CompiledModel
    from piecegraph.runner.engine import Engine
    from piecegraph.runner.load_engine import Loaded
    from piecegraph.runner.model_runner import ModelRunner
    from piecegraph.runner.selfcheck import SelfcheckReport


class LLM:
    """Loads and compiles a model, then generates.

    `model`: a folder, a .gguf file or a hub id; None is the embedded default, SmolLM2-135M-Instruct.
    `enforce_eager` means neither compiling nor graphs.
    `on_phase` is told what happens while it loads. Usable as a context manager; `close` frees it.

    Raises `ConfigError` on an argument out of range, unknown, or not available in this version (each by
    name), `ModelError` and its kin on a model that cannot be read or run, `OutOfMemory` when the cache
    does not fit, `CompileError` and its kin when compiling fails.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        tokenizer: str | None = None,
        skip_tokenizer_init: bool = False,
        revision: str | None = None,
        trust_remote_code: bool = False,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        load_format: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        block_size: int | None = None,
        num_kv_blocks: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enable_prefix_caching: bool = True,
        async_scheduling: bool | None = None,
        attention_backend: str = "auto",
        compiler: str | None = None,
        cudagraph_mode: str = "FULL_AND_PIECEWISE",
        cudagraph_capture_sizes: Sequence[int] | None = None,
        compile_sizes: Sequence[int] | None = None,
        graph_kind: str = "auto",
        compilation_config: CompileConfig | Mapping[str, Any] | None = None,
        enforce_eager: bool = False,
        strict: bool = False,
        tensor_parallel_size: int = 1,
        hf_overrides: Mapping[str, Any] | None = None,
        seed: int = 0,
        compile_workers: int | None = None,
        on_phase: OnPhase | None = None,
        **unknown: object,
    ) -> None:
        refuse_unknown(unknown, _argument_names())
        refuse_unavailable(tensor_parallel_size=tensor_parallel_size)
        if model is None:
            from piecegraph.runner.embedded_model import embedded_model_dir

            model = embedded_model_dir(on_phase)
        config = EngineConfig(
            source=ModelSource(
                model=os.path.expanduser(model),
                revision=revision,
                trust_remote_code=trust_remote_code,
                load_format=load_format,
                hf_overrides=dict(hf_overrides or {}),
            ),
            tokenizer=tokenizer,
            skip_tokenizer_init=skip_tokenizer_init,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=16 if block_size is None else block_size,
            num_kv_blocks=num_kv_blocks,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=enable_prefix_caching,
            async_scheduling=async_scheduling,
            attention_backend=attention_backend,
            cudagraph_mode="NONE" if enforce_eager else cudagraph_mode,
            cudagraph_capture_sizes=None if cudagraph_capture_sizes is None else tuple(cudagraph_capture_sizes),
            compile_sizes=None if compile_sizes is None else tuple(compile_sizes),
            graph_kind=graph_kind,
            strict=strict,
            compile=compile_config(compiler, enforce_eager, compile_workers, compilation_config),
            seed=seed,
        )
        early = started_early(
            config.compile.compile_workers,
            partial(_will_compile, config),
            has_kernels=config.device is None or str(config.device).startswith("cuda"),
        )
        if "torch" in sys.modules:  # a model before this one may be garbage, and its memory wanted
            gc.collect()
        with paused_gc(), making_context(config.device), reading_ahead(config.source.weight_files) as ahead, early:
            if on_phase is not None:
                on_phase(Phase(name="import", detail="torch, transformers"))
            with timed_phase(on_phase, "import"):
                import transformers  # noqa: F401  here, so that its seconds are no later phase's

                from piecegraph.runner.lazy_sklearn import import_without_sklearn

                import_without_sklearn()
                from piecegraph.runner.load_engine import load_engine
            self._loaded: Loaded | None = load_engine(config, on_phase, ahead)
        self._num_requests = 0
        self._inbox: dict[str, deque[RequestOutput]] = {}  # by request: outputs not yet read, of all of its call

    @property
    def compiled(self) -> CompiledModel:
        """The compiled model: `.report()`, `.source`, `.guards`."""
        return self._open.compiled

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self._open.tokenizer

    @property
    def max_model_len(self) -> int:
        return self._open.max_model_len

    @property
    def engine(self) -> Engine:
        """`add_request`, `step`, `abort`: for a server that keeps its own loop."""
        return self._open.engine

    @property
    def hf_config(self) -> PretrainedConfig:
        """The model's own configuration, as transformers read it."""
        return self._open.hf_config

    @property
    def runner(self) -> ModelRunner:
        """The model runner: `.graphs`, `.dispatcher`, `.counters`."""
        return self._open.runner

    @property
    def notes(self) -> tuple[str, ...]:
        """Decisions taken at load that a caller may want to know of."""
        return self._open.notes

    @property
    def selfcheck(self) -> SelfcheckReport | None:
        """What `compilation_config={"selfcheck": True}` compared at start; None without it."""
        return self._open.selfcheck

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """One finished output a prompt, in their order. Raises `RequestError` before running any."""
        return self._generate(self._tokenize(prompts), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Like `generate`, for one conversation or several, through the model's chat template."""
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prompts = [
            tokenize_chat(
                conversation,  # type: ignore[arg-type]  # told apart by its first item, above
                self.tokenizer,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
            )
            for conversation in conversations
        ]
        return self._generate(prompts, sampling_params, use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Outputs as tokens come: each holds all of its request's text so far. `request_id`s ascend with
        the prompts. Ending the iteration early aborts what still runs.
        """
        return self._run(self._requests(self._tokenize(prompts), sampling_params))

    def close(self) -> None:
        """Free the model and its cache. Harmless to repeat; anything else afterwards is an error."""
        if self._loaded is not None:
            self._loaded.runner.close()  # graphs first: they read the model's memory
            self._loaded.compiled.close()
            self._loaded = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _open(self) -> Loaded:
        if self._loaded is None:
            raise UsageError("this LLM is closed; make a new one.")
        return self._loaded

    def _tokenize(self, prompts: Prompt | Sequence[Prompt]) -> list[TokenizedPrompt]:
        several = [prompts] if isinstance(prompts, str | Mapping) else prompts
        return [tokenize(prompt, self.tokenizer) for prompt in several]

    def _generate(
        self,
        prompts: Sequence[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        requests = self._requests(prompts, sampling_params)
        finished: dict[str, RequestOutput] = {}
        with progress_bar(len(requests), self.engine, shown=use_tqdm) as advance:
            for output in self._run(requests, is_final_only=True, on_step=advance):
                finished[output.request_id] = output
        return [finished[request_id] for request_id in requests]

    def _requests(
        self,
        prompts: Sequence[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> dict[str, tuple[TokenizedPrompt, SamplingParams]]:
        """Prompts and their parameters by new request ids, each checked, none queued yet."""
        params = sampling_params if sampling_params is not None else SamplingParams()
        per_prompt = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(per_prompt) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts, but {len(per_prompt)} sampling_params; give one, or one a prompt."
            )
        for prompt, one in zip(prompts, per_prompt, strict=True):
            self.engine.check_request(prompt.token_ids, one)
        first_id = self._num_requests
        self._num_requests += len(prompts)
        return {str(first_id + i): pair for i, pair in enumerate(zip(prompts, per_prompt, strict=True))}

    def _run(
        self,
        requests: Mapping[str, tuple[TokenizedPrompt, SamplingParams]],
        *,
        is_final_only: bool = False,
        on_step: Callable[[Sequence[RequestOutput]], None] = lambda outputs: None,
    ) -> Iterator[RequestOutput]:
        """Queue `requests` and yield their outputs until all are finished; aborts what runs if left early.

        Several of these may be read in turns: a step's outputs wait in the inbox of the call they are for.
        """
        running: set[str] = set()
        inbox: deque[RequestOutput] = deque()
        try:
            for request_id, (prompt, params) in requests.items():
                self.engine.add_request(
                    request_id,
                    prompt.token_ids,
                    params,
                    prompt=prompt.text,
                    cache_salt=prompt.cache_salt,
                    is_final_only=is_final_only,
                    is_checked=True,  # by `_requests`, all of them before any is queued
                )
                self._inbox[request_id] = inbox
                running.add(request_id)
            while running:
                while inbox:
                    output = inbox.popleft()
                    if output.finished:
                        running.discard(output.request_id)
                    yield output
                if running:
                    outputs = self.engine.step()
                    on_step(outputs)
                    for output in outputs:
                        if output.request_id in self._inbox:
                            self._inbox[output.request_id].append(output)
        finally:
            for request_id in requests:
                self._inbox.pop(request_id, None)
            for request_id in running:
                if self._loaded is not None:
                    self._loaded.engine.abort(request_id)


def _argument_names() -> tuple[str, ...]:
    parameters = inspect.signature(LLM.__init__).parameters
    return tuple(name for name in parameters if name not in ("self", "unknown"))


def _will_compile(config: EngineConfig) -> bool:
    from piecegraph.runner.compile_guess import will_compile

    return will_compile(config)
