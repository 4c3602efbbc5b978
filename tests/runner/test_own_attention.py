"""Models that compute attention in modules of their own answer as in transformers once these call our op."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from piecegraph.compiler.tracing.trace import trace
from piecegraph.errors import UnsupportedModel
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.inspect.explanation import explain
from piecegraph.runner.models.causal_lm import DYNAMIC_DIMS, CausalLMForward, example_inputs
from piecegraph.runner.models.config.load_config import load_config
from piecegraph.runner.models.load import load_model
from tests.runner import architectures
from tests.runner.architectures import save_tiny, tiny_config, tiny_model
from tests.runner.models_page import PAGE, RUNS, rows_of
from tests.runner.test_hybrid_models import check, generate, load_hybrid, manager
from tests.runner.test_sliding_windows import load_windowed
from tests.runner.traced_once import is_shareable

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gptj": ("gptj", {}),
    "codegen": ("codegen", {}),
    "gpt_neo": ("gpt_neo", {**architectures.OPTIONS["gpt_neo"]}),
    "diffllama": ("diffllama", {}),
    "xglm": ("xglm", {}),
    "mvp": ("mvp", {}),
    "openai-gpt": ("openai-gpt", {}),
    "gpt_neox_japanese": ("gpt_neox_japanese", {}),
    "doge": ("doge", {"sliding_window": None}),
    "doge with a window": ("doge", {"sliding_window": 8}),
    "ctrl": ("ctrl", {}),
    "dbrx": ("dbrx", {**architectures.OPTIONS["dbrx"]}),
    "dbrx of two experts": (
        "dbrx",
        {**architectures.OPTIONS["dbrx"], "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_top_k": 2}},
    ),
    "falcon": ("falcon", {}),
    "falcon of few KV heads": ("falcon", {"new_decoder_architecture": True}),
    "falcon of many KV heads": ("falcon", {"multi_query": False, "num_kv_heads": 4}),
    "falcon with biases": ("falcon", {"alibi": True}),
    "falcon with biases of few KV heads": ("falcon", {"alibi": True, "new_decoder_architecture": True}),
    "bloom": ("bloom", {}),
    "bloom of 6 heads": ("bloom", {"n_head": 6, "hidden_size": 48}),
    "mpt": ("mpt", {}),
    "mpt, clipped, of 6 heads": ("mpt", {"n_heads": 6, "d_model": 48, "attn_config": {"clip_qkv": 0.5}}),
}
"""By name, a model type and the options of its config."""
ALWAYS = (
    "codegen",
    "diffllama",
    "gpt_neo",
    "falcon with biases",
    "bloom of 6 heads",
)
"""The others are slow tests."""
CPU = torch.device("cpu")

models = pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
AS_ON_THE_PAGE = [
    name
    for name, (model_type, options) in MODELS.items()
    if name not in ALWAYS and options == architectures.OPTIONS.get(model_type, {})
]
"""The tests of docs/models.md ask these the same."""


def made(name: str, folder: Path) -> tuple[PreTrainedModel, Path]:
    """A random model, saved."""
    model_type, options = MODELS[name]
    with patch.object(architectures, "OPTIONS", {**architectures.OPTIONS, model_type: options}):
        model = tiny_model(model_type)
    return model, save_tiny(model_type, model, folder)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow)
        for name in MODELS
        if name not in AS_ON_THE_PAGE
    ],
)
def test_a_model_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    """In chunks, preempted, and again with what the prefix cache kept. All blocks are free in the end."""
    model, folder = made(name, tmp_path)
    num_kv_blocks = {"gpt_neo": 21, "doge with a window": 9}.get(name, 13)
    with load_hybrid(folder, max_model_len=40, num_kv_blocks=num_kv_blocks) as llm:
        for _ in range(2):
            check(model, generate(llm))
        stats = llm.engine.stats
        assert stats.num_preemptions > 0 and stats.num_prefix_hits > 0
        assert manager(llm).num_free_blocks == manager(llm).num_blocks


def test_the_other_models_are_on_the_page() -> None:
    rows = rows_of(PAGE.read_text(encoding="utf-8"))
    assert {rows[MODELS[name][0]].answer for name in AS_ON_THE_PAGE} == {RUNS}


@models
def test_all_that_a_trace_depends_on_is_known(name: str, tmp_path: Path) -> None:
    """So that the cache may keep it."""
    source = ModelSource(model=str(made(name, tmp_path)[1]))
    loaded = load_model(source, load_config(source), dtype=torch.float32, device=CPU)
    with torch.no_grad():
        traced = trace(CausalLMForward(loaded.model), example_inputs(CPU), {}, DYNAMIC_DIMS)
    assert is_shareable(traced)
    calls = [str(node.target) for node in traced.graph_module.graph.nodes if "piecegraph" in str(node.target)]
    assert len(calls) == 2, "a call for each layer"


@pytest.mark.parametrize(
    ("name", "field"), [("bloom", "n_layer"), pytest.param("diffllama", "num_hidden_layers", marks=pytest.mark.slow)]
)
def test_a_layer_is_traced_and_compiled_once(name: str, field: str, tmp_path: Path) -> None:
    """However many there are: their numbers and tables are buffers."""
    with patch.dict(MODELS, {"deep": (name, {field: 6})}):
        _, folder = made("deep", tmp_path)
    with load_hybrid(folder, num_kv_blocks=60) as llm:
        report = llm.compiled.report()
    assert (report.num_pieces, report.num_unique_pieces) == (7, 3)
    assert report.trace_note == "4 of 6 layers are copies of one that was traced"


class Ran(TorchDispatchMode):
    """A mode that records the names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def test_no_table_and_no_mask_is_computed(tmp_path: Path) -> None:
    """Falcon makes both biases and rotary embeddings, and reads one of them; here it makes neither."""
    _, folder = made("falcon with biases", tmp_path)
    ran = Ran()
    with load_hybrid(folder, num_kv_blocks=60) as llm:
        step: Any = llm.runner.step
        forward = step.forward

        def recorded(*args: Any) -> Any:
            with ran:
                return forward(*args)

        object.__setattr__(step, "forward", recorded)  # the model alone: the inputs of a step need masks of their own
        generate(llm)
    assert "piecegraph.biased_attention.default" in ran.names
    assert not ran.names & {"aten.cumsum.default", "aten.cos.default", "aten.pow.Tensor_Tensor", "aten.where.self"}


