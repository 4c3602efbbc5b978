"""The parts of vLLM's offline interface that are missing here or differ, as plain data.

The version compared with is `VLLM_VERSION`. Every argument of its `LLM` (`EngineArgs` included), every public field of
its `SamplingParams`, `RequestOutput` and `CompletionOutput`, and every public method of its `LLM` either exists here
under the same name or is listed here; `tests/runner/common/test_vllm_interface.py` compares the lists with our
signatures and with the table in docs/generation.md. To implement one of them, add the parameter or field and delete
its line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

VLLM_VERSION = "0.33.0"

VLLM_METHODS: Mapping[str, tuple[str, ...]] = {
    "apply_model": ("func",),
    "beam_search": ("prompts", "params", "lora_request", "use_tqdm", "concurrency_limit", "priority"),
    "chat": (
        "messages",
        "sampling_params",
        "use_tqdm",
        "lora_request",
        "priority",
        "chat_template",
        "chat_template_content_format",
        "add_generation_prompt",
        "continue_final_message",
        "tools",
        "chat_template_kwargs",
        "tokenization_kwargs",
        "mm_processor_kwargs",
    ),
    "classify": ("prompts", "pooling_params", "use_tqdm", "lora_request", "tokenization_kwargs"),
    "collective_rpc": ("method", "timeout", "args", "kwargs"),
    "embed": ("prompts", "use_tqdm", "pooling_params", "lora_request", "tokenization_kwargs"),
    "encode": ("prompts", "pooling_params", "use_tqdm", "lora_request", "pooling_task", "tokenization_kwargs"),
    "enqueue": (
        "prompts",
        "sampling_params",
        "lora_request",
        "priority",
        "use_tqdm",
        "tokenization_kwargs",
        "mm_processor_kwargs",
    ),
    "enqueue_chat": (
        "messages",
        "sampling_params",
        "use_tqdm",
        "lora_request",
        "priority",
        "chat_template",
        "chat_template_content_format",
        "add_generation_prompt",
        "continue_final_message",
        "tools",
        "chat_template_kwargs",
        "tokenization_kwargs",
        "mm_processor_kwargs",
    ),
    "finish_weight_update": ("weight_version",),
    "from_engine_args": ("engine_args",),
    "generate": (
        "prompts",
        "sampling_params",
        "use_tqdm",
        "lora_request",
        "priority",
        "tokenization_kwargs",
        "mm_processor_kwargs",
    ),
    "get_default_sampling_params": (),
    "get_metrics": (),
    "get_tokenizer": (),
    "get_weight_version": (),
    "get_world_size": ("include_dp",),
    "init_weight_transfer_engine": ("request",),
    "llm_engine": (),
    "release_kv_cache_memory": (),
    "reset_mm_cache": (),
    "reset_prefix_cache": ("reset_running_requests", "reset_connector"),
    "score": ("data_1", "data_2", "use_tqdm", "pooling_params", "lora_request", "tokenization_kwargs", "chat_template"),
    "shutdown_weight_transfer_engine": (),
    "sleep": ("level", "mode"),
    "start_draft_weight_update": (),
    "start_profile": ("profile_prefix", "delay_iterations", "max_iterations", "profiler_kwargs"),
    "start_weight_update": (),
    "stop_profile": (),
    "update_weight_version": ("new_version",),
    "update_weights": ("request",),
    "wait_for_completion": ("output_type", "use_tqdm"),
    "wake_up": ("tags",),
}
"""Public methods of vLLM's `LLM`, and its engine, each with its parameters in order."""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """An argument of vLLM's that has no effect here, with what to do instead."""

    instead: str
    """What to do instead, as a sentence."""
    accepted: tuple[object, ...] = (None,)
    """Values that ask for what happens anyway, vLLM's default among them."""
    accepts_any: bool = False
    """Whether every value is accepted, because none changes what is generated."""


