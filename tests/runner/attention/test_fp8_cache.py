"""`kv_cache_dtype="fp8"`: keys and values are those that e4m3 has, and the same memory has more tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from piecegraph import SamplingParams
from piecegraph.errors import ConfigError
from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.attention.sdpa import _read, _write
from piecegraph.runner.attention.triton.backend import layer_unsupported_reason
from tests.runner.quantization.test_llm_quantised import largest_difference, load
from tests.runner.tiny_models import make_model, save


def test_values_are_rounded_to_the_nearest_of_e4m3() -> None:
    """Those beyond its range become its largest; what is read is exactly what torch converts."""
    cached = torch.empty(4, 16, 2, 8, dtype=torch.float8_e4m3fn)
    rows = torch.randn(5, 2, 8) * torch.logspace(-4, 3, 5).view(5, 1, 1)
    slots = torch.tensor([0, 5, 17, 20, 63])
    for dtype in (torch.float32, torch.bfloat16):
        _write(cached, slots, rows.to(dtype))
        found = _read(cached, slots.unsqueeze(0), dtype)[0]
        assert found.dtype is dtype
        assert torch.equal(found, rows.to(dtype).clamp(-448, 448).to(torch.float8_e4m3fn).to(dtype))


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


def rounding_attention() -> str:
    """The name, in transformers, of attention over keys and values that are rounded to e4m3."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float8_e4m3fn).to(x.dtype)

    def attend(module, query, key, value, mask, **options):  # type: ignore[no-untyped-def]
        return sdpa_attention_forward(module, query, rounded(key), rounded(value), mask, **options)

    AttentionInterface.register("rounded_keys_and_values", attend)
    AttentionMaskInterface.register("rounded_keys_and_values", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return "rounded_keys_and_values"


def test_log_probabilities_are_those_of_keys_and_values_that_were_rounded(llama: Path) -> None:
    """The reference rounds what its key and value projections return, the keys after their rotation."""
    reference = make_model("llama").float()
    reference.set_attn_implementation(rounding_attention())
    with load(llama, quantization=None, dtype="float32", enforce_eager=True, kv_cache_dtype="fp8_e4m3") as llm:
        assert largest_difference(reference, llm) < 5e-2


def test_our_gpu_kernels_read_it_and_no_other_dtype_than_the_layers() -> None:
    layer = AttentionLayer(
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
    assert layer_unsupported_reason(layer) is None
    assert layer_unsupported_reason(replace(layer, cache_dtype=torch.float8_e4m3fn)) is None
    found = layer_unsupported_reason(replace(layer, cache_dtype=torch.float16))
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


def test_other_dtypes_are_refused_by_name(llama: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp8_e5m2' is not available here. Did you mean 'fp8_e4m3'?"):
        load(llama, quantization=None, kv_cache_dtype="fp8_e5m2")
