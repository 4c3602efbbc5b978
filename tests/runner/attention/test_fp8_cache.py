"""`kv_cache_dtype="fp8"`: keys and values are those that e4m3 has, with scales, and the same memory has more tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from piecegraph import LLM, SamplingParams
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.errors import CheckpointError, ConfigError, UnsupportedModel
from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.attention.sdpa import _by_slot, _read, _write
from piecegraph.runner.attention.triton.backend import layer_unsupported_reason
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.common.speculative_config import SpeculativeConfig
from piecegraph.runner.inspect.explanation import explain
from piecegraph.runner.kv_cache.calibration import (
    KEY_RANGE,
    VALUE_RANGE,
    _Keys,
    _scales,
    common_part,
    key_shift,
    later_positions,
)
from piecegraph.runner.kv_cache.scales import scales_note
from tests.runner.quantization.checkpoints.written import FORMATS, write_checkpoint
from tests.runner.quantization.test_llm_quantised import largest_difference, load
from tests.runner.tiny_models import make_config, make_model, random_model, save

Pair = tuple[torch.Tensor, torch.Tensor]


def test_values_are_rounded_to_the_nearest_of_e4m3() -> None:
    """Those beyond its range become its largest; what is read is exactly what torch converts."""
    cached = torch.empty(4, 16, 2, 8, dtype=torch.float8_e4m3fn)
    rows = torch.randn(5, 2, 8) * torch.logspace(-4, 3, 5).view(5, 1, 1)
    slots = torch.tensor([0, 5, 17, 20, 63])
    for dtype in (torch.float32, torch.bfloat16):
        _write(_by_slot(cached), slots, rows.to(dtype))
        found = _read(_by_slot(cached), slots.unsqueeze(0), dtype)[0]
        assert found.dtype is dtype
        assert torch.equal(found, rows.to(dtype).clamp(-448, 448).to(torch.float8_e4m3fn).to(dtype))
    _write(_by_slot(cached), slots, rows.masked_fill(rows == rows.max(), float("nan")))
    assert int(_read(_by_slot(cached), slots.unsqueeze(0), torch.float32).isnan().sum()) == 1


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama"), tmp_path_factory.mktemp("llama"))


def test_the_same_memory_has_twice_the_tokens_of_bfloat16(llama: Path) -> None:
    def num_blocks(**options: object) -> int:
        with load(llama, quantization=None, enforce_eager=True, num_kv_blocks=None, **options) as llm:
            assert llm._loaded is not None
            return llm._loaded.engine.scheduler._kv_cache.num_blocks

    memory = {"kv_cache_memory_bytes": 1 << 18, "max_model_len": 64, "dtype": "bfloat16"}
    assert num_blocks(**memory, kv_cache_dtype="fp8") == 2 * num_blocks(**memory)


def rounding_attention(scales: Mapping[int, tuple[torch.Tensor, ...]] | None = None) -> str:
    """The name, in transformers, of attention over keys and values that are rounded to e4m3.

    `scales`: by the number of a layer the scales of its keys and values, `[num_kv_heads]` or `[1]`, and what is
    subtracted from keys before they are rounded, if anything; None: scales are 1.
    """

    def rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (x / scale[:, None, None]).to(torch.float8_e4m3fn).to(x.dtype) * scale[:, None, None]

    def attend(module, query, key, value, mask, **options):  # type: ignore[no-untyped-def]
        of_key, of_value, *shift = (torch.ones(1), torch.ones(1)) if scales is None else scales[module.layer_idx]
        less = shift[0][:, None] if shift else 0.0
        key, value = rounded(key - less, of_key) + less, rounded(value, of_value)
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    AttentionInterface.register("rounded_keys_and_values", attend)
    AttentionMaskInterface.register("rounded_keys_and_values", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return "rounded_keys_and_values"


def test_log_probabilities_are_those_of_keys_and_values_that_were_rounded(llama: Path) -> None:
    """The reference rounds what its key and value projections return, the keys after their rotation."""
    reference = make_model("llama").float()
    reference.set_attn_implementation(rounding_attention())
    with load(llama, quantization=None, dtype="float32", enforce_eager=True, kv_cache_dtype="fp8_e4m3") as llm:
        assert largest_difference(reference, llm) < 5e-2


LAYER = AttentionLayer(
    name="attention",
    num_q_heads=8,
    num_kv_heads=2,
    key_dim=64,
    value_dim=64,
    dtype=torch.bfloat16,
    scale=0.125,
    window=0,
    softcap=0.0,
    has_sinks=False,
)


def test_our_gpu_kernels_read_it_and_no_other_dtype_than_the_layers() -> None:
    assert layer_unsupported_reason(LAYER) is None
    assert layer_unsupported_reason(replace(LAYER, cache_dtype=torch.float8_e4m3fn)) is None
    found = layer_unsupported_reason(replace(LAYER, cache_dtype=torch.float16))
    assert found is not None and "keeps keys and values in torch.float16; the kernels read" in found


def test_their_torch_reference_answers_as_sdpa_does(llama: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    answers = []
    for backend in ("sdpa", "triton"):
        with load(
            llama,
            quantization=None,
            dtype="float32",
            enforce_eager=True,
            kv_cache_dtype="fp8",
            attention_backend=backend,
        ) as llm:
            outputs = llm.generate([{"prompt_token_ids": [5, 9, 2, 77]}, {"prompt_token_ids": [3]}], params)
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


@pytest.mark.gpu
def test_a_gpu_answers_from_graphs_as_a_cpu_does(llama: Path) -> None:
    """Log probabilities are those of keys and values that were rounded; FULL graphs hold the decode steps."""
    reference = make_model("llama").float()
    reference.set_attn_implementation(rounding_attention())
    with load(
        llama, quantization=None, dtype="float32", compiler="eager", kv_cache_dtype="fp8", device="cuda",
        attention_backend="triton",
    ) as llm:  # fmt: skip
        assert largest_difference(reference, llm) < 5e-2


WIDE: Pair = torch.tensor([2000.0, 1e-3]), torch.tensor([3000.0, 5e-4])
"""What heads of keys and of values are multiplied by in a checkpoint that computes what the tiny model does: those of
the first are beyond the range of e4m3, those of the second so small that they would be zero."""


ROUNDED = 1.5
"""By how much log probabilities of the tiny model, whose weights are random, differ at most with keys and values of 8
bits and fitting scales (0.8 was seen); with scales of 1 they differ by 6 where these do not fit."""


def widened(model: PreTrainedModel, wide: Pair = WIDE) -> PreTrainedModel:
    """Multiply the keys and values of heads, and divide what they are multiplied by, in place."""
    of_key, of_value = wide
    for layer in model.model.layers:
        attention = layer.self_attn
        groups = attention.q_proj.weight.shape[0] // attention.k_proj.weight.shape[0]
        dim = attention.head_dim
        for projection, scale in (
            (attention.k_proj, of_key),
            (attention.v_proj, of_value),
            (attention.q_proj, 1 / of_key.repeat_interleave(groups)),
        ):
            projection.weight.data *= scale.repeat_interleave(dim)[:, None]
        attention.o_proj.weight.data /= of_value.repeat_interleave(groups).repeat_interleave(dim)
    return model


def scales_of(llm: LLM) -> dict[int, tuple[torch.Tensor, ...]]:
    """Return copies of the scales of an engine's caches, and of what is subtracted from keys, by the layer's number."""
    found = {}
    for number, cache in enumerate(llm.runner.step.kv_caches.values()):
        assert cache.scales is not None
        found[number] = tuple(tensor.clone() for tensor in cache.scales.tensors().values())
    return found


def write_scales(folder: Path, numbers: Pair, **config: object) -> None:
    """Add scales to a checkpoint, under compressed-tensors' names, and fields to its config."""
    key, value = numbers
    tensors = load_file(folder / "model.safetensors")
    for number in range(2):
        prefix = f"model.layers.{number}.self_attn"
        tensors |= {f"{prefix}.k_scale": key.clone(), f"{prefix}.v_scale": value.clone()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**written, **config}), encoding="utf-8")