_NO_LORA = "adapters of plain LoRA change linear layers and embeddings: give enable_lora and a lora_request."
_NO_SPECULATION = "give speculative_config."
_NO_POOLER = "pooling follows the model's modules.json; give PoolingParams for what varies."
_NO_QUANTIZATION = "a checkpoint's own config says how it is quantised; quantization='int8' quantises a plain one."
_NO_STRUCTURE = "give each request its structured_outputs; llguidance compiles them."
_NO_PARALLELISM = (
    "of the kinds of parallelism, this version has tensor_parallel_size, pipeline_parallel_size and data_parallel_size."
)
_NO_EXPERT_PARALLELISM = "experts stay on the ranks where enable_expert_parallel puts them."
_NO_MEDIA = "this version accepts text only."
_NO_OFFLOADING = "weights and cache lie on the device: use a smaller model, or lower max_model_len."
_NO_SLEEP = "LLM.sleep and wake_up are here, or close the LLM and make another, which starts from the compile cache."
_NO_LOGGING = "nothing is logged unless asked for: pass on_phase, or read get_metrics()."
_NO_PROFILER = "use torch.profiler around generate."
_NO_TRANSFER = "keys and values stay in this process."
_NO_STATE_SPACE = "states are float32; cached_states and enable_prefix_caching say which are kept."
_NO_SERVER = "LLM is not a server."
_NO_WATERMARK = "tokens are not watermarked."
_HUB = "set it in the environment of huggingface_hub"

