"""The floor plan: at most twelve files a folder, imports in one direction between rooms, every source under test."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.test_house import PACKAGES, ROOT, imported_names, ours, sources

MAX_FILES = 12
"""Source files of one folder, `__init__.py` aside."""

ENTRY = "."
"""The files that lie in a folder itself, beside its rooms."""

ROOMS: Mapping[str, Sequence[str]] = {
    "cache": ("upkeep", "store", "trust", "disk"),
    "compiler": (
        "verify",
        ".",
        "graphs",
        "plans",
        "building",
        "own_kernels",
        "store",
        "keys",
        "piece_compilers",
        "workers",
        "rewriting",
        "inductor",
        "splitting",
        "tracing",
        "common",
        "repeated_layers",
        "torch_compat",
        "triton",
    ),
    "compiler/graphs": (".", "replay", "recording"),
    "passes": (".", "quantised", "moe", "rotary", "cpu", "matching", "ops", "kernels"),
    "passes/ops": ("cpu", "quantised", "moe", "."),
    "passes/kernels": ("cpu", "moe", "norm", "linear", "lora", "quantised", "elementwise", "common"),
    "runner": (
        ".",
        "offline",
        "data_parallel",
        "clusters",
        "distributed",
        "sleeping",
        "startup",
        "late_start",
        "inspect",
        "speculative",
        "engine",
        "pooling",
        "traffic",
        "cudagraphs",
        "models",
        "tensor_parallel",
        "pipeline_parallel",
        "step",
        "kv_cache",
        "output",
        "prompts",
        "sampling",
        "state_layers",
        "lora",
        "device_memory",
        "attention",
        "scheduling",
        "common",
        "structured_output",
        "quantization",
        "traceable",
    ),
    "runner/attention": (".", "kernels", "flash_attn", "triton", "modules", "lifting", "varlen", "interface"),
    "runner/attention/triton": (".", "kernels", "layouts"),
    "runner/device_memory": (".", "kernels", "host_memory"),
    "runner/lora": (".", "kernels"),
    "runner/models": (".", "config", "checkpoint", "mechanisms", "common"),
    "runner/quantization": ("checkpoints", ".", "methods"),
    "runner/sampling": (".", "options", "kernels"),
    "runner/startup": (".", "memory", "drafts", "compiling"),
    "runner/speculative": ("heads", ".", "kernels", "common"),
    "runner/state_layers": ("modules", ".", "kernels", "libraries"),
    "runner/step": (".", "kernels", "state"),
    "runner/tensor_parallel": (".", "symmetric_memory"),
    "runner/tensor_parallel/symmetric_memory": (".", "kernels"),
    "tools": (".", "commands", "serve", "bench", "cache", "report", "command_line"),
    "tools/bench": ("compare", "growth", "scale", ".", "kernels", "measure", "startup"),
    "tools/serve": ("commands", "http", "endpoints", "protocol", "message_parsers", "engine"),
    "tools/cache": ("changing", "reading", "entries", "terminal"),
}
"""By folder, its rooms from the top to the bottom: each may import the rooms behind it, none before it."""


def rooms_of(folder: Path) -> set[str]:
    """Return the names of the folders in `folder` that hold source files, at any depth."""
    return {child.name for child in folder.iterdir() if child.is_dir() and any(child.rglob("*.py"))}


def folders() -> list[Path]:
    """Return every folder with rooms in it."""
    tops = [ROOT / package for package in PACKAGES]
    return [f for top in tops for f in (top, *sorted(top.rglob("*"))) if f.is_dir() and rooms_of(f)]


def source_of(name: str) -> Path | None:
    """Return the file that the dotted `name` imports or takes a value from; None if it is not ours."""
    parts = name.split(".")
    if parts[0] != "piecegraph":
        return None
    for end in range(len(parts), 1, -1):
        file = ROOT.joinpath(*parts[1:end]).with_suffix(".py")
        if file.exists():
            return file
        package = ROOT.joinpath(*parts[1:end], "__init__.py")
        if package.exists():
            return package
    return None


def room_in(folder: Path, file: Path) -> str:
    """Return the room of `folder` in which `file` lies."""
    parts = file.relative_to(folder).parts
    return parts[0] if len(parts) > 1 else ENTRY


def upward_imports(folder: Path, order: Sequence[str], file: Path, source: str) -> list[str]:
    """Return the imports of `source`, the text of `file`, that lead from its room to one before it in `order`."""
    room = room_in(folder, file)
    found = []
    for line, name in imported_names(ast.parse(source)):
        target = source_of(name)
        if target is None or not target.is_relative_to(folder) or target.name == "__init__.py":
            continue
        other = room_in(folder, target)
        if other != room and order.index(other) < order.index(room):
            found.append(f"{file.relative_to(ROOT)}:{line} imports {name}, but {other} comes before {room}")
    return found


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: str(folder.relative_to(ROOT)))
def test_every_room_has_its_place(folder: Path) -> None:
    """A new folder gets a line in `ROOMS`."""
    name = str(folder.relative_to(ROOT))
    has_files = any(file.name != "__init__.py" for file in folder.glob("*.py"))
    assert set(ROOMS.get(name, ())) == rooms_of(folder) | ({ENTRY} if has_files else set())


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: str(folder.relative_to(ROOT)))
def test_rooms_import_downward(folder: Path) -> None:
    order = ROOMS[str(folder.relative_to(ROOT))]
    files = [file for file in sorted(folder.rglob("*.py")) if file.name != "__init__.py"]
    found = [text for file in files for text in upward_imports(folder, order, file, file.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


def test_an_upward_import_is_refused() -> None:
    """The check sees a violation: tracing lies below the entry points of the compiler, and may not import them."""
    folder = ROOT / "compiler"
    planted = "def trace():\n    from piecegraph.compiler.api import compile\n"
    (message,) = upward_imports(folder, ROOMS["compiler"], folder / "tracing" / "trace.py", planted)
    assert "compiler/tracing/trace.py:2 imports piecegraph.compiler.api.compile" in message


def test_folders_are_small() -> None:
    counts: dict[str, int] = {}
    for file in sources():
        if file.name != "__init__.py":
            folder = str(file.parent.relative_to(ROOT))
            counts[folder] = counts.get(folder, 0) + 1
    assert {folder: count for folder, count in counts.items() if count > MAX_FILES} == {}


COVERED_BY: Mapping[str, str] = {
    "passes/kernels/common/cpp_kernel.py": "tests/passes/kernels/cpu/test_int8_rows.py",
    "passes/quantised/rounding_readers.py": "tests/passes/quantised/test_fuse_norm_quant.py",
    "runner/device_memory/host_memory/released_memory.py": "tests/runner/sleeping/test_sleep.py",
    "runner/tensor_parallel/symmetric_memory/kernels/words.py": (
        "tests/runner/tensor_parallel/symmetric_memory/kernels/test_pushed.py"
    ),
    "runner/device_memory/restorable_storages.py": "tests/runner/sleeping/test_sleep.py",
    "compiler/piece_compilers/graphs_first.py": "tests/compiler/building/test_background.py",
    "runner/cudagraphs/late_dispatcher.py": "tests/runner/late_start/test_fast_start.py",
    "runner/scheduling/scheduler_stats.py": "tests/runner/engine/test_metrics.py",
    "runner/data_parallel/engine_program.py": "tests/runner/data_parallel/test_engine_processes.py",
    "runner/distributed/child_process.py": "tests/runner/distributed/test_executor.py",
    "runner/distributed/protocol.py": "tests/runner/distributed/test_executor.py",
    "runner/distributed/group_runner.py": "tests/runner/distributed/test_executor.py",
    "runner/distributed/worker.py": "tests/runner/distributed/test_executor.py",
    "runner/distributed/rank_parallel.py": "tests/runner/pipeline_parallel/test_stage_step.py",
    "runner/distributed/stage_runner.py": "tests/runner/pipeline_parallel/test_stage_step.py",
    "runner/offline/arguments.py": "tests/runner/test_dispatch_by_cost.py",
    "runner/offline/generating.py": "tests/runner/test_llm.py",
    "runner/offline/load.py": "tests/runner/startup/test_compile_guess.py",
    "runner/offline/loaded_llm.py": "tests/runner/test_llm.py",
    "runner/offline/pooling.py": "tests/runner/pooling/test_llm_pooling.py",
    "runner/models/checkpoint/construct.py": "tests/runner/models/test_load.py",
    "runner/models/checkpoint/files.py": "tests/runner/models/test_load.py",
    "runner/models/checkpoint/tensors.py": "tests/runner/models/test_load.py",
    "runner/models/common/model_kind.py": "tests/runner/pooling/test_llm_pooling.py",
    "runner/models/common/rank_share.py": "tests/runner/tensor_parallel/test_quantised_ranks.py",
    "runner/models/config/load_config.py": "tests/runner/models/test_load.py",
    "runner/models/divided_model.py": "tests/runner/tensor_parallel/test_quantised_ranks.py",
    "runner/models/mechanisms/replaced_layers.py": "tests/runner/test_own_attention.py",
    "runner/models/quantised_model.py": "tests/runner/quantization/test_llm_quantised.py",
    "runner/pipeline_parallel/missing_module.py": "tests/runner/pipeline_parallel/test_stage.py",
    "runner/quantization/modules.py": "tests/runner/quantization/test_quantise.py",
    "runner/distributed/lockstep_runner.py": "tests/runner/data_parallel/test_shared_experts.py",
    "runner/tensor_parallel/expert_ranks.py": "tests/runner/tensor_parallel/test_engine_peers.py",
    "runner/quantization/online.py": "tests/runner/quantization/test_llm_quantised.py",
    "runner/quantization/methods/all_methods.py": "tests/runner/quantization/methods/test_groups.py",
    "runner/quantization/methods/linear_method.py": "tests/runner/quantization/methods/test_groups.py",
    "runner/quantization/checkpoints/all_formats.py": "tests/runner/quantization/checkpoints/test_stored.py",
    "runner/quantization/checkpoints/finegrained_fp8.py": "tests/runner/quantization/checkpoints/test_stored.py",
    "runner/quantization/checkpoints/gguf_file.py": "tests/runner/quantization/checkpoints/test_gguf_blocks.py",
    "runner/quantization/checkpoints/headers.py": "tests/runner/quantization/checkpoints/test_damaged.py",
    "runner/quantization/checkpoints/load.py": "tests/runner/quantization/test_llm_quantised.py",
    "runner/quantization/methods/packed_integers.py": "tests/runner/quantization/checkpoints/test_gptq.py",
    "runner/tensor_parallel/parallel.py": "tests/runner/tensor_parallel/test_process_group.py",
    "compiler/torch_compat/fake_tensors.py": "tests/compiler/building/test_deferred_weights.py",
    "passes/ops/op_types.py": "tests/compiler/splitting/test_split.py",
    "runner/attention/varlen/call.py": "tests/runner/attention/varlen/test_sdpa.py",
    "runner/attention/varlen/op.py": "tests/runner/pooling/test_llm_pooling.py",
    "runner/attention/varlen/transformers_varlen.py": "tests/runner/pooling/test_llm_pooling.py",
    "runner/pooling/head.py": "tests/runner/pooling/test_llm_pooling.py",
    "runner/pooling/load.py": "tests/runner/pooling/test_llm_pooling.py",
    "runner/pooling/model.py": "tests/runner/pooling/test_llm_pooling.py",
    "runner/pooling/outputs.py": "tests/runner/pooling/test_llm_pooling.py",
    "runner/pooling/requests.py": "tests/runner/pooling/test_llm_pooling.py",
    "runner/pooling/runner.py": "tests/runner/pooling/test_llm_pooling.py",
    "runner/pooling/step.py": "tests/runner/pooling/test_llm_pooling.py",
    "runner/attention/modules/attend.py": "tests/runner/test_own_attention.py",
    "runner/attention/modules/by_value.py": "tests/runner/test_own_attention.py",
    "runner/attention/modules/separate.py": "tests/runner/attention/modules/test_replace.py",
    "runner/attention/modules/transposed.py": "tests/runner/test_own_attention.py",
    "runner/attention/modules/clipped.py": "tests/runner/test_own_attention.py",
    "runner/attention/modules/differential.py": "tests/runner/test_own_attention.py",
    "runner/attention/modules/merged.py": "tests/runner/test_own_attention.py",
    "runner/attention/modules/local.py": "tests/runner/test_own_attention.py",
    "runner/attention/modules/rotary_pairs.py": "tests/runner/test_own_attention.py",
    "runner/traceable/experts.py": "tests/runner/traceable/test_replace.py",
    "runner/traceable/tables.py": "tests/runner/traceable/test_replace.py",
    "runner/state_layers/decode_kernels.py": "tests/runner/state_layers/kernels/test_calls.py",
    "runner/state_layers/kernels/conv_step.py": "tests/runner/state_layers/kernels/test_calls.py",
    "runner/state_layers/kernels/conv_prompt.py": "tests/runner/state_layers/kernels/test_prompt_calls.py",
    "runner/state_layers/prompt_kernels.py": "tests/runner/state_layers/kernels/test_prompt_calls.py",
    "runner/state_layers/kernels/delta_step.py": "tests/runner/state_layers/kernels/test_calls.py",
    "runner/state_layers/kernels/request.py": "tests/runner/state_layers/kernels/test_calls.py",
    "runner/state_layers/kernels/scan_step.py": "tests/runner/state_layers/kernels/test_calls.py",
    "runner/state_layers/calls.py": "tests/runner/attention/interface/test_cache_spec.py",
    "runner/state_layers/layer.py": "tests/runner/attention/interface/test_cache_spec.py",
    "runner/state_layers/ops.py": "tests/runner/test_hybrid_models.py",
    "runner/state_layers/modules/gated_delta_net.py": "tests/runner/test_hybrid_models.py",
    "runner/state_layers/modules/lightning.py": "tests/runner/test_hybrid_models.py",
    "runner/state_layers/modules/mamba.py": "tests/runner/test_hybrid_models.py",
    "runner/state_layers/modules/mamba2.py": "tests/runner/test_hybrid_models.py",
    "runner/state_layers/modules/short_conv.py": "tests/runner/test_hybrid_models.py",
    "passes/kernels/common/ptx.py": "tests/passes/kernels/common/test_overlapped.py",
    "compiler/building/build.py": "tests/compiler/test_api.py",
    "compiler/building/capturable.py": "tests/compiler/graphs/test_capture.py",
    "compiler/building/captured_models.py": "tests/compiler/building/test_bound_weights.py",
    "compiler/building/piece_tasks.py": "tests/compiler/building/test_inductor_pieces.py",
    "compiler/building/ready.py": "tests/compiler/test_api.py",
    "compiler/common/piece_errors.py": "tests/compiler/building/test_inductor_pieces.py",
    "compiler/graphs/recording/cuda_graph.py": "tests/compiler/graphs/test_capture.py",
    "compiler/graphs/replay/bound_plan.py": "tests/compiler/graphs/replay/test_replay_plan.py",
    "compiler/graphs/static_inputs.py": "tests/compiler/graphs/test_capture.py",
    "compiler/inductor/options.py": "tests/compiler/building/test_inductor_pieces.py",
    "compiler/repeated_layers/markers.py": "tests/compiler/repeated_layers/test_expand.py",
    "compiler/rewriting/expectations.py": "tests/compiler/rewriting/test_run_pass.py",
    "compiler/splitting/normalize.py": "tests/compiler/splitting/test_split.py",
    "compiler/tracing/dynamo.py": "tests/compiler/tracing/test_trace.py",
    "compiler/verify/piece_check.py": "tests/runner/inspect/test_selfcheck.py",
    "passes/kernels/common/first_kernel.py": "tests/passes/kernels/common/test_overlapped.py",
    "passes/kernels/elementwise/gated.py": "tests/passes/kernels/elementwise/test_act_mul.py",
    "passes/kernels/moe/grouped.py": "tests/passes/kernels/moe/test_experts.py",
    "passes/kernels/moe/launch.py": "tests/passes/kernels/moe/test_experts.py",
    "passes/kernels/moe/matvec.py": "tests/passes/kernels/moe/test_experts.py",
    "passes/kernels/moe/route_blocks.py": "tests/passes/kernels/moe/test_route.py",
    "passes/kernels/moe/route_many.py": "tests/passes/kernels/moe/test_route.py",
    "passes/kernels/moe/stored_experts.py": "tests/passes/kernels/moe/test_quantised_experts.py",
    "passes/matching/rotary_pattern.py": "tests/passes/rotary/test_fuse_rope_kv_write.py",
    "passes/matching/row_wise.py": "tests/passes/test_select_rows_early.py",
    "passes/ops/library.py": "tests/passes/ops/test_linear.py",
    "cache/store/blobs.py": "tests/cache/store/test_store.py",
    "cache/store/stamps.py": "tests/cache/upkeep/test_collect.py",
    "runner/attention/flash_attn/prepared.py": "tests/runner/attention/flash_attn/test_flash_attn_gpu.py",
    "runner/attention/triton/kernels/new_token.py": "tests/runner/attention/triton/kernels/test_decode.py",
    "runner/attention/triton/kernels/paged.py": "tests/runner/attention/triton/kernels/test_decode.py",
    "runner/attention/triton/launch_plan.py": "tests/runner/attention/triton/test_backend.py",
    "runner/device_memory/host_memory/packed_writes.py": "tests/runner/device_memory/test_staged_write.py",
    "runner/kv_cache/calibration.py": "tests/runner/attention/test_fp8_cache.py",
    "runner/kv_cache/scales.py": "tests/runner/attention/test_fp8_cache.py",
    "runner/startup/scaled_runner.py": "tests/runner/attention/test_fp8_cache.py",
    "runner/inspect/trial_adapter.py": "tests/runner/lora/test_llm_lora.py",
    "runner/inspect/replay_check.py": "tests/runner/inspect/test_selfcheck.py",
    "runner/scheduling/speculation_stats.py": "tests/runner/speculative/test_speculative_scheduler.py",
    "runner/speculative/speculative_runner.py": "tests/runner/speculative/test_speculative_engine.py",
    "runner/engine/progress_bar.py": "tests/runner/test_llm.py",
    "tools/bench/kernels/gpu.py": "tests/tools/bench/kernels/test_layers.py",
    "tools/bench/kernels/attention.py": "tests/runner/attention/triton/kernels/test_decode.py",
    "tools/bench/kernels/attention_prefill.py": "tests/runner/attention/triton/kernels/test_prefill.py",
    "tools/bench/compare/llama_cpp_peer.py": "tests/tools/bench/compare/test_workload.py",
    "tools/bench/compare/transformers_peer.py": "tests/tools/bench/compare/test_workload.py",
    "tools/bench/measure/offline_workload.py": "tests/tools/bench/test_throughput.py",
    "tools/bench/measure/machine.py": "tests/tools/commands/test_env.py",
    "tools/bench/pieces.py": "tests/tools/bench/test_passes.py",
    "tools/bench/session.py": "tests/tools/commands/test_bench.py",
    "tools/bench/startup/child.py": "tests/tools/bench/startup/test_startup.py",
    "tools/cache/changing/import_archive.py": "tests/tools/cache/changing/test_export_archive.py",
    "tools/cache/terminal/confirm.py": "tests/tools/cache/changing/test_rm.py",
    "tools/command_line/lazy_group.py": "tests/tools/test_cli.py",
    "tools/commands/bench_latency.py": "tests/tools/commands/test_bench.py",
    "compiler/building/cold_start.py": "tests/compiler/plans/test_plan_store.py",
    "compiler/common/cuda_driver.py": "tests/compiler/graphs/replay/test_patched_ops.py",
    "compiler/common/fake_values.py": "tests/compiler/splitting/test_exact_strides.py",
    "compiler/common/report.py": "tests/compiler/piece_compilers/test_static_piece.py",
    "compiler/common/source_line.py": "tests/compiler/rewriting/test_run_pass.py",
    "compiler/common/split_ops.py": "tests/compiler/rewriting/test_run_pass.py",
    "compiler/common/symbolic_sizes.py": "tests/compiler/splitting/test_exact_strides.py",
    "compiler/compiled_model.py": "tests/compiler/building/test_deferred_weights.py",
    "compiler/graphs/addresses.py": "tests/compiler/graphs/test_capture.py",
    "compiler/graphs/batch_descriptor.py": "tests/runner/cudagraphs/test_capture_sizes.py",
    "compiler/graphs/graphs.py": "tests/runner/cudagraphs/test_manager.py",
    "compiler/graphs/recording/recorder.py": "tests/runner/test_step_budget.py",
    "compiler/inductor/custom_pass.py": "tests/compiler/inductor/test_written_inputs.py",
    "compiler/piece_compilers/eager.py": "tests/runner/startup/test_compile_ahead.py",
    "compiler/piece_compilers/forwards.py": "tests/compiler/piece_compilers/test_compile_static.py",
    "compiler/piece_compilers/protocol.py": "tests/compiler/piece_compilers/test_first_run.py",
    "compiler/rewriting/graph_snapshot.py": "tests/compiler/rewriting/test_run_pass.py",
    "compiler/rewriting/pass_contexts.py": "tests/compiler/rewriting/test_run_pass.py",
    "compiler/splitting/piece_format.py": "tests/compiler/splitting/test_piece.py",
    "compiler/splitting/plan.py": "tests/compiler/splitting/test_split.py",
    "compiler/splitting/segments.py": "tests/compiler/graphs/replay/test_expected_cost.py",
    "compiler/store/cache_choice.py": "tests/tools/cache/entries/test_eager_pieces.py",
    "compiler/torch_compat/process_settings.py": "tests/compiler/common/test_ambient_state.py",
    "compiler/torch_compat/versions.py": "tests/runner/attention/triton/test_backend_gpu.py",
    "compiler/tracing/dynamic_dims.py": "tests/compiler/test_api.py",
    "compiler/workers/child.py": "tests/test_start_imports.py",
    "compiler/workers/kernel_child.py": "tests/compiler/workers/test_kernel_processes.py",
    "compiler/workers/pool.py": "tests/compiler/workers/test_prestart.py",
    "compiler/workers/process.py": "tests/compiler/workers/test_prestart.py",
    "passes/kernels/common/gpu_limits.py": "tests/passes/kernels/linear/test_linear_config.py",
    "passes/kernels/linear/linear_parts.py": "tests/passes/ops/test_norm_linear.py",
    "passes/ops/all_ops.py": "tests/compiler/splitting/test_passthrough.py",
    "cache/disk/canonical.py": "tests/cache/store/test_entry.py",
    "cache/disk/layout.py": "tests/cache/store/test_entry.py",
    "cache/store/entry_file.py": "tests/cache/store/test_store.py",
    "cache/trust/shared_key.py": "tests/cache/trust/test_key_files.py",
    "runner/attention/flash_attn/kernels.py": "tests/runner/attention/flash_attn/test_backend.py",
    "runner/attention/flash_attn/metadata.py": "tests/runner/attention/flash_attn/test_backend.py",
    "runner/attention/interface/backend.py": "tests/runner/attention/flash_attn/test_backend.py",
    "runner/attention/interface/layer.py": "tests/runner/attention/interface/test_kv_cache.py",
    "runner/attention/interface/metadata.py": "tests/runner/attention/interface/test_rotary_gpu.py",
    "runner/attention/interface/op_call.py": "tests/runner/attention/interface/test_op.py",
    "runner/attention/triton/calls.py": "tests/runner/attention/triton/test_backend.py",
    "runner/attention/triton/kernels/workspace.py": "tests/runner/attention/triton/kernels/test_decode.py",
    "runner/attention/triton/layouts/head_shape.py": "tests/runner/attention/triton/layouts/test_decode_config.py",
    "runner/attention/triton/metadata.py": "tests/runner/attention/triton/test_backend.py",
    "runner/attention/triton/reference.py": "tests/runner/attention/triton/kernels/test_kv_write.py",
    "runner/common/outputs.py": "tests/runner/engine/test_engine_callers.py",
    "runner/output/make_output.py": "tests/runner/output/test_output_processor.py",
    "runner/output/prompt_state.py": "tests/runner/output/test_output_processor.py",
    "runner/cudagraphs/dispatch_counters.py": "tests/runner/cudagraphs/test_dispatcher.py",
    "runner/device_memory/kernels/staged_write.py": "tests/runner/device_memory/test_staged_write.py",
    "runner/engine/model_runner.py": "tests/runner/engine/test_engine_callers.py",
    "runner/attention/triton/kernels/splits.py": "tests/runner/attention/triton/kernels/test_prefill.py",
    "runner/sampling/kernels/apply_bitmask.py": "tests/runner/sampling/options/test_allowed_token_ids.py",
    "runner/sampling/kernels/forbid_bad_words.py": "tests/runner/sampling/options/test_bad_words.py",
    "runner/sampling/kernels/gumbel_sample.py": "tests/runner/sampling/test_gumbel_sample.py",
    "runner/sampling/kernels/logsumexp.py": "tests/runner/sampling/test_logprobs.py",
    "runner/sampling/kernels/penalties.py": "tests/runner/sampling/options/test_penalties.py",
    "runner/sampling/kernels/truncate.py": "tests/runner/sampling/options/test_truncation.py",
    "runner/sampling/options/protocol.py": "tests/runner/sampling/options/test_allowed_token_ids.py",
    "runner/scheduling/scheduler_output.py": "tests/runner/scheduling/test_scheduler.py",
    "runner/startup/load_weights.py": "tests/runner/startup/test_load_engine.py",
    "runner/startup/loaded.py": "tests/runner/startup/test_load_engine.py",
    "runner/startup/make_runner.py": "tests/runner/startup/test_load_engine.py",
    "runner/startup/make_scheduler.py": "tests/runner/startup/test_load_engine.py",
    "runner/startup/rank_runner.py": "tests/runner/distributed/test_executor.py",
    "runner/startup/memory/kv_caches.py": "tests/runner/test_growing_llm.py",
    "runner/startup/memory/mapped_weights.py": "tests/runner/device_memory/test_mapped_weights.py",
    "runner/startup/compiling/compile_model.py": "tests/runner/startup/compiling/test_step_kernels.py",
    "runner/startup/compiling/decide.py": "tests/runner/startup/test_compile_ahead.py",
    "runner/speculative/common/draft_source.py": "tests/runner/speculative/test_verify_drafts.py",
    "runner/speculative/common/verified_rows.py": "tests/runner/speculative/test_verification.py",
    "runner/speculative/kernels/verify.py": "tests/runner/speculative/test_verify_drafts.py",
    "runner/step/kernels/prepare_inputs.py": "tests/runner/step/test_prepare_inputs.py",
    "runner/step/kernels/cpu_prepare_inputs.py": "tests/runner/step/test_prepare_inputs.py",
    "runner/step/model_step.py": "tests/runner/startup/compiling/test_step_kernels.py",
    "tools/bench/kernels/layer_chain.py": "tests/tools/bench/kernels/test_layers.py",
    "tools/bench/measure/ceilings.py": "tests/tools/bench/measure/test_floor.py",
    "tools/bench/step_profile.py": "tests/tools/bench/test_throughput.py",
    "tools/report/template.py": "tests/tools/report/test_page.py",
    "tools/command_line/compile_flags.py": "tests/tools/cache/entries/test_eager_pieces.py",
    "tools/commands/bench_throughput.py": "tests/tools/commands/test_bench.py",
    "src/piecegraph/config.py": "tests/cache/store/test_keys.py",
    "tools/serve/endpoints/generation_service.py": "tests/tools/serve/test_serve.py",
    "tools/serve/endpoints/pooling_service.py": "tests/tools/serve/endpoints/test_embeddings.py",
    "tools/serve/engine/generation_steps.py": "tests/tools/serve/engine/test_engine_thread.py",
    "tools/serve/engine/steps.py": "tests/tools/serve/engine/test_engine_thread.py",
    "tools/serve/protocol/embedding_body.py": "tests/tools/serve/endpoints/test_embeddings.py",
    "tools/serve/protocol/text_or_tokens.py": "tests/tools/serve/protocol/test_request_models.py",
    "tools/serve/commands/serve.py": "tests/tools/serve/test_serve.py",
    "tools/serve/endpoints/chat_completions.py": "tests/tools/serve/test_serve.py",
    "tools/serve/endpoints/completions.py": "tests/tools/serve/test_serve.py",
    "tools/serve/endpoints/generation.py": "tests/tools/serve/test_serve.py",
    "tools/serve/endpoints/metrics.py": "tests/tools/serve/test_serve.py",
    "tools/serve/endpoints/service.py": "tests/tools/serve/test_serve.py",
    "tools/serve/endpoints/settings.py": "tests/tools/serve/test_serve.py",
    "tools/serve/endpoints/tokenizing.py": "tests/tools/serve/test_serve.py",
    "tools/serve/http/app.py": "tests/tools/serve/test_serve.py",
    "tools/serve/http/gate.py": "tests/tools/serve/test_serve.py",
    "tools/serve/http/server.py": "tests/tools/serve/test_serve.py",
    "tools/serve/protocol/error_replies.py": "tests/tools/serve/test_serve.py",
    "tools/serve/protocol/logprob_replies.py": "tests/tools/serve/test_serve.py",
    "tools/serve/endpoints/tools.py": "tests/tools/serve/test_serve.py",
    "tools/serve/protocol/tool_fields.py": "tests/tools/serve/test_serve.py",
    "tools/serve/message_parsers/choose.py": "tests/tools/serve/message_parsers/test_message_parsers.py",
    "tools/serve/message_parsers/hermes.py": "tests/tools/serve/message_parsers/test_message_parsers.py",
    "tools/serve/message_parsers/llama.py": "tests/tools/serve/message_parsers/test_message_parsers.py",
    "tools/serve/message_parsers/mistral.py": "tests/tools/serve/message_parsers/test_message_parsers.py",
    "tools/serve/message_parsers/protocol.py": "tests/tools/serve/message_parsers/test_message_parsers.py",
    "tools/serve/message_parsers/think.py": "tests/tools/serve/message_parsers/test_message_parsers.py",
    "runner/speculative/common/drafting_policy.py": "tests/runner/speculative/test_drafting_policy.py",
    "runner/speculative/common/synthetic_acceptance.py": "tests/runner/speculative/test_synthetic_acceptance.py",
    "runner/speculative/heads/eagle3.py": "tests/runner/speculative/heads/test_head_step.py",
    "runner/speculative/heads/load_head.py": "tests/runner/speculative/heads/test_head_config.py",
    "runner/startup/drafts/head.py": "tests/runner/speculative/heads/test_head_config.py",
    "runner/speculative/common/fitting_draft.py": "tests/runner/startup/drafts/test_draft.py",
    "runner/structured_output/protocol.py": "tests/runner/structured_output/test_grammars.py",
}


def test_every_source_has_a_test() -> None:
    """A file of its own (`tests/a/test_b*.py` for `a/b.py`), or a row of `COVERED_BY` that names the test."""
    missing = []
    for file in sources():
        name = str(file.relative_to(ROOT))
        tests = ROOT / "tests" / (file.parent.relative_to(ROOT) if ours(file) != "leaf" else "")
        if file.name == "__init__.py" or any(tests.glob(f"test_{file.stem}*.py")):
            continue
        if not (name in COVERED_BY and (ROOT / COVERED_BY[name]).exists()):
            missing.append(name)
    assert not missing, missing


def test_every_row_of_covered_by_is_needed() -> None:
    for name in COVERED_BY:
        source = ROOT / name
        own = ROOT / "tests" / source.parent.relative_to(ROOT) / f"test_{source.stem}.py"
        assert source.exists() and not own.exists(), f"take {name} out of COVERED_BY"


def functions_longer_than(limit: int) -> list[str]:
    """Return `file:line name` of each function of more lines than `limit`, Triton kernels aside."""
    return [
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"
        for file in sources()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > limit
        and not any("jit" in ast.unparse(each) for each in node.decorator_list)
    ]


def test_functions_are_short() -> None:
    assert functions_longer_than(80) == []
