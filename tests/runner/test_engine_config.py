"""An argument that cannot be honoured is refused by name, before anything is loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from piecegraph import LLM
from piecegraph.errors import ConfigError, OutOfMemory, UnsupportedModel
from piecegraph.progress import BESIDE

REFUSED: list[tuple[dict[str, object], str]] = [
    ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 is not yet available; it must be 1"),
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
    ({"swap_space": 4}, "swap_space is an argument of vLLM's LLM that this one does not have"),
    ({"attention_backend": "tritn"}, "attention_backend='tritn' is unknown. Did you mean 'triton'?"),
    ({"max_num_seqs": 0}, "max_num_seqs=0; it must be a whole number, 1 or more"),
    ({"block_size": 2.5}, "block_size=2.5; it must be a whole number"),
    ({"max_model_len": -1}, "max_model_len=-1; it must be a whole number, 1 or more"),
    ({"max_model_len": 1}, "max_model_len=1 leaves no room for an answer"),
    ({"max_model_len": 1000}, "max_model_len=1000, but the model's positions end at 96"),
    ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5; it must be above 0, at most 1"),
    ({"compiler": "inducter"}, "compiler='inducter' is unknown. Did you mean 'inductor'?"),
    ({"enforce_eager": True, "compiler": "inductor"}, "contradict each other"),
    ({"compilation_config": {"split_op": ()}}, "unknown compile option 'split_op'. Did you mean 'split_ops'?"),
    ({"dtype": "float64"}, "dtype='float64' is unknown"),
    ({"device": "gpu"}, "device='gpu' is not a device"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[next(iter(options)) for options, _ in REFUSED])
def test_refused_by_name(llama_dir: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        LLM(llama_dir, skip_tokenizer_init=True, **{"device": "cpu", **options})  # type: ignore[arg-type]


def test_a_default_that_is_not_there_yet_is_noted(llm: LLM) -> None:
    """What runs instead of a default is told, not hidden."""
    assert any(note.startswith("cudagraph_mode: NONE runs") for note in llm.notes)


def test_enforce_eager_runs_pieces_uncompiled(llama_dir: Path) -> None:
    """And phases are told in the order they happen."""
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
    in_turn = dict.fromkeys(name for name in phases if name not in BESIDE)
    assert list(in_turn) == [
        *("import", "device", "config", "load", "trace", "passes", "split", "compile", "stitch", "buffers", "kv_cache"),
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