UNAVAILABLE_ARGUMENTS: Mapping[str, Unavailable] = {
    "additional_config": Unavailable("there are no platform plugins.", (None, {})),
    "aggregate_engine_logging": Unavailable(_NO_LOGGING, (False,)),
    "all2all_backend": Unavailable(_NO_EXPERT_PARALLELISM, ("allgather_reducescatter", None)),
    "allow_deprecated_quantization": Unavailable(_NO_QUANTIZATION, (False,)),
    "allowed_local_media_path": Unavailable(_NO_MEDIA, ("", None)),
    "allowed_media_domains": Unavailable(_NO_MEDIA, (None, [])),
    "attention_config": Unavailable("give attention_backend.", (None, {})),
    "aux_output_config": Unavailable("there are no auxiliary outputs.", (None, {})),
    "code_revision": Unavailable("the code has the revision of the model: give revision."),
    "collect_detailed_traces": Unavailable(_NO_LOGGING),
    "config_format": Unavailable("configurations are Hugging Face's.", ("auto", "hf", None)),
    "cp_kv_cache_interleave_size": Unavailable(_NO_PARALLELISM),
    "cpu_distributed_timeout_seconds": Unavailable(_NO_PARALLELISM),
    "cpu_offload_gb": Unavailable(_NO_OFFLOADING, (0, None)),
    "cpu_offload_params": Unavailable(_NO_OFFLOADING, (None, set(), [])),
    "cudagraph_metrics": Unavailable("counts of replays are in runner.counters.", (False,)),
    "custom_histogram_buckets": Unavailable("get_metrics() has counters and gauges."),
    "data_parallel_address": Unavailable(_NO_PARALLELISM),
    "data_parallel_backend": Unavailable(_NO_PARALLELISM, ("mp", None)),
    "data_parallel_external_lb": Unavailable(_NO_PARALLELISM, (False,)),
    "data_parallel_hybrid_lb": Unavailable(_NO_PARALLELISM, (False,)),
    "data_parallel_multi_port_external_lb": Unavailable(_NO_PARALLELISM, (False,)),
    "data_parallel_rank": Unavailable(_NO_PARALLELISM, (None, 0)),
    "data_parallel_rpc_port": Unavailable(_NO_PARALLELISM),
    "data_parallel_size_local": Unavailable(_NO_PARALLELISM, (None, 1)),
    "data_parallel_start_rank": Unavailable(_NO_PARALLELISM, (None, 0)),
    "dbo_decode_token_threshold": Unavailable(_NO_EXPERT_PARALLELISM, (32,)),
    "dbo_prefill_token_threshold": Unavailable(_NO_EXPERT_PARALLELISM, (512,)),
    "dcp_comm_backend": Unavailable(_NO_PARALLELISM),
    "dcp_kv_cache_interleave_size": Unavailable(_NO_PARALLELISM, (1,)),
    "dcp_q_replicate": Unavailable(_NO_PARALLELISM),
    "decode_context_parallel_size": Unavailable(_NO_PARALLELISM, (1,)),
    "default_mm_loras": Unavailable(_NO_LORA),
    "device_ids": Unavailable("give device, or CUDA_VISIBLE_DEVICES."),
    "diffusion_config": Unavailable("models generate one token after the other."),
    "disable_cascade_attn": Unavailable("there is no cascade attention to disable.", accepts_any=True),
    "disable_chunked_mm_input": Unavailable(_NO_MEDIA, (False,)),
    "disable_custom_all_reduce": Unavailable("there is none of vLLM's to disable.", accepts_any=True),
    "disable_hybrid_kv_cache_manager": Unavailable(
        "layers with sliding windows free the blocks behind them; no token depends on it.", (None, False)
    ),
    "disable_log_stats": Unavailable(_NO_LOGGING, accepts_any=True),
    "disable_nccl_for_dp_synchronization": Unavailable(_NO_PARALLELISM, (None, True, False)),
    "disable_sliding_window": Unavailable("windows are the model's: change them with hf_overrides.", (False,)),
    "download_dir": Unavailable(f"{_HUB}: HF_HUB_CACHE."),
    "dp_sync_interval": Unavailable(_NO_PARALLELISM, (16,)),
    "ec_manager_config": Unavailable(_NO_MEDIA, (None, {})),
    "ec_transfer_config": Unavailable(_NO_TRANSFER),
    "elastic_ep_max_dp_size": Unavailable(_NO_EXPERT_PARALLELISM),
    "enable_batch_sharded_sampling": Unavailable(_NO_PARALLELISM, (None, False)),
    "enable_chunked_prefill": Unavailable(
        "prompts are computed in chunks: raise max_num_batched_tokens to compute them whole.",
        (None, True),
    ),
    "enable_cumem_allocator": Unavailable(_NO_SLEEP, (False,)),
    "enable_dbo": Unavailable(_NO_EXPERT_PARALLELISM, (False,)),
    "enable_elastic_ep": Unavailable(_NO_EXPERT_PARALLELISM, (False,)),
    "enable_ep_weight_filter": Unavailable(_NO_EXPERT_PARALLELISM, (False,)),
    "enable_eplb": Unavailable(_NO_EXPERT_PARALLELISM, (False,)),
    "enable_fault_tolerance": Unavailable(_NO_PARALLELISM, (False,)),
    "enable_flashinfer_autotune": Unavailable("kernels are tuned by compilation_config.", (None, False)),
    "enable_hc_sp": Unavailable(_NO_PARALLELISM, (False,)),
    "enable_layerwise_nvtx_tracing": Unavailable(_NO_PROFILER, (False,)),
    "enable_logging_iteration_details": Unavailable(_NO_LOGGING, (False,)),
    "enable_mamba_cache_stochastic_rounding": Unavailable(_NO_STATE_SPACE, (False,)),
    "enable_mamba_shared_prefix_checkpoint": Unavailable(_NO_STATE_SPACE, (False,)),
    "enable_mfu_metrics": Unavailable(_NO_LOGGING, (False,)),
    "enable_mixed_moe_lora_format": Unavailable(_NO_LORA, (False,)),
    "enable_mm_embeds": Unavailable(_NO_MEDIA, (False,)),
    "enable_mm_processor_stats": Unavailable(_NO_MEDIA, (False,)),
    "enable_moe_shared_loras": Unavailable(_NO_LORA, (False,)),
    "enable_nccl_comm_suspend": Unavailable(_NO_SLEEP, (False,)),
    "enable_return_routed_experts": Unavailable("routing is not returned.", (False,)),
    "enable_shm_tensor_arena": Unavailable(_NO_PARALLELISM, (False,)),
    "enable_tower_connector_lora": Unavailable(_NO_LORA, (False,)),
    "enable_trace_replay": Unavailable("prompt_logprobs scores a text that is given.", (False,)),
    "engram_config": Unavailable("no such model is supported."),
    "eplb_config": Unavailable(_NO_EXPERT_PARALLELISM, (None, {})),
    "expert_placement_strategy": Unavailable(_NO_EXPERT_PARALLELISM, ("linear",)),
    "fail_on_environ_validation": Unavailable("unknown PIECEGRAPH_* variables are errors already.", (False,)),
    "fault_tolerance_config": Unavailable(_NO_PARALLELISM, (None, {})),
    "fully_sharded_loras": Unavailable(_NO_LORA, (False,)),
    "gdn_prefill_backend": Unavailable(_NO_STATE_SPACE),
    "hf_config_path": Unavailable("the configuration is the model's: change it with hf_overrides."),
    "hf_token": Unavailable(f"{_HUB}: HF_TOKEN.", (None, True)),
    "ignore_patterns": Unavailable("only files that are read are fetched.", accepts_any=True),
    "interleave_mm_strings": Unavailable(_NO_MEDIA, (False,)),
    "io_processor_plugin": Unavailable("there are no plugins."),
    "ir_op_priority": Unavailable("give compilation_config with passes.", (None, {})),
    "jit_monitor_mode": Unavailable("give strict.", ("warn", None)),
    "jit_monitor_verbose": Unavailable(_NO_LOGGING, (False,)),
    "kda_decode_backend": Unavailable(_NO_STATE_SPACE, (None, "auto")),
    "kda_prefill_backend": Unavailable(_NO_STATE_SPACE, (None, "auto")),
    "kernel_config": Unavailable("give compilation_config with passes.", (None, {})),
    "kv_cache_dtype_skip_layers": Unavailable("all layers have kv_cache_dtype.", (None, [])),
    "kv_cache_metrics": Unavailable(_NO_LOGGING, (False,)),
    "kv_cache_metrics_sample": Unavailable(_NO_LOGGING, (0.01,)),
    "kv_events_config": Unavailable(_NO_TRANSFER),
    "kv_offloading_backend": Unavailable(_NO_OFFLOADING, ("native",)),
    "kv_offloading_size": Unavailable(_NO_OFFLOADING, (None, 0)),
    "kv_sharing_fast_prefill": Unavailable("every token is computed by all layers.", (False,)),
    "kv_transfer_config": Unavailable(_NO_TRANSFER),
    "language_model_only": Unavailable(_NO_MEDIA, accepts_any=True),
    "limit_mm_per_prompt": Unavailable(_NO_MEDIA, (None, {})),
    "linear_backend": Unavailable("give compilation_config with passes.", ("auto",)),
    "log_config_file": Unavailable("configure Python's logging."),
    "log_level": Unavailable("configure Python's logging."),
    "logging_config": Unavailable("configure Python's logging."),
    "long_prefill_token_threshold": Unavailable("lower max_num_batched_tokens.", (0, None)),
    "long_prefill_token_threshold_adaptive": Unavailable("lower max_num_batched_tokens.", (False,)),
    "lora_dtype": Unavailable(_NO_LORA, ("auto", None)),
    "mamba_backend": Unavailable(_NO_STATE_SPACE, ("triton", None)),
    "mamba_block_size": Unavailable(_NO_STATE_SPACE),
    "mamba_cache_dtype": Unavailable(_NO_STATE_SPACE, ("auto",)),
    "mamba_cache_mode": Unavailable(_NO_STATE_SPACE),
    "mamba_cache_philox_rounds": Unavailable(_NO_STATE_SPACE, (0,)),
    "mamba_config": Unavailable(_NO_STATE_SPACE, (None, {})),
    "mamba_ssm_cache_dtype": Unavailable(_NO_STATE_SPACE, ("auto",)),
    "mamba_ssu_algorithm": Unavailable(_NO_STATE_SPACE),
    "max_cudagraph_capture_size": Unavailable("give cudagraph_capture_sizes."),
    "max_lora_cls_labels": Unavailable(_NO_LORA),
    "max_num_active_seqs": Unavailable("give max_num_seqs."),
    "max_num_queued_reqs": Unavailable(_NO_SERVER),
    "max_num_queued_tokens": Unavailable(_NO_SERVER),
    "max_num_scheduled_tokens": Unavailable("give max_num_batched_tokens."),
    "max_parallel_loading_workers": Unavailable("each rank reads its own weights.", accepts_any=True),
    "media_io_kwargs": Unavailable(_NO_MEDIA, (None, {})),
    "mm_device_do_normalize": Unavailable(_NO_MEDIA, (None, True)),
    "mm_encoder_attn_backend": Unavailable(_NO_MEDIA),
    "mm_encoder_attn_dtype": Unavailable(_NO_MEDIA),
    "mm_encoder_fp8_scale_path": Unavailable(_NO_MEDIA),
    "mm_encoder_fp8_scale_save_margin": Unavailable(_NO_MEDIA, (1.5,)),
    "mm_encoder_fp8_scale_save_path": Unavailable(_NO_MEDIA),
    "mm_encoder_only": Unavailable(_NO_MEDIA, (False,)),
    "mm_encoder_tp_mode": Unavailable(_NO_MEDIA, ("weights",)),
    "mm_hasher_algorithm": Unavailable(_NO_MEDIA, ("blake3", None)),
    "mm_ipc_gpu_memory_gb": Unavailable(_NO_MEDIA, (0,)),
    "mm_processor_cache_gb": Unavailable(_NO_MEDIA, (4, 0)),
    "mm_processor_cache_type": Unavailable(_NO_MEDIA, ("lru", None)),
    "mm_processor_device": Unavailable(_NO_MEDIA, ("auto",)),
    "mm_processor_kwargs": Unavailable(_NO_MEDIA, (None, {})),
    "mm_shm_cache_max_object_size_mb": Unavailable(_NO_MEDIA, (128,)),
    "mm_tensor_ipc": Unavailable(_NO_MEDIA, ("direct_rpc",)),
    "model_class_overrides": Unavailable("models are transformers' classes.", (None, {})),
    "model_impl": Unavailable("models are transformers' classes.", ("auto", "transformers", None)),
    "model_loader_extra_config": Unavailable("there are no options of loaders.", (None, {})),
    "model_weights": Unavailable("weights come from model.", ("", None)),
    "moe_backend": Unavailable("give compilation_config with passes.", ("auto",)),
    "monokernel": Unavailable("give compilation_config with passes.", (False,)),
    "num_gpu_blocks_override": Unavailable("give num_kv_blocks."),
    "numa_bind": Unavailable("start the process under numactl.", (False,)),
    "numa_bind_cpus": Unavailable("start the process under numactl."),
    "numa_bind_nodes": Unavailable("start the process under numactl."),
    "offload_backend": Unavailable(_NO_OFFLOADING, ("auto", None)),
    "offload_group_size": Unavailable(_NO_OFFLOADING, (0,)),
    "offload_num_in_group": Unavailable(_NO_OFFLOADING, (1,)),
    "offload_params": Unavailable(_NO_OFFLOADING, (None, set(), [])),
    "offload_prefetch_step": Unavailable(_NO_OFFLOADING, (1,)),
    "optimization_level": Unavailable("give compiler and cudagraph_mode, or enforce_eager.", (2, None)),
    "otlp_traces_endpoint": Unavailable(_NO_LOGGING),
    "per_request_spec_decode_metrics": Unavailable(_NO_SPECULATION, ("none",)),
    "performance_mode": Unavailable("give max_num_batched_tokens and max_num_seqs.", ("balanced", None)),
    "pooler_config": Unavailable(_NO_POOLER),
    "prefill_context_parallel_size": Unavailable(_NO_PARALLELISM, (1,)),
    "prefill_schedule_interval": Unavailable("every step admits prompts.", (1,)),
    "prefix_cache_retention_interval": Unavailable("prefixes stay until their memory is needed.", (0, None)),
    "prefix_caching_hash_algo": Unavailable("prefixes are named by SHA-256.", accepts_any=True),
    "prefix_match_unit": Unavailable("prefixes are found by blocks: give block_size."),
    "profiler_config": Unavailable(_NO_PROFILER, (None, {})),
    "pt_load_map_location": Unavailable("weights are read to the CPU, then copied.", ("cpu",)),
    "quantization_config": Unavailable(_NO_QUANTIZATION),
    "ray_workers_use_nsight": Unavailable(_NO_PARALLELISM, (False,)),
    "reasoning_config": Unavailable(_NO_SERVER, (None, {})),
    "reasoning_parser": Unavailable(_NO_SERVER, ("", None)),
    "reasoning_parser_plugin": Unavailable(_NO_SERVER, (None, "")),
    "renderer_num_workers": Unavailable("prompts are tokenized by the caller's thread.", (1,)),
    "replayssm_buffer_len": Unavailable(_NO_STATE_SPACE, (16,)),
    "return_sampling_mask": Unavailable("masks are not returned.", (False,)),
    "safetensors_load_strategy": Unavailable("files are read ahead while torch is imported.", accepts_any=True),
    "safetensors_prefetch_block_size": Unavailable("files are read ahead.", accepts_any=True),
    "safetensors_prefetch_num_threads": Unavailable("files are read ahead.", accepts_any=True),
    "scheduler_cls": Unavailable("drive llm.engine with a loop of your own."),
    "scheduler_reserve_full_isl": Unavailable("a prompt is admitted when all of it would fit.", (True,)),
    "scheduling_policy": Unavailable("requests go by priority, equal ones as they came.", ("fcfs", "priority", None)),
    "served_model_name": Unavailable(_NO_SERVER, accepts_any=True),
    "show_hidden_metrics_for_version": Unavailable(_NO_LOGGING),
    "shutdown_timeout": Unavailable("close() does not wait.", accepts_any=True),
    "skip_mm_profiling": Unavailable(_NO_MEDIA, accepts_any=True),
    "sleep_mode_backend": Unavailable(_NO_SLEEP, ("cumem",)),
    "sleep_mode_offload_cudagraph": Unavailable(_NO_SLEEP, (False,)),
    "sleep_preserve_parameter_names": Unavailable(_NO_SLEEP, (None, [])),
    "sparse_indexer_topk_backend": Unavailable("no such model is supported.", ("auto",)),
    "spec_method": Unavailable(_NO_SPECULATION),
    "spec_model": Unavailable(_NO_SPECULATION),
    "spec_tokens": Unavailable(_NO_SPECULATION),
    "specialize_active_lora": Unavailable(_NO_LORA, (False,)),
    "stream_interval": Unavailable("stream() yields every token.", (1, None)),
    "structured_outputs_config": Unavailable(_NO_STRUCTURE, (None, {})),
    "swa_bounded_replay": Unavailable("layers with sliding windows free the blocks behind them.", (True, None)),
    "tokenizer_mode": Unavailable("tokenizers are transformers' own.", ("auto", "hf", None)),
    "tokenizer_revision": Unavailable("the tokenizer has the revision of the model: give a folder as tokenizer."),
    "tokens_only": Unavailable("give skip_tokenizer_init.", (False,)),
    "ubatch_size": Unavailable(_NO_EXPERT_PARALLELISM, (0,)),
    "use_fp64_gumbel": Unavailable("noise is drawn in 32 bits.", (False,)),
    "use_replayssm": Unavailable(_NO_STATE_SPACE, (False,)),
    "use_tqdm_on_load": Unavailable("pass on_phase to follow loading.", accepts_any=True),
    "video_pruning_method": Unavailable(_NO_MEDIA, ("evs",)),
    "video_pruning_rate": Unavailable(_NO_MEDIA),
    "watchdog_config": Unavailable(_NO_SERVER, (None, {})),
    "watermark": Unavailable("a prompt is admitted when all of it would fit.", (0.0,)),
    "watermark_config": Unavailable(_NO_WATERMARK),
    "weight_transfer_config": Unavailable("give other weights to LLM.reload_weights.", (None, {})),
    "worker_cls": Unavailable(_NO_PARALLELISM, ("auto", None)),
    "worker_extension_cls": Unavailable(_NO_PARALLELISM, ("", None)),
}
"""Arguments of vLLM's `LLM` that have no effect here, and the values that are accepted all the same."""