FP8: dict[str, Any] = {
    "quantization": None, "dtype": "float32", "enforce_eager": True, "kv_cache_dtype": "fp8"
}  # fmt: skip


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(widened(make_model("llama")), tmp_path_factory.mktemp("wide"))


@pytest.mark.parametrize("backend", ["sdpa", pytest.param("triton", marks=pytest.mark.slow)])
def test_a_calibration_makes_numbers_right_that_e4m3_does_not_have(wide: Path, backend: str) -> None:
    """Those beyond its range and those below it; each start gives the same scales, and a note says so."""
    with load(wide, **FP8, attention_backend=backend) as llm:
        assert largest_difference(make_model("llama").float(), llm) > 2 * ROUNDED
        assert any("kept in e4m3 without scales, because the checkpoint has none" in note for note in llm.notes)
    found = []
    for _ in range(2):
        with load(wide, **FP8, attention_backend=backend, calculate_kv_scales=True) as llm:
            found.append(scales_of(llm))
            reference = widened(make_model("llama")).float()
            reference.set_attn_implementation(rounding_attention(found[-1]))
            assert largest_difference(reference, llm) < 5e-2
            assert largest_difference(make_model("llama").float(), llm) < ROUNDED
            assert any("calibrated at the start over 512 fixed tokens" in note for note in llm.notes)
    for layer, pair in found[0].items():
        for first, second in zip(pair, found[1][layer], strict=True):
            assert torch.equal(first, second) and first[0].abs().max() > 1e3 * first[1].abs().max()


