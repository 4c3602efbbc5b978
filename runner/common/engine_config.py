"""`EngineConfig`, the checked and frozen form of `LLM`'s arguments, which the rest of the runner only reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.config import CompileConfig
from piecegraph.errors import ConfigError, did_you_mean
from piecegraph.runner.common.logits_processor import LogitsProcessors
from piecegraph.runner.common.logprobs_mode import LogprobsMode
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.common.speculative_config import SpeculativeConfig
from piecegraph.runner.quantization.schemes import check_quantization

if TYPE_CHECKING:
    import torch

GRAPH_KINDS = ("auto", "cuda", "recorded")

BOOLEANS = (
    "skip_tokenizer_init",
    "enable_prompt_embeds",
    "enable_prefix_caching",
    "strict",
    "measure_graphs",
    "enable_sleep_mode",
)
"""Fields that are True or False, whatever the other fields are."""

STARTS = ("fast", "full")

DEFAULT_MAX_NUM_SEQS = 256

VLLM_BACKENDS: Mapping[str, str] = {"FLASH_ATTN": "flash_attn", "TRITON_ATTN": "triton", "TORCH_SDPA": "sdpa"}
"""Our names of attention backends by vLLM's names."""

KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
"""In what keys and values can be kept: the model's dtype, or float8 (e4m3), by both of vLLM's names."""

MAX_COUNTS: Mapping[str, int] = {
    "max_num_seqs": 65_536,
    "block_size": 65_536,
    "max_model_len": 1 << 28,
    "max_num_batched_tokens": 1 << 22,
    "num_kv_blocks": 2**31 - 1,
    "kv_cache_memory_bytes": 1 << 50,
}
"""The largest value of each count, so that a typing error is refused before memory is allocated for it. Block numbers
are int32."""

EXECUTORS = ("uniproc", "mp", "ray", "external_launcher")
"""The values of `distributed_executor_backend`."""

MAX_RANKS = 1024
"""The largest `tensor_parallel_size`."""

DEFAULT_MASTER_PORT = 29501
"""The port where several machines meet unless another is given; vLLM's."""

DISTRIBUTED_TIMEOUT_S = 8.0
"""How long a rank waits for another in a step: an error with its reason takes at most two seconds more."""

MAX_LORA_COUNT = 4096
"""The largest number of adapters, and the largest rank."""