OLDER_ARGUMENTS: Mapping[str, Unavailable] = {
    "disable_async_output_proc": Unavailable("give async_scheduling.", (False,)),
    "disable_mm_preprocessor_cache": Unavailable(_NO_MEDIA, accepts_any=True),
    "enable_prompt_adapter": Unavailable("prompt adapters are not available.", (False,)),
    "guided_decoding_backend": Unavailable(_NO_STRUCTURE, (None, "auto", "xgrammar")),
    "lora_modules": Unavailable(_NO_LORA),
    "max_seq_len_to_capture": Unavailable("graphs serve all lengths.", accepts_any=True),
    "multi_step_stream_outputs": Unavailable("stream() yields every token.", accepts_any=True),
    "num_lookahead_slots": Unavailable(_NO_SPECULATION, (0,)),
    "num_scheduler_steps": Unavailable("give async_scheduling.", (1,)),
    "num_speculative_tokens": Unavailable(_NO_SPECULATION),
    "override_neuron_config": Unavailable("no such device is supported.", (None, {})),
    "override_pooler_config": Unavailable(_NO_POOLER),
    "preemption_mode": Unavailable("a preempted request is computed again.", (None, "recompute")),
    "rope_scaling": Unavailable('give hf_overrides={"rope_parameters": {...}}.'),
    "rope_theta": Unavailable('give hf_overrides={"rope_parameters": {...}}.'),
    "scheduler_delay_factor": Unavailable("every step admits prompts.", (0.0,)),
    "speculative_model": Unavailable(_NO_SPECULATION),
    "swap_space": Unavailable("a preempted request is computed again, not swapped.", accepts_any=True),
    "task": Unavailable("give runner='pooling', and convert='embed' or 'classify'.", ("auto", "generate", None)),
    "use_v2_block_manager": Unavailable("there is one block manager.", accepts_any=True),
}
"""Arguments that earlier versions of vLLM's `LLM` had, which scripts still give."""