def test_the_first_key_is_kept_exactly_less_what_keys_have_in_common() -> None:
    scale = torch.tensor([0.01, 3.0])
    first, common = torch.randn(2, 2, 64) * 100 * scale[:, None]
    shift = key_shift(first, common, scale)
    kept = ((first - shift) / scale[:, None]).to(torch.float8_e4m3fn).float() * scale[:, None]
    torch.testing.assert_close(kept + shift, first, rtol=0, atol=1e-4)
    assert ((shift - common).abs() <= (first - common).abs() / 16 + scale[:, None] * 2**-10).all()


def test_what_is_subtracted_makes_no_mean_larger_at_any_position() -> None:
    means = [torch.tensor(numbers) for numbers in ([3.0, -2.0, 1.0, 0.0], [2.0, -5.0, -1.0, 4.0])]
    assert common_part(means).tolist() == [2.0, -2.0, 0.0, 0.0]
    assert common_part(means[:1]).tolist() == means[0].tolist()
    assert later_positions(600) == []
    assert later_positions(2048) == [512, 768, 1152, 1728]


def test_keys_are_kept_less_a_constant_unless_scores_are_capped(llama: Path, tmp_path: Path) -> None:
    """A note says which, and why."""
    with load(llama, **FP8, calculate_kv_scales=True) as llm:
        assert all(shift.any() for _, _, shift in scales_of(llm).values())
        assert any("keys are kept less a constant of their head" in note for note in llm.notes)
    with load(save(make_model("gemma2"), tmp_path), **FP8, calculate_kv_scales=True) as llm:
        assert not any(shift.any() for _, _, shift in scales_of(llm).values())
        found = next(note for note in llm.notes if "less a constant" in note)
        assert "keys of all layers are kept as they are" in found and found.endswith("self_attn caps its scores")


def test_scales_are_those_of_all_positions() -> None:
    """A head whose keys are nearly alike has one for what differs."""
    mean = torch.tensor([[3.0, -1.0], [5.0, 5.0]])
    off = torch.tensor([[1.0, 0.5], [0.0, 0.125]])
    keys = [_Keys(mean, mean, mean, mean), _Keys(mean, mean, mean - off, mean + off)]
    values = [torch.tensor([1.0, 2.0]), torch.tensor([4.0, 1.0])]
    found = _scales(LAYER, keys, values)
    assert (found.key * KEY_RANGE).tolist() == pytest.approx([4.0, 16 * 0.125])
    assert (found.value * VALUE_RANGE).tolist() == pytest.approx([4.0, 2.0])
    found = _scales(replace(LAYER, softcap=20.0), keys, values)
    assert (found.key * KEY_RANGE).tolist() == pytest.approx([4.0, 5.125]) and found.key_shift is None


