"""On a CPU, small batches over int8 weights replay recorded graphs, which give the bits of steps without graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph import LLM, SamplingParams
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.compiler.graphs.recording import kernel_calls, recorder
from piecegraph.passes.pipeline import default_passes
from piecegraph.runner.inspect.explanation import explain
from tests.cpp_kernels import needs_cpp_compiler
from tests.runner.quantization.test_llm_quantised import load
from tests.runner.test_dispatch_by_cost import arguments
from tests.runner.tiny_models import make_config, random_model, save

pytestmark = [
    needs_cpp_compiler,
    pytest.mark.skipif(
        "fuse-int8-layers" not in {each.name for each in default_passes("cpu")}, reason="no AVX512-VNNI"
    ),
]

NUM_LAYERS = 3
PROMPTS = [[5, 9, 2, 77, 31, 8], list(range(3, 40)), [64], [7, 7], [11, 3, 5]]
OPTIONS: dict[str, Any] = {
    "quantization": "int8", "graph_kind": "auto", "cudagraph_capture_sizes": None, "compiler": "inductor",
    "attention_backend": "auto",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = make_config("LlamaConfig", hidden_size=64, intermediate_size=128, num_hidden_layers=NUM_LAYERS)
    return save(random_model(config), tmp_path_factory.mktemp("llama"))


class Counted:
    """How many recordings became calls of kernels, and of how many kernels each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[int] = []
        record_calls = kernel_calls.record_calls

        def counted(run: Any) -> Any:
            found = record_calls(run)
            self.calls.append(0 if found is None else len(found.calls))
            return found

        monkeypatch.setattr(recorder, "record_calls", counted)


def answers(llm: LLM, num_prompts: int = len(PROMPTS)) -> list[Any]:
    """Tokens, and log probabilities to the last bit; requests end one after the other."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=3 + 2 * i, ignore_eos=True, logprobs=2) for i in range(num_prompts)
    ]
    outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS[:num_prompts]], params, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_replays_give_the_bits_of_steps_without_graphs(
    folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two calls of attention a graph is one call of a kernel; three requests are padded to four."""
    counted = Counted(monkeypatch)
    found = []
    for mode in ("FULL_AND_PIECEWISE", "NONE"):
        with load(folder, dtype=dtype, cudagraph_mode=mode, max_num_seqs=5, max_num_batched_tokens=16) as llm:
            found.append([answers(llm), answers(llm, 3), answers(llm, 1)])
            if mode == "NONE":
                assert llm.runner.graphs.graphs == {}
                continue
            sizes = [each.num_tokens for each in llm.runner.graphs.descriptors(CUDAGraphMode.PIECEWISE)]
            assert sorted(sizes) == [1, 2, 4, 5]
            assert counted.calls == [1] * (NUM_LAYERS - 1) * 4
            rows = {row.name: row.matches for row in llm.compiled.report().passes}
            assert rows["fuse-int8-rope"] == rows["fuse-int8-layers"] == NUM_LAYERS
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("Gemma3TextConfig", "on a CPU they pay where all weights are int8"),
        ("Olmo2Config", "the pass fuse-int8-layers does not match every layer"),
    ],
)
def test_models_that_compute_otherwise_have_none(config: str, reason: str, tmp_path: Path) -> None:
    """A head in floats rounds its products by how many there are; other layers are left to Inductor."""
    model = random_model(make_config(config, hidden_size=64, intermediate_size=128, num_hidden_layers=2))
    explained = explain(arguments(save(model, tmp_path), **OPTIONS))
    assert all(row.num_tokens is None for row in explained.decode) and explained.num_piecewise == 0
    assert any(reason in path for path in explained.slower_paths)


def test_what_is_captured_is_explained(folder: Path) -> None:
    explained = explain(arguments(folder, **OPTIONS))
    assert [(row.mode, row.num_tokens) for row in explained.decode if row.num_tokens is not None] == [
        (CUDAGraphMode.PIECEWISE, size) for size in (1, 2, 4, 6)
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": None},
        {"compilation_config": {"passes": ("merge-projections", "fuse-int8-layers")}},
        {"enable_lora": True},
        {"compiler": "eager"},
    ],
    ids=["floats", "without the rope pass", "adapters", "eager"],
)
def test_other_models_have_no_graphs_by_default(folder: Path, options: dict[str, Any]) -> None:
    explained = explain(arguments(folder, **{**OPTIONS, **options}))
    assert all(row.num_tokens is None for row in explained.decode)
    assert any("NONE runs: there is no GPU, where graphs pay; on a CPU" in path for path in explained.slower_paths)


@pytest.mark.slow
def test_threads_may_change_between_replays(folder: Path) -> None:
    """A kernel's numbers do not depend on how many there are."""
    before = torch.get_num_threads()
    with load(folder, dtype="float32", max_num_seqs=5) as llm:
        try:
            torch.set_num_threads(1)
            one = answers(llm)
            torch.set_num_threads(2)
            assert answers(llm) == one
        finally:
            torch.set_num_threads(before)


@pytest.mark.slow
def test_two_models_keep_their_own_weights(folder: Path, tmp_path: Path) -> None:
    """Their graphs call the same kernels."""
    config = make_config("LlamaConfig", hidden_size=64, intermediate_size=128, num_hidden_layers=NUM_LAYERS)
    other = save(random_model(config, seed=5), tmp_path)
    alone = []
    for each in (folder, other):
        with load(each, dtype="float32", max_num_seqs=5) as llm:
            alone.append(answers(llm))
    with load(folder, dtype="float32", max_num_seqs=5) as one, load(other, dtype="float32", max_num_seqs=5) as two:
        assert [answers(one), answers(two), answers(one)] == [*alone, alone[0]]
    assert alone[0] != alone[1]