DIFFERENT_ARGUMENTS: Mapping[str, str] = {
    "distributed_executor_backend": "`uniproc` (also `uni`), `mp`, `ray` and `external_launcher`",
    "distributed_timeout_seconds": "of a step, not of the start; the default is 8",
    "speculative_config": "ngram, draft_model, eagle3 and mtp; with a seed, sampled tokens are those without drafts",
    "attention_backend": "`flash_attn`, `triton` and `sdpa`, also by vLLM's names of them; None is `auto`",
    "async_scheduling": "also: on the CPU it is off unless asked for",
    "block_size": "None is 16",
    "compilation_config": "a `CompileConfig` or a dictionary of its fields, which may have vLLM's `mode`, "
    "`cudagraph_mode` and `cudagraph_capture_sizes`; or a level, 0 to 3, where 0 compiles nothing",
    "cudagraph_capture_sizes": 'tokens, as vLLM\'s, ascending; or "traffic": those that suit what was run',
    "data_parallel_size": "engines in processes of their own, behind one `LLM`, on one machine",
    "dtype": "`float32`, `bfloat16`, `float16` or `auto`: on a CPU bfloat16 for checkpoints of 16 bits if the "
    "processor lists `avx512_bf16`, `amx_bf16` or ARM's `bf16` (and for quantised ones), else float32",
    "enable_prefix_caching": "None is on",
    "enable_prompt_embeds": "steps that compute such a prompt run the model's own code, without graphs",
    "generation_config": "`auto` or `vllm`, not a folder",
    "gpu_memory_utilization": "the default is 0.9",
    "hf_overrides": "a dictionary, not a callable",
    "kv_cache_dtype": "`auto`, `fp8` or `fp8_e4m3`, with scales (`calculate_kv_scales`); with triton or sdpa",
    "load_format": "`auto`, `safetensors`, `gguf` or `dummy`",
    "lora_target_modules": "None is every linear layer and embedding, the output layer included",
    "max_cpu_loras": "None is max_loras; an adapter that has gone is read again",
    "max_lora_rank": "any number, 16 unless given",
    "max_model_len": "no -1: give a number, or None for the model's",
    "max_num_batched_tokens": "None is 2048 on the CPU, 8192 on a GPU",
    "max_logprobs": "the default is -1, the whole vocabulary",
    "max_num_seqs": "None is 256, or max_num_batched_tokens if that is less",
    "model": "None is the embedded model",
    "override_generation_config": "fields that sampling has; others are refused",
    "quantization": "`int8`, `int4` or `fp8`, made from a plain checkpoint, `gguf`, or None (as stored)",
    "enable_expert_parallel": "among the ranks of tensor_parallel_size and data_parallel_size",
    "pipeline_parallel_size": "for models with a plan in transformers",
    "tensor_parallel_size": "for models with a plan in transformers",
    "trust_remote_code": "the model's code has to trace to one graph",
}
"""Arguments that both have and that differ, each with the difference."""