def test_nan_at_later_positions_is_refused(tmp_path: Path) -> None:
    model: Any = random_model(make_config("GPT2Config", n_embd=32, n_head=2, n_layer=2, max_position_embeddings=1024))
    model.transformer.wpe.weight.data[600:] = float("nan")
    options: dict[str, Any] = {**FP8, "calculate_kv_scales": True, "max_model_len": 1024, "num_kv_blocks": None}
    with pytest.raises(CheckpointError, match="runs at positions up to max_model_len"):
        load(save(model, tmp_path), **options)


def test_keys_that_are_nearly_a_constant_keep_what_differs(tmp_path: Path) -> None:
    """The constant is 100,000 times as large as the rest, which would be lost by a scale of both together."""
    model: Any = make_model("gpt2")
    with torch.no_grad():
        for block in model.transformer.h:
            size = block.attn.embed_dim
            block.attn.c_attn.bias[size : 2 * size] += 1e5 * torch.randn(
                size, generator=torch.Generator().manual_seed(0)
            )
    with load(save(model, tmp_path), **FP8, calculate_kv_scales=True) as llm:
        assert largest_difference(make_model("gpt2").float(), llm) < ROUNDED


def test_weights_that_cannot_be_calibrated_are_said_to_be_written(wide: Path) -> None:
    with load(wide, **FP8, calculate_kv_scales=True) as llm:
        before, good = scales_of(llm), widened(make_model("llama")).state_dict()
        name = "model.layers.0.self_attn.k_proj.weight"
        bad = {**good, name: torch.full_like(good[name], float("nan"))}
        with pytest.raises(CheckpointError, match=r"infinite or not numbers .* The new weights have been written"):
            llm.reload_weights(bad)
        llm.reload_weights(good)
        assert all(map(torch.equal, scales_of(llm)[0], before[0]))
        with pytest.raises(CheckpointError, match="1 tensors before it were written"):
            llm.reload_weights([(name, 2 * good[name]), ("nowhere", good[name])])
        torch.testing.assert_close(scales_of(llm)[0][0], 2 * before[0][0])  # of what was written


def test_models_with_states_are_refused_before_they_are_compiled(tmp_path: Path) -> None:
    """`explain` refuses them, too."""
    folder = save(make_model("qwen3.5"), tmp_path)
    source, refused = ModelSource(model=str(folder)), "calculate_kv_scales=True runs the model over one text"
    config = EngineConfig(source=source, device="cpu", kv_cache_dtype="fp8", calculate_kv_scales=True)
    with pytest.raises(UnsupportedModel, match=refused):
        explain(config)
    phases: list[str] = []
    options = {"kv_cache_dtype": "fp8", "quantization": None, "calculate_kv_scales": True}
    with pytest.raises(UnsupportedModel, match=refused):
        load(folder, on_phase=lambda phase: phases.append(phase.name), **options)
    assert "config" in phases and "trace" not in phases


def test_a_note_says_what_a_calibration_does_not_see(llama: Path) -> None:
    source = ModelSource(model=str(llama))
    config = EngineConfig(source=source, kv_cache_dtype="fp8", calculate_kv_scales=True, enable_lora=True)
    assert any("scales are calibrated without adapters" in note for note in scales_note(config))
    drafts = SpeculativeConfig(method="draft_model", model=str(llama), num_speculative_tokens=2)
    config = replace(config, enable_lora=False, speculative=drafts)
    assert any("keys and values of what drafts are kept with scales of 1" in note for note in scales_note(config))


KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
KV_ONLY = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": KV_SCHEME}