MAX_SEED = 2**64 - 1
"""The largest seed that `torch.manual_seed` accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The configuration of an engine, resolved as far as possible without a device.

    Raises `ConfigError` for a value that is out of range or a feature that is not available yet.
    """

    source: ModelSource
    runner: str = "auto"
    """"generate", "pooling", or "auto", by the model's files."""
    convert: str = "auto"
    """What a model that pools returns: "embed", "classify", or "auto", by the model's files."""
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    enable_prompt_embeds: bool = False
    """Whether prompts may be given as embeddings."""
    dtype: str | torch.dtype = "auto"
    device: str | torch.device | None = None
    max_model_len: int | None = None
    """The largest number of tokens of prompt and output together; None: what the model's config allows."""
    max_num_seqs: int = None  # type: ignore[assignment]  # an int from `__post_init__` on
    """The largest number of requests that run at once; None: the smaller of `DEFAULT_MAX_NUM_SEQS` and
    `max_num_batched_tokens`."""
    max_num_batched_tokens: int | None = None
    """The largest number of tokens that a step computes, at least `max_num_seqs`; None: the larger of `max_num_seqs`
    and 2048 on the CPU or 8192 on a GPU."""
    block_size: int = 16
    """The number of tokens in a block of the KV cache, a power of two."""
    may_raise_block_size: bool = False
    """Whether blocks of a model with states get more tokens than `block_size`, until these take as much memory as a
    state. True if no block size was given."""
    num_kv_blocks: int | None = None
    kv_cache_dtype: str = "auto"
    """In what keys and values are kept, one of `KV_CACHE_DTYPES`: "auto" is the model's dtype."""
    calculate_kv_scales: bool = False
    """True calibrates the scales of keys and values in float8 at the start, one for each head, and what is subtracted
    from keys; False takes the checkpoint's scales, or 1."""
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool | None = True
    """Whether prompts reuse the keys and values of prefixes that they share with earlier prompts; None: True."""
    cached_states: int | None = None
    """The number of block boundaries of a request, the last ones, whose states of layers later prompts find; None: all.
    Fewer leave more of the cache to other prefixes, and a prompt resumes only where an earlier one ended."""
    async_scheduling: bool | None = None
    """Whether a step is scheduled and launched while the preceding step runs; None: only on a GPU."""
    attention_backend: str = "auto"
    """The name of an attention backend; vLLM's names are accepted (`VLLM_BACKENDS`)."""
    cudagraph_mode: CUDAGraphMode | str = CUDAGraphMode.FULL_AND_PIECEWISE
    """The graphs under which uniform decode batches and all other batches run; resolved once against what the
    attention backend supports."""
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    """The padded token counts to capture, ascending; None: `default_capture_sizes`. A batch above the largest size
    runs without graphs."""
    sizes_from_traffic: bool = False
    """Whether the sizes are chosen by what earlier engines of the model have run; until then `cudagraph_capture_sizes`
    is None. True if "traffic" was given for these."""
    compile_sizes: tuple[int, ...] | None = None
    """The token counts for which pieces that become faster are compiled with static shapes. None: those of
    `config_on_device.static_sizes`."""
    graph_kind: str = "auto"
    """The kind of graph: "cuda"; "recorded", which follows the same rules without a GPU, and is faster where pieces do
    nothing but call our C++ kernels; or "auto", which is "cuda" on a GPU. On a CPU "auto" is "recorded" for small
    batches where all weights are int8 (docs/quantization.md), and no graphs otherwise."""
    measure_graphs: bool = False
    """Whether a start measures graphs of up to 512 tokens, so that each batch runs under what takes the least time
    instead of the smallest graph that holds it. Two starts may pad differently then."""
    start: str = "full"
    """"full": everything is compiled and captured before the engine is ready. "fast": the engine serves meanwhile, with
    pieces that run as their graphs until they are compiled."""
    enable_sleep_mode: bool = False
    """True puts weights and KV cache of a GPU into memory that `LLM.sleep` can give back; on a CPU they always are."""
    strict: bool = False
    """Whether a batch that cannot run under the requested mode, or a pass that fails (`CompileConfig.strict`), is an
    error. A batch with `prompt_logprobs`, which no graph can return, still runs without graphs and is counted."""
    compile: CompileConfig = field(default_factory=CompileConfig)
    max_logprobs: int = -1
    """The largest number of log probabilities that a request may ask for; -1: the whole vocabulary."""
    logprobs_mode: LogprobsMode | str = LogprobsMode.RAW_LOGPROBS
    """The values that are returned as log probabilities of output tokens."""
    logits_processors: LogitsProcessors = ()
    """Classes that change logits before tokens are sampled. With any of them, no step is launched before the tokens
    of the preceding step are known, because the processors read these tokens."""
    speculative: SpeculativeConfig | None = None
    """How tokens are drafted and verified; None: each step gives a request one token."""
    is_draft: bool = False
    """Whether this is the config of the model that drafts, whose graphs hold its passes for other requests."""
    quantization: str | None = None
    """The scheme of `runner/quantization/schemes.py` that weights are quantised by while they load; None: as read."""
    enable_lora: bool = False
    """Whether requests may run with LoRA adapters."""
    max_loras: int = 1
    """The number of slots on the device for adapters: the most adapters whose requests run at once."""
    max_lora_rank: int = 16
    """The largest rank of an adapter's matrices; memory is taken for it in every slot."""
    max_cpu_loras: int | None = None
    """The number of adapters that stay loaded on the CPU, `max_loras` or more; None: `max_loras`."""
    lora_target_modules: tuple[str, ...] | None = None
    """Names of the modules that adapters may change; None: every linear layer and embedding, the output included."""
    seed: int = 0
    tensor_parallel_size: int = 1
    """The number of ranks among which each layer is divided."""
    enable_expert_parallel: bool = False
    """Whether each of `tensor_parallel_size` ranks holds some experts of a layer whole, not a part of each expert."""
    pipeline_parallel_size: int = 1
    """The number of stages among which layers are divided, each with `tensor_parallel_size` ranks."""
    data_parallel_size: int = 1
    """The number of engines, each with all ranks and a KV cache of its own, among which requests are divided."""
    nnodes: int = 1
    """The number of machines, on each of which the same number of ranks runs (executor "mp")."""
    node_rank: int = 0
    """Which of `nnodes` machines this is; the engine is on machine 0, and the others only run ranks."""
    master_addr: str = "127.0.0.1"
    """The address of machine 0, at which the others reach it."""
    master_port: int = DEFAULT_MASTER_PORT
    """A free port of machine 0, where the machines meet."""
    distributed_executor_backend: str | None = None
    """The executor that runs the ranks, one of `EXECUTORS`; None: "uniproc" for one rank, "mp" for several."""
    distributed_timeout_seconds: float | None = None
    """How long a rank waits for another in a step before the step fails; None: `DISTRIBUTED_TIMEOUT_S`."""

    @property
    def keeps_fp8(self) -> bool:
        """Return whether keys and values are kept in float8."""
        return self.kv_cache_dtype != "auto"

    def __post_init__(self) -> None:
        if self.enable_prefix_caching is None:  # as vLLM: the default
            object.__setattr__(self, "enable_prefix_caching", True)
        for name in BOOLEANS:
            check_boolean(name, getattr(self, name))
        if self.async_scheduling is not None:
            check_boolean("async_scheduling", self.async_scheduling, "True, False or None (on a GPU)")
        self._check_cached_states()
        check_boolean("trust_remote_code", self.source.trust_remote_code)
        object.__setattr__(self, "logprobs_mode", LogprobsMode.parse(self.logprobs_mode))
        if type(self.max_logprobs) is not int or self.max_logprobs < -1:
            raise ConfigError(
                f"max_logprobs={self.max_logprobs!r}; it must be 0 or more, or -1 (the whole vocabulary)."
            )
        if self.logits_processors and self.async_scheduling:
            raise ConfigError(
                "async_scheduling=True launches a step before the tokens of the preceding step are known, and "
                "logits_processors read these tokens; give one of the two arguments."
            )
        if self.logits_processors and self.speculative is not None:
            raise ConfigError(
                "logits_processors see one token a step, and with speculative_config a step gives several; give one of "
                "the two arguments."
            )
        if self.compile.selfcheck and self.speculative is not None:
            raise ConfigError(
                "selfcheck compares steps of one token a request, and with speculative_config a step gives several; "
                "check once without speculative_config."
            )
        self._check_parallel()
        self._check_weights()
        self._check_start()
        self._check_sleep()
        if self.enable_prompt_embeds and self.speculative is not None:
            raise ConfigError(
                "enable_prompt_embeds=True gives prompts without tokens, in which speculative_config finds no drafts; "
                "give one of the two arguments."
            )
        for name, largest in MAX_COUNTS.items():
            if getattr(self, name) is not None or name == "block_size":
                _check_count(name, getattr(self, name), largest)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"seed={self.seed!r}; it must be a whole number from 0 to {MAX_SEED}.")
        if self.tokenizer is not None and (not isinstance(self.tokenizer, str) or "\0" in self.tokenizer):
            raise ConfigError(f"tokenizer={self.tokenizer!r}; it must be a folder or a hub id, or None (the model's).")
        for name in ("attention_backend", "graph_kind"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name}={getattr(self, name)!r}; it must be a string.")
        most_tokens = self.max_num_batched_tokens
        if self.max_num_seqs is None:
            seqs = DEFAULT_MAX_NUM_SEQS if most_tokens is None else min(DEFAULT_MAX_NUM_SEQS, most_tokens)
            object.__setattr__(self, "max_num_seqs", seqs)
        elif most_tokens is not None and most_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={most_tokens} is less than max_num_seqs={self.max_num_seqs}: a step computes "
                "one token or more for each running request, so some requests would never be scheduled. Raise the "
                "first, or lower the second."
            )
        backend = VLLM_BACKENDS.get(self.attention_backend, self.attention_backend)
        object.__setattr__(self, "attention_backend", backend)
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization={share!r}; it must be above 0, at most 1.")
        object.__setattr__(self, "cudagraph_mode", CUDAGraphMode.parse(self.cudagraph_mode))
        if self.graph_kind not in GRAPH_KINDS:
            raise ConfigError(f"graph_kind={self.graph_kind!r} is unknown.{did_you_mean(self.graph_kind, GRAPH_KINDS)}")
        self._resolve_sizes()
        for size in self.compile_sizes or ():
            _check_count("compile_sizes", size, MAX_COUNTS["max_num_batched_tokens"])
        if self.strict and not self.compile.strict:
            object.__setattr__(self, "compile", replace(self.compile, strict=True))
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError("max_model_len=1 leaves no room for an answer; it must be 2 or more.")

    def _resolve_sizes(self) -> None:
        """Make tuples of sizes, and `sizes_from_traffic` of "traffic". Raises `ConfigError` for another word."""
        given: object = self.cudagraph_capture_sizes
        if isinstance(given, str):
            if given != "traffic":
                raise ConfigError(
                    f"cudagraph_capture_sizes={given!r}; it must be sizes, such as (1, 2, 4), or 'traffic': those that "
                    "cost least for the steps of earlier engines."
                )
            object.__setattr__(self, "cudagraph_capture_sizes", None)
            object.__setattr__(self, "sizes_from_traffic", True)
        for name in ("cudagraph_capture_sizes", "compile_sizes"):
            sizes = getattr(self, name)
            if sizes is not None:
                object.__setattr__(self, name, tuple(sizes))

    def _check_parallel(self) -> None:
        """Resolve the fields about several ranks. Raises `ConfigError` for what these cannot do."""
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            _check_count(name, getattr(self, name), MAX_RANKS)
        timeout = self.distributed_timeout_seconds
        if timeout is None:
            object.__setattr__(self, "distributed_timeout_seconds", DISTRIBUTED_TIMEOUT_S)
        elif isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= 86_400:
            raise ConfigError(f"distributed_timeout_seconds={timeout!r}; it must be above 0, at most 86400.")
        check_boolean("enable_expert_parallel", self.enable_expert_parallel)
        if self.enable_expert_parallel and self.tensor_parallel_size == self.data_parallel_size == 1:
            raise ConfigError(
                "enable_expert_parallel=True divides experts among the ranks of tensor_parallel_size and "
                "data_parallel_size, and there is one rank; give one of them, too."
            )
        size, backend = self.num_ranks, self.distributed_executor_backend
        if backend is None:
            backend = "uniproc" if size == 1 else "mp"
        backend = {"uni": "uniproc"}.get(backend, backend) if isinstance(backend, str) else repr(backend)
        if backend not in EXECUTORS:
            raise ConfigError(
                f"distributed_executor_backend={backend!r} is not available here.{did_you_mean(backend, EXECUTORS)}"
            )
        object.__setattr__(self, "distributed_executor_backend", backend)
        self._check_engines()
        self._check_nodes()
        self._check_processors()
        if size == 1 and not self.shares_experts:
            return
        if backend == "uniproc" and size > 1:
            raise ConfigError(
                f"{self.ranks_argument} needs a process for each rank, and distributed_executor_backend="
                "'uniproc' has one; leave the second out."
            )
        ranks, stages = self.ranks_argument, self._stages_argument
        for is_given, what, beside in (
            (self._drafts_otherwise(), "speculative_config with another method than 'ngram'", ranks),
            (self.compile.selfcheck, "selfcheck", ranks),
            (bool(self.compile_sizes or self.compile.compile_sizes), "compile_sizes", ranks),
            (self.runner == "pooling", "runner='pooling'", ranks),
            (self.speculative is not None, "speculative_config", stages),
            (bool(self.logits_processors), "logits_processors", stages),
            (self.enable_prompt_embeds, "enable_prompt_embeds", stages),
        ):
            if is_given and beside:
                raise ConfigError(f"{what} is not yet available with {beside}; give one of the two arguments.")
        if self.speculative is not None and backend == "external_launcher" and self.speculative.stops_when_slower:
            raise ConfigError(
                "speculative_config: each rank of distributed_executor_backend='external_launcher' would find by its "
                "own clock when drafting is slower; give 'stops_when_slower': False."
            )
        if self.pipeline_parallel_size > 1 and backend != "mp":
            raise ConfigError(
                f"distributed_executor_backend={backend!r} runs no stages yet; leave it or pipeline_parallel_size out."
            )
        if self.pipeline_parallel_size > 1 and self.async_scheduling:
            raise ConfigError(
                "async_scheduling=True launches a step before the tokens of the preceding step are known, and with "
                "pipeline_parallel_size several batches of different requests are in flight instead; leave it out."
            )

    @property
    def num_ranks(self) -> int:
        """The number of processes that run a step together: the ranks of all stages."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def shares_experts(self) -> bool:
        """Return whether several engines share experts, and so run each step together."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def ranks_argument(self) -> str:
        """The argument that asks for several ranks, with its value."""
        if self.num_ranks == 1:
            return f"data_parallel_size={self.data_parallel_size} and enable_expert_parallel"
        name = "tensor_parallel_size" if self.tensor_parallel_size > 1 else "pipeline_parallel_size"
        return f"{name}={getattr(self, name)}"

    @property
    def _stages_argument(self) -> str:
        """The argument by which ranks have unequal steps, or engines each other's experts, with its value; else ""."""
        if self.pipeline_parallel_size > 1:
            return f"pipeline_parallel_size={self.pipeline_parallel_size}"
        return f"data_parallel_size={self.data_parallel_size} and enable_expert_parallel" if self.shares_experts else ""

    def _check_processors(self) -> None:
        """Raise `ConfigError` for a logits processor that other processes cannot import."""
        if self.num_ranks == self.data_parallel_size == 1:
            return
        for kind in self.logits_processors:
            if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
                raise ConfigError(
                    f"logits_processors has {kind.__qualname__}, which other processes cannot import; put the class "
                    "into a module of its own, at its top level."
                )

    def _check_nodes(self) -> None:
        """Raise `ConfigError` for ranks that cannot be divided among machines as asked."""
        _check_count("nnodes", self.nnodes, MAX_RANKS)
        _check_count("master_port", self.master_port, 65_535)
        if type(self.node_rank) is not int or not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(f"node_rank={self.node_rank!r}; it must be from 0 to nnodes - 1, {self.nnodes - 1}.")
        if not isinstance(self.master_addr, str) or not self.master_addr:
            raise ConfigError(f"master_addr={self.master_addr!r}; it must be the address of machine 0, as a string.")
        if self.nnodes == 1:
            return
        if self.node_rank:
            raise ConfigError(
                f"node_rank={self.node_rank}: machines other than 0 only run ranks, and have no LLM. Use the command "
                "line there, or piecegraph.runner.clusters.node.serve_node."
            )
        if self.distributed_executor_backend != "mp" or self.data_parallel_size > 1 or self.pipeline_parallel_size > 1:
            raise ConfigError(
                f"nnodes={self.nnodes} is of distributed_executor_backend='mp', one engine and one stage; under "
                "torchrun and Ray leave it out; leave pipeline_parallel_size out, and start one server on each machine "
                "instead of data_parallel_size."
            )
        if self.tensor_parallel_size % self.nnodes:
            raise ConfigError(
                f"tensor_parallel_size={self.tensor_parallel_size} cannot be divided among nnodes={self.nnodes} "
                "machines, with as many ranks on each; change one of the two."
            )

    def _drafts_by_head(self) -> bool:
        """Return whether a head drafts, or the model's layers for multi-token prediction."""
        return self.speculative is not None and self.speculative.method not in ("ngram", "draft_model")

    def _drafts_otherwise(self) -> bool:
        """Return whether tokens are drafted by a model or a head, which ranks do not run yet.

        Its logits may round differently on each rank, and ranks whose drafts differ would compute different steps.
        """
        return self.speculative is not None and self.speculative.method != "ngram"

    def _check_engines(self) -> None:
        """Raise `ConfigError` for what several engines cannot do."""
        if self.data_parallel_size == 1:
            return
        for is_given, what in (
            (self.runner == "pooling", "runner='pooling'"),
            (
                self.distributed_executor_backend not in ("uniproc", "mp"),
                f"distributed_executor_backend={self.distributed_executor_backend!r}",
            ),
            (
                self.shares_experts and self.pipeline_parallel_size > 1,
                f"enable_expert_parallel with pipeline_parallel_size={self.pipeline_parallel_size}",
            ),
            (self.shares_experts and self.strict, "enable_expert_parallel with strict=True"),
            (self.shares_experts and self.speculative is not None, "enable_expert_parallel with speculative_config"),
        ):
            if is_given:
                raise ConfigError(
                    f"{what} is not yet available with data_parallel_size={self.data_parallel_size}; give one of the "
                    "two arguments."
                )

    def _check_cached_states(self) -> None:
        """Raise `ConfigError` for a number of states that there cannot be."""
        if self.cached_states is not None and (type(self.cached_states) is not int or self.cached_states < 1):
            raise ConfigError(
                f"cached_states={self.cached_states!r}; it must be 1 or more, or None (all). Without any, give "
                "enable_prefix_caching=False."
            )
        if self.cached_states is not None and not self.enable_prefix_caching:
            raise ConfigError("cached_states is of cached prefixes, and enable_prefix_caching=False; give one of them.")

    def _check_start(self) -> None:
        """Raise `ConfigError` for a mode of the start that there is not."""
        if self.start not in STARTS:
            raise ConfigError(f"start={self.start!r} is unknown.{did_you_mean(str(self.start), STARTS)}")

    def _check_sleep(self) -> None:
        """Raise `ConfigError` for what cannot sleep on any device."""
        if not self.enable_sleep_mode:
            return
        for is_given, what in (
            (
                self.num_ranks > 1 and str(self.device).partition(":")[0] != "cpu",
                f"{self.ranks_argument}, unless device='cpu',",
            ),
            (self.data_parallel_size > 1, f"data_parallel_size={self.data_parallel_size}"),
            (self.runner == "pooling", "runner='pooling'"),
        ):
            if is_given:
                raise ConfigError(f"{what} is not yet available with enable_sleep_mode=True; give one of the two.")

    def _check_weights(self) -> None:
        """Raise `ConfigError` for a scheme that there is not, and for what quantised weights or adapters exclude."""
        self._check_lora()
        check_quantization(self.quantization)
        if self.kv_cache_dtype is None:  # as vLLM
            object.__setattr__(self, "kv_cache_dtype", "auto")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            found = str(self.kv_cache_dtype)
            raise ConfigError(f"kv_cache_dtype={found!r} is not available here.{did_you_mean(found, KV_CACHE_DTYPES)}")
        check_boolean("calculate_kv_scales", self.calculate_kv_scales)
        if self.calculate_kv_scales and not self.keeps_fp8:
            raise ConfigError(
                "calculate_kv_scales=True is of keys and values in float8; give kv_cache_dtype='fp8', too, or leave it "
                "out."
            )
        if self.calculate_kv_scales and self.num_ranks > 1:
            raise ConfigError(
                f"calculate_kv_scales=True is not yet available with {self.ranks_argument}; give one of the two."
            )
        if self.quantization is not None:
            self.check_beside_quantised(f"quantization={self.quantization!r}")

    def _check_lora(self) -> None:
        """Resolve the fields about adapters. Raises `ConfigError` for what these cannot be given with."""
        check_boolean("enable_lora", self.enable_lora)
        for name in ("max_loras", "max_lora_rank"):
            _check_count(name, getattr(self, name), MAX_LORA_COUNT)
        if self.max_cpu_loras is None:
            object.__setattr__(self, "max_cpu_loras", self.max_loras)
        _check_count("max_cpu_loras", self.max_cpu_loras, MAX_LORA_COUNT)
        names = self.lora_target_modules
        if names is not None:
            if isinstance(names, str) or not names or not all(isinstance(each, str) and each for each in names):
                raise ConfigError(f"lora_target_modules={names!r}; it must be a list of names of modules, or None.")
            object.__setattr__(self, "lora_target_modules", tuple(names))
        if not self.enable_lora:
            if names is not None:
                raise ConfigError(f"lora_target_modules={list(names)} is of adapters; give enable_lora=True, too.")
            return
        if self.max_cpu_loras < self.max_loras:  # type: ignore[operator]  # a number from here on
            raise ConfigError(
                f"max_cpu_loras={self.max_cpu_loras} is less than max_loras={self.max_loras}: what lies on the device "
                "is on the CPU, too. Raise it, or leave it out."
            )
        for is_given, what in (
            (self.shares_experts, f"enable_expert_parallel with data_parallel_size={self.data_parallel_size}"),
            (self._drafts_by_head(), "speculative_config with a method other than 'ngram' and 'draft_model'"),
            (self.runner == "pooling", "runner='pooling'"),
        ):
            if is_given:
                raise ConfigError(f"{what} is not yet available with enable_lora=True; give one of the two.")

    def check_beside_quantised(self, quantised: str) -> None:
        """Raise `ConfigError` for an argument that cannot be given with quantised weights; `quantised` names these."""
        for is_given, what in (
            (self.enable_lora and self.num_ranks > 1, f"enable_lora with {self.ranks_argument}"),
            (self.speculative is not None, "speculative_config"),
            (self.enable_prompt_embeds, "enable_prompt_embeds"),
            (self.runner == "pooling", "runner='pooling'"),
        ):
            if is_given:
                raise ConfigError(f"{what} is not yet available with {quantised}; give one of the two.")


def check_boolean(name: str, value: object, wanted: str = "True or False") -> None:
    """Raise `ConfigError` unless `value` is a bool."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}; it must be {wanted}.")


def _check_count(name: str, value: object, largest: int) -> None:
    """Raise `ConfigError` unless `value` is a whole number from 1 to `largest`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r}; it must be a whole number, 1 or more.")
    if value > largest:
        raise ConfigError(f"{name}={value}; it must be at most {largest}.")