UNAVAILABLE_SAMPLING_PARAMS: Mapping[str, str] = {
    "logprob_token_ids": "ask for `logprobs=-1`, and pick",
    "output_text_buffer_length": "vLLM's own",
    "prompt_logprob_start": "ask for `prompt_logprobs`, and pick",
    "prompt_logprob_token_ids": "ask for `prompt_logprobs=-1`, and pick",
    "repetition_detection": "use `repetition_penalty`",
    "routed_experts_prompt_start": "routing is not returned",
    "skip_clone": "parameters are never copied",
    "skip_reading_prefix_cache": "give prompts a `cache_salt` of their own",
    "spaces_between_special_tokens": "texts are what the tokenizer decodes",
    "stream_interval": "`stream` yields every token",
    "thinking_token_budget": "use `max_tokens`",
    "trace_decode_token_ids": "use `prompt_logprobs`",
    "watermarking": "tokens are not watermarked",
}
"""Fields of vLLM's `SamplingParams` that ours lacks, each with what to do."""

DIFFERENT_SAMPLING_PARAMS: Mapping[str, str] = {
    "seed": "the noise depends on the seed and the position alone, not on the prompt too; completion `i` of `n` "
    "draws with `seed + i`",
}
"""Fields that both have and that differ, each with the difference."""

