"""An argument that cannot be honoured is refused by name, before anything is loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from piecegraph import LLM
from piecegraph.errors import ConfigError, OutOfMemory, UnsupportedModel
from piecegraph.progress import CONCURRENT_PHASES
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource

REFUSED: list[tuple[dict[str, object], str]] = [
    ({"tensor_parallel_size": 0}, "tensor_parallel_size=0; it must be a whole number, 1 or more"),
    ({"cudagraph_capture_sizes": [2, 1]}, "cudagraph_capture_sizes does not ascend: [2, 1]. Give [1, 2]"),
    ({"cudagraph_capture_sizes": [1, 1]}, "cudagraph_capture_sizes has duplicates: [1, 1]. Give [1]"),
    ({"cudagraph_capture_sizes": [0, 1]}, "cudagraph_capture_sizes has 0; sizes are whole numbers of tokens"),
    ({"cudagraph_capture_sizes": [9999]}, "ends at 9999, but a step computes at most max_num_batched_tokens=2048"),
    ({"cudagraph_capture_sizes": []}, "cudagraph_capture_sizes is empty"),
    ({"compile_sizes": [2, 1]}, "compile_sizes"),
    ({"graph_kind": "rec"}, "graph_kind='rec' is unknown"),
    ({"cudagraph_mode": "PIECWISE"}, "cudagraph_mode='PIECWISE' is unknown. Did you mean 'PIECEWISE'?"),
    ({"strict": True}, "strict=True allows no downgrade of cudagraph_mode='FULL_AND_PIECEWISE'"),
    ({"max_modellen": 3}, "LLM has no argument 'max_modellen'. Did you mean 'max_model_len'?"),
    ({"cpu_offload_gb": 4}, "cpu_offload_gb=4 is not available here: weights and cache lie on the device"),
    ({"quantization": "hqq"}, "quantization='hqq' is not available here; use quantization='int8' or 'int4' with"),
    ({"quantization": "int9"}, "quantization='int9' is unknown. Did you mean 'int8'?"),
    ({"quantization": "int8", "runner": "pooling"}, "runner='pooling' is not yet available with"),
    ({"quantization": "int8", "enable_prompt_embeds": True}, "enable_prompt_embeds is not yet available with"),
    ({"fully_sharded_loras": True}, "fully_sharded_loras=True is not available here: adapters of plain LoRA change"),
    ({"enable_lora": 1}, "enable_lora=1; it must be True or False"),
    ({"max_lora_rank": 0}, "max_lora_rank=0; it must be a whole number, 1 or more"),
    ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 2}, "max_cpu_loras=2 is less than max_loras=4"),
    ({"lora_target_modules": ["q_proj"]}, "lora_target_modules=['q_proj'] is of adapters; give enable_lora=True"),
    (
        {"enable_lora": True, "lora_target_modules": "q_proj"},
        "lora_target_modules='q_proj'; it must be a list of",
    ),
    (
        {"enable_lora": True, "enable_expert_parallel": True, "data_parallel_size": 2},
        "enable_expert_parallel with data_parallel_size=2 is not yet available with enable_lora=True",
    ),
    (
        {"enable_lora": True, "speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
        "a method other than 'ngram' and 'draft_model' is not yet available with enable_lora=True",
    ),
    ({"enable_chunked_prefill": False}, "enable_chunked_prefill=False is not available here: prompts are computed in"),
    ({"num_gpu_blocks_override": 8}, "num_gpu_blocks_override=8 is not available here: give num_kv_blocks."),
    ({"rope_scaling": {}}, 'give hf_overrides={"rope_parameters": {...}}'),
    ({"attention_backend": "tritn"}, "attention_backend='tritn' is unknown. Did you mean 'triton'?"),
    ({"max_num_seqs": 0}, "max_num_seqs=0; it must be a whole number, 1 or more"),
    (
        {"max_num_seqs": 4, "max_num_batched_tokens": 3},
        "max_num_batched_tokens=3 is less than max_num_seqs=4: a step computes one token or more for each",
    ),
    ({"block_size": 2.5}, "block_size=2.5; it must be a whole number"),
    ({"max_model_len": -1}, "max_model_len=-1; it must be a whole number, 1 or more"),
    ({"max_model_len": 1}, "max_model_len=1 leaves no room for an answer"),
    ({"max_model_len": 1000}, "max_model_len=1000, but the model's positions end at 96"),
    ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5; it must be above 0, at most 1"),
    ({"gpu_memory_utilization": True}, "gpu_memory_utilization=True; it must be above 0, at most 1"),
    ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization='0.9'; it must be above 0, at most 1"),
    ({"enable_prefix_caching": "no"}, "enable_prefix_caching='no'; it must be True or False"),
    ({"cached_states": 0}, "cached_states=0; it must be 1 or more, or None"),
    ({"cached_states": True}, "cached_states=True; it must be 1 or more"),
    ({"cached_states": 2, "enable_prefix_caching": False}, "cached_states is of cached prefixes"),
    ({"enable_prefix_caching": 0}, "enable_prefix_caching=0; it must be True or False"),
    ({"strict": 1}, "strict=1; it must be True or False"),
    ({"enforce_eager": "False"}, "enforce_eager='False'; it must be True or False"),
    ({"async_scheduling": "yes"}, "async_scheduling='yes'; it must be True, False or None"),
    ({"trust_remote_code": "no"}, "trust_remote_code='no'; it must be True or False"),
    ({"skip_tokenizer_init": None}, "skip_tokenizer_init=None; it must be True or False"),
    ({"compiler": "inducter"}, "compiler='inducter' is unknown. Did you mean 'inductor'?"),
    ({"enforce_eager": True, "compiler": "inductor"}, "contradict each other"),
    ({"compilation_config": {"split_op": ()}}, "unknown compile option 'split_op'. Did you mean 'split_ops'?"),
    ({"dtype": "float64"}, "dtype='float64' is unknown"),
    ({"compilation_config": "x"}, "compilation_config='x'; it must be a CompileConfig"),
    ({"hf_overrides": lambda config: config}, "hf_overrides is of type function; it must be a dictionary of fields"),
    ({"generation_config": "folder"}, "generation_config='folder' is unknown; it is 'auto' (the model's) or 'vllm'"),
    ({"override_generation_config": {"temprature": 1}}, "has 'temprature', which has no effect. Did you mean 'temp"),
    ({"device": "gpu"}, "device='gpu' is not a device"),
    ({"device": 5}, "device=5 is not a device"),
    ({"dtype": 5}, "dtype=5 is unknown"),
    ({"max_num_batched_tokens": 10**18}, "max_num_batched_tokens=1000000000000000000; it must be at most 4194304"),
    ({"max_num_seqs": 10**9}, "max_num_seqs=1000000000; it must be at most 65536"),
    ({"block_size": 2**40}, "it must be at most 65536"),
    ({"num_kv_blocks": 10**12}, "it must be at most 2147483647"),
    ({"max_model_len": 10**12}, "it must be at most 268435456"),
    ({"compile_sizes": ["a"]}, "compile_sizes='a'; it must be a whole number"),
    ({"compile_sizes": [10**9]}, "compile_sizes=1000000000; it must be at most"),
    ({"compile_workers": 10**9}, "compile_workers=1000000000; it is a number of processes from 0 to 1024"),
    ({"seed": -1}, "seed=-1; it must be a whole number from 0 to"),
    ({"seed": 2**70}, "it must be a whole number from 0 to 18446744073709551615"),
    ({"revision": "a\0b"}, "has a NUL character"),
    ({"tokenizer": "a\0"}, "tokenizer='a\\x00'; it must be a folder or a hub id"),
    ({"graph_kind": 5}, "graph_kind=5; it must be a string"),
]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("a/b\0c", "has a NUL character"),
        ("b" * 5000, "has 5000 characters; a path or a name has at most 4096"),
        (5, "model=5; it must be a folder, a .gguf file or a hub id"),
        (b"abc", "model=b'abc'; it must be a folder"),
    ],
)
def test_an_invalid_model_name_is_refused(model: object, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        LLM(model)  # type: ignore[arg-type]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[next(iter(options)) for options, _ in REFUSED])
def test_refused_by_name(llama_dir: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        LLM(llama_dir, **{"device": "cpu", "skip_tokenizer_init": True, **options})  # type: ignore[arg-type]


def test_prefix_caching_none_means_the_default() -> None:
    config = EngineConfig(source=ModelSource(model="x"), enable_prefix_caching=None)
    assert config.enable_prefix_caching is True


def test_a_default_that_is_not_there_yet_is_noted(llm: LLM) -> None:
    """A fallback from a default is reported in the notes."""
    assert any(note.startswith("cudagraph_mode: NONE runs") for note in llm.notes)


def test_enforce_eager_runs_pieces_uncompiled(llama_dir: Path) -> None:
    """Phases are also reported in the order in which they happen."""
    phases: list[str] = []
    with LLM(
        llama_dir,
        skip_tokenizer_init=True,
        enforce_eager=True,
        cudagraph_mode="NONE",
        enable_prefix_caching=False,
        num_kv_blocks=8,
        on_phase=lambda phase: phases.append(phase.name),
    ) as llm:
        assert "eager" in str(llm.compiled.report())
        assert llm.notes == ()
    in_turn = dict.fromkeys(name for name in phases if name not in CONCURRENT_PHASES)
    assert list(in_turn) == [
        *(
            "import",
            "device",
            "config",
            "kernels",
            "load",
            "trace",
            "passes",
            "split",
            "compile",
            "stitch",
            "buffers",
            "kv_cache",
        ),
        "engine",
    ]


def test_a_cache_too_small_is_out_of_memory(llama_dir: Path) -> None:
    with pytest.raises(OutOfMemory, match=r"and num_kv_blocks=2\. Lower max_model_len to at most 32"):
        LLM(llama_dir, skip_tokenizer_init=True, compiler="eager", num_kv_blocks=2)


def test_attention_that_disagrees_with_the_config_stops_before_compiling(llama_dir: Path) -> None:
    """Llama ignores layer_types: windows it never applies are refused after the trace, not compiled."""
    phases: list[str] = []
    overrides = {"layer_types": ["sliding_attention", "full_attention"]}
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.self_attn is sliding_attention by the config"):
        LLM(
            llama_dir,
            skip_tokenizer_init=True,
            hf_overrides=overrides,
            on_phase=lambda phase: phases.append(phase.name),
        )
    assert "compile" not in phases
