"""What `LLM` was asked for, checked: frozen, and only read from here on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.config import CompileConfig
from piecegraph.errors import ConfigError, did_you_mean
from piecegraph.runner.model_source import ModelSource

if TYPE_CHECKING:
    import torch

GRAPH_KINDS = ("auto", "cuda", "recorded")

DEFAULT_COMPILE_SIZES = (1, 2, 4, 8)
"""Sizes compiled statically on a GPU unless the caller names others: the smallest decode batches, where what Inductor
makes for one size reads large weights faster. docs/decisions/001-static-sizes.md says what more of them gain."""

VLLM_ONLY = frozenset(
    {
        "allow_deprecated_quantization",
        "allowed_local_media_path",
        "config_format",
        "cpu_offload_gb",
        "data_parallel_size",
        "disable_custom_all_reduce",
        "disable_log_stats",
        "distributed_executor_backend",
        "enable_chunked_prefill",
        "enable_expert_parallel",
        "enable_lora",
        "enable_sleep_mode",
        "kv_cache_dtype",
        "limit_mm_per_prompt",
        "logits_processors",
        "lora_modules",
        "max_loras",
        "mm_processor_kwargs",
        "model_impl",
        "override_pooler_config",
        "pipeline_parallel_size",
        "quantization",
        "runner",
        "speculative_config",
        "structured_outputs_config",
        "swap_space",
        "task",
        "tokenizer_mode",
        "tokenizer_revision",
        "worker_cls",
    }
)
"""Arguments of vLLM's `LLM` that ours lacks; refused by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Raises `ConfigError` on a value out of range or a feature that is not available yet."""

    source: ModelSource
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    dtype: str | torch.dtype = "auto"
    device: str | torch.device | None = None
    max_model_len: int | None = None
    """Tokens of prompt and output together; None: what the model's config allows."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    """Tokens a step computes at most; None: 2048 on the CPU, 8192 on a GPU."""
    block_size: int = 16
    """Tokens a block of the cache holds; a power of two."""
    num_kv_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    """Prompts find the keys and values of prefixes they share with earlier ones."""
    async_scheduling: bool | None = None
    """Schedule and launch a step while the one before runs; None: on a GPU."""
    attention_backend: str = "auto"
    cudagraph_mode: CUDAGraphMode | str = CUDAGraphMode.FULL_AND_PIECEWISE
    """Under which graphs uniform-decode batches and all others are to run; resolved once against what the
    attention backend allows."""
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    """Padded token counts to capture, ascending; None: `default_capture_sizes`. A batch above the largest
    runs without graphs."""
    compile_sizes: tuple[int, ...] | None = None
    """Token counts for which pieces that gain by it have a compile of their own. None: `DEFAULT_COMPILE_SIZES` on a
    GPU."""
    graph_kind: str = "auto"
    """"cuda"; "recorded", the same rules without a GPU and without the speed; "auto": "cuda" on a GPU, and
    on a CPU no graphs."""
    strict: bool = False
    """A batch that cannot run under the mode asked for is an error, and so is a pass that fails
    (`CompileConfig.strict`)."""
    compile: CompileConfig = field(default_factory=CompileConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "block_size"):
            _check_count(name, getattr(self, name))
        for name in ("max_model_len", "max_num_batched_tokens", "num_kv_blocks", "kv_cache_memory_bytes"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization={self.gpu_memory_utilization}; it must be above 0, at most 1.")
        object.__setattr__(self, "cudagraph_mode", CUDAGraphMode.parse(self.cudagraph_mode))
        if self.graph_kind not in GRAPH_KINDS:
            raise ConfigError(f"graph_kind={self.graph_kind!r} is unknown.{did_you_mean(self.graph_kind, GRAPH_KINDS)}")
        for name in ("cudagraph_capture_sizes", "compile_sizes"):
            sizes = getattr(self, name)
            if sizes is not None:
                object.__setattr__(self, name, tuple(sizes))
        if self.strict and not self.compile.strict:
            object.__setattr__(self, "compile", replace(self.compile, strict=True))
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError("max_model_len=1 leaves no room for an answer; it must be 2 or more.")


def compile_config(
    compiler: str | None,
    enforce_eager: bool,
    compile_workers: int | None,
    options: CompileConfig | Mapping[str, Any] | None,
) -> CompileConfig:
    """The compile config behind `LLM`'s arguments; those given by name win over `options`."""
    config = options if isinstance(options, CompileConfig) else CompileConfig.from_options(options)
    if enforce_eager:
        if compiler == "inductor":
            raise ConfigError("enforce_eager=True and compiler='inductor' contradict each other; give one of them.")
        compiler = "eager"
    if compiler is not None:
        config = replace(config, compiler=compiler)
    return config if compile_workers is None else replace(config, compile_workers=compile_workers)


def batched_tokens(config: EngineConfig, device_type: str) -> int:
    """Tokens a step computes at most."""
    return config.max_num_batched_tokens or (2048 if device_type == "cpu" else 8192)


def runs_ahead(config: EngineConfig, device_type: str) -> bool:
    """Whether a step is launched while the one before runs: worth it where the device works by itself."""
    return device_type != "cpu" if config.async_scheduling is None else config.async_scheduling


def static_sizes_note(config: EngineConfig) -> tuple[str, ...]:
    """What becomes of `compile_sizes` that were asked for and cannot be had."""
    if not config.compile_sizes or config.compile.compiler == "inductor":
        return ()
    return (f"compile_sizes: {config.compile.compiler} pieces are not compiled, so no size is static",)


def static_sizes(config: EngineConfig, *, is_cuda: bool) -> tuple[int, ...]:
    """The sizes at which pieces that gain by it get a static compile: those asked for, else on a GPU
    `DEFAULT_COMPILE_SIZES` as far as batches can be that large. None unless Inductor compiles."""
    if config.compile.compiler != "inductor":
        return ()
    if config.compile_sizes is not None:
        return config.compile_sizes
    smallest = tuple(size for size in DEFAULT_COMPILE_SIZES if size <= config.max_num_seqs)
    return config.compile.compile_sizes or (smallest if is_cuda else ())


def refuse_unavailable(*, tensor_parallel_size: int) -> None:
    """Refuse what this version cannot honour."""
    if tensor_parallel_size != 1:
        raise ConfigError(f"tensor_parallel_size={tensor_parallel_size} is not yet available; it must be 1.")


def refuse_unknown(arguments: Mapping[str, object], known: tuple[str, ...]) -> None:
    """Refuse arguments `LLM` does not have, each by name."""
    for name in arguments:
        if name in VLLM_ONLY:
            raise ConfigError(f"{name} is an argument of vLLM's LLM that this one does not have; leave it out.")
        raise ConfigError(f"LLM has no argument {name!r}.{did_you_mean(name, known)}")


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r}; it must be a whole number, 1 or more.")