UNAVAILABLE_OUTPUTS: Mapping[str, str] = {
    "encoder_prompt": "this version runs decoders only",
    "encoder_prompt_token_ids": "this version runs decoders only",
    "lora_request": "outputs have the order of the prompts",
    "num_cache_creation_tokens": "see `LLM.get_metrics`",
}
"""Fields and methods of vLLM's `RequestOutput` that ours lacks."""

DIFFERENT_OUTPUTS: Mapping[str, str] = {}

UNAVAILABLE_COMPLETIONS: Mapping[str, str] = {
    "lora_request": "outputs have the order of the prompts",
    "routed_experts": "routing is not returned",
    "sampling_mask": "masks are not returned",
    "spec_decode_metrics": "not yet available",
    "weight_versions": "weights have no versions: `LLM.reload_weights` waits until no request runs",
}
"""Fields and methods of vLLM's `CompletionOutput` that ours lacks."""

DIFFERENT_COMPLETIONS: Mapping[str, str] = {}

UNAVAILABLE_METHODS: Mapping[str, str] = {
    "apply_model": "the module is `llm.compiled`'s",
    "enqueue": "use `llm.llm_engine.add_request`",
    "enqueue_chat": "use `llm.llm_engine.add_request`",
    "finish_weight_update": "use `LLM.reload_weights`",
    "from_engine_args": "give the arguments to `LLM`",
    "get_weight_version": "weights have no versions: `LLM.reload_weights` replaces all",
    "get_world_size": "the product of `tensor_parallel_size`, `pipeline_parallel_size` and `data_parallel_size`",
    "init_weight_transfer_engine": "use `LLM.reload_weights`",
    "release_kv_cache_memory": _NO_SLEEP[:-1],
    "reset_mm_cache": "this version accepts text only",
    "shutdown_weight_transfer_engine": "use `LLM.reload_weights`",
    "start_draft_weight_update": "use `LLM.reload_weights`",
    "start_profile": _NO_PROFILER[:-1],
    "start_weight_update": "use `LLM.reload_weights`",
    "stop_profile": _NO_PROFILER[:-1],
    "update_weight_version": "use `LLM.reload_weights`",
    "update_weights": "use `LLM.reload_weights`",
    "wait_for_completion": "step `llm.llm_engine`",
}
"""Public methods of vLLM's `LLM` that ours lacks, each with what to do."""