@pytest.mark.parametrize("kind", ["per head", pytest.param("per tensor", marks=pytest.mark.slow)])
def test_scales_of_the_checkpoint(kind: str, tmp_path: Path) -> None:
    """In float32 of each head, or one for all; without kv_cache_dtype they change nothing, which a note says."""
    wide = WIDE if kind == "per head" else (torch.full((2,), 2000.0), torch.full((2,), 3000.0))
    of_key, of_value = (each / 16 if kind == "per head" else each[:1] / 16 for each in wide)
    scales: Pair = of_key, of_value
    save(widened(make_model("llama"), wide), tmp_path)
    write_scales(tmp_path, scales, quantization_config=KV_ONLY)
    with load(tmp_path, **FP8) as llm:
        for *found, shift in scales_of(llm).values():
            assert all(torch.equal(one, wanted.expand(2)) for one, wanted in zip(found, scales, strict=True))
            assert not shift.any()  # they are for keys as they are
        reference = widened(make_model("llama"), wide).float()
        reference.set_attn_implementation(rounding_attention(dict.fromkeys(range(2), scales)))
        assert largest_difference(reference, llm) < 5e-2
        assert any("kept in e4m3 with the checkpoint's scales" in note for note in llm.notes)
    with load(tmp_path, **{**FP8, "kv_cache_dtype": "auto"}) as llm:
        assert largest_difference(reference_of(wide), llm) < 1e-3
        assert any("the checkpoint has scales of keys and values in e4m3, which are not used" in n for n in llm.notes)


def reference_of(wide: Pair) -> PreTrainedModel:
    return widened(make_model("llama"), wide).float()


def test_scales_of_a_quantised_checkpoint(tmp_path: Path) -> None:
    """W4A16 with a kv_cache_scheme; without kv_cache_dtype, a note says that the scales are not used."""
    config, write, inputs = FORMATS["W4A16"]
    reference = write_checkpoint(tmp_path, {**config, "kv_cache_scheme": KV_SCHEME}, write, inputs)
    scales: Pair = torch.tensor([0.02]), torch.tensor([0.03])
    write_scales(tmp_path, scales)
    reference.set_attn_implementation(rounding_attention(dict.fromkeys(range(2), scales)))
    with load(tmp_path, **FP8) as llm:
        assert largest_difference(reference, llm) < 5e-2
    with load(tmp_path, **{**FP8, "kv_cache_dtype": "auto"}) as llm:
        assert any("the checkpoint has scales of keys and values in e4m3, which are not used" in n for n in llm.notes)


def test_graphs_hold_scales_that_change_in_place(wide: Path) -> None:
    """Weights that are loaded again are calibrated again, with nothing captured anew."""
    options = {**FP8, "graph_kind": "recorded", "attention_backend": "triton", "cudagraph_capture_sizes": [2, 4]}
    options |= {"enforce_eager": False, "compiler": "eager", "calculate_kv_scales": True}
    with load(wide, **options) as llm:
        before = scales_of(llm)
        assert largest_difference(make_model("llama").float(), llm) < ROUNDED
        llm.reload_weights(widened(widened(make_model("llama")), (torch.full((2,), 64.0),) * 2).state_dict())
        for number, pair in scales_of(llm).items():
            for after, first in zip(pair, before[number], strict=True):
                torch.testing.assert_close(after, 64 * first)
        assert largest_difference(make_model("llama").float(), llm) < ROUNDED
        assert llm.runner.counters.by_mode()[CUDAGraphMode.FULL] > 0


def test_scales_need_a_cache_in_e4m3_and_one_rank() -> None:
    source = ModelSource(model="x")
    with pytest.raises(ConfigError, match="calculate_kv_scales=True is of keys and values in float8; give kv_cache"):
        EngineConfig(source=source, calculate_kv_scales=True)
    with pytest.raises(ConfigError, match="calculate_kv_scales=True is not yet available with tensor_parallel_size=2"):
        EngineConfig(source=source, calculate_kv_scales=True, kv_cache_dtype="fp8", tensor_parallel_size=2)


def test_other_dtypes_are_refused_by_name(llama: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp8_e5m2' is not available here. Did you mean 'fp8_e4m3'?"):
        load(llama, quantization=None, kv_cache_dtype="fp8_e5m2")