LIKE_ANOTHER = (
    "doge",
    "dbrx of two experts",
    "falcon of few KV heads",
    "falcon of many KV heads",
    "falcon with biases",
    "bloom",
    "mpt",
)
"""Models whose code is part of what another one of `MODELS` compiles, but for sizes."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in LIKE_ANOTHER])
def test_inductor_gives_the_same_tokens(name: str, tmp_path: Path) -> None:
    model, folder = made(name, tmp_path)
    with load_hybrid(folder, compiler="inductor", num_kv_blocks=60) as llm:
        check(model, generate(llm))


def test_modules_of_an_unknown_kind_are_refused_before_weights_are_read() -> None:
    with pytest.raises(
        UnsupportedModel, match=r"itself .* reformer\.encoder\S* \(LocalSelfAttention\) differs .* query"
    ):
        load_model(ModelSource(model="./nowhere"), tiny_config("reformer"), dtype=torch.float32, device=CPU)


def test_texts_whose_keys_would_be_masked_by_value_are_refused(tmp_path: Path) -> None:
    """Doge masks keys in texts of more than `keep_window_size` tokens."""
    with patch.dict(MODELS, {"short": ("doge", {"sliding_window": None, "keep_window_size": 16})}):
        _, folder = made("short", tmp_path)
    with pytest.raises(UnsupportedModel, match=r"of more than 16 tokens \(keep_window_size\).* not 17"):
        load_hybrid(folder, max_model_len=17)


@pytest.mark.parametrize(("name", "why"), [("cpmant", "32 tokens of its own"), ("xlnet", "empty one"), ("xlm", "mask")])
def test_models_that_do_not_go_from_left_to_right_say_why(name: str, why: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{why}.* no token's keys are final"):
        load_model(ModelSource(model="./nowhere"), tiny_config(name), dtype=torch.float32, device=CPU)


def test_ranks_do_not_divide_such_a_model() -> None:
    with pytest.raises(UnsupportedModel, match="tensor parallelism does not divide; use tensor_parallel_size=1"):
        load_model(ModelSource(model="./nowhere"), tiny_config("bloom"), dtype=torch.float32, device=CPU, num_ranks=2)


def test_kernels_without_a_bias_are_refused(tmp_path: Path) -> None:
    """On a GPU torch's attention runs; a backend that was asked for by name says why it cannot."""
    config = EngineConfig(source=ModelSource(model=str(made("bloom", tmp_path)[1])), max_model_len=64)
    explained = explain(config, assume_gpu=True)
    assert explained.backend == "sdpa" and "adds a bias by position" in explained.backend_reasons[0]
    assert [row.has_slopes for row in explained.attention] == [True]
    with pytest.raises(UnsupportedModel, match=r"self_attention adds a bias by position to its scores \(ALiBi\)"):
        explain(replace(config, attention_backend="triton"), assume_gpu=True)


@pytest.mark.parametrize("backend", ["triton", "sdpa"])
def test_recorded_graphs_give_the_same_tokens(backend: str, tmp_path: Path) -> None:
    model, folder = made("mpt", tmp_path)
    with load_windowed(folder, attention_backend=backend, num_kv_blocks=60) as llm:
        check(model, generate(llm))