DIFFERENT_METHODS: Mapping[str, str] = {
    "sleep": "refuses while requests are unfinished; a CPU needs no enable_sleep_mode",
    "wake_up": "takes no tags; after level 2 weights are read again from their files",
    "beam_search": "shows no progress",
    "collective_rpc": "workers have the methods of `runner.distributed.worker.Worker`",
    "encode": "of tasks, `embed`, `classify` and `token_embed`",
    "get_metrics": "counters and gauges only, no histograms",
    "llm_engine": "`add_request`, `step`, `abort_request`, `has_unfinished_requests` and what else loops call; of "
    "configurations only `model_config`",
    "reset_prefix_cache": "prefixes of running requests are forgotten too, and they run on: it never fails",
}

OLDER_METHODS: Mapping[str, str] = {
    "set_tokenizer": "give `tokenizer` to `LLM`",
}
"""Methods that earlier versions of vLLM's `LLM` had, each with what to do."""

OLDER_METHOD_ARGUMENTS: Mapping[str, str] = {
    "prompt_token_ids": 'give the ids as prompts: [1, 2, 3], or {"prompt_token_ids": [1, 2, 3]}',
    "prompt_adapter_request": "prompt adapters are not available; leave it out",
    "guided_options_request": "give SamplingParams(structured_outputs=...)",
}
"""Arguments that `generate` and `chat` of earlier versions of vLLM had."""
