"""Whatever heads, head size, hidden size and experts a family is given: Inductor compiles it, and each piece returns
what the next one was compiled for.

C++ takes most of a compile on a CPU. So a few of the shapes are built whole, and answer token by token. Of the others
all code is generated and run over kernels that do nothing: what Inductor refuses, and every size and stride that its
code asserts, is seen all the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile
from transformers import PreTrainedConfig

from piecegraph import LLM, SamplingParams
from tests.rounds import ROUNDS
from tests.runner.margin_rule import assert_same_tokens
from tests.runner.tiny_models import FAMILIES, UNLISTED, random_model, save

SHAPES = ROUNDS
"""Shapes drawn of each family: 27 together; 7 rounds draw 200, which takes half an hour of a core."""

PROMPTS = [[5, 17, 3], [9], list(range(20, 44))]
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
BUILT = ("llama", "glm4", "gpt-oss", "deepseek-v3", "qwen3-moe", "gemma2")
ALL = {**FAMILIES, **UNLISTED}


def drawn(name: str, seed: object) -> PreTrainedConfig:
    """The config of family `name` with a shape of its own."""
    draw = random.Random(f"{name} {seed}")
    num_heads, num_kv_heads = draw.choice([(1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (8, 2), (3, 3), (6, 3)])
    head_dim = draw.choice([8, 16])
    return shaped(
        name,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=num_heads * (head_dim if draw.random() < 0.6 else draw.choice([8, 24, 32])),
        num_hidden_layers=draw.choice([1, 2]),
        intermediate_size=draw.choice([16, 24, 64]),
        num_experts=draw.choice([2, 4, 8]),
        num_experts_per_tok=draw.choice([1, 2]),
    )


def shaped(name: str, **shape: Any) -> PreTrainedConfig:
    """The config of family `name` with this shape, as far as the family has such fields."""
    base = ALL[name]()
    values = base.to_dict()
    num_layers, num_heads = shape["num_hidden_layers"], shape["num_attention_heads"]
    values |= {field: value for field, value in shape.items() if field in values and field not in EXPERTS}
    values |= {field: shape["num_experts"] for field in EXPERTS if values.get(field)}
    for field in ("layer_types", "no_rope_layers", "mlp_layer_types"):
        if values.get(field):
            values[field] = (values[field] * 2)[:num_layers]
    if name == "gpt2":
        values |= {"n_head": num_heads, "n_embd": shape["hidden_size"], "n_layer": num_layers}
    if name == "opt":
        values["word_embed_proj_dim"] = shape["hidden_size"]
    if name == "deepseek-v3":
        values["num_key_value_heads"] = num_heads
        values.pop("head_dim")
    for factors in ("short_factor", "long_factor"):
        if (values.get("rope_parameters") or {}).get(factors):
            values["rope_parameters"][factors] = [1.5] * (shape["hidden_size"] // num_heads // 2)
    for field in ("model_type", "transformers_version", "architectures"):
        values.pop(field, None)
    return type(base)(**values)


@contextmanager
def kernels_that_do_nothing() -> Iterator[None]:
    """Inside this block Inductor's C++ is generated and not built, and what it would fill is zero."""

    def zeros(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype).zero_()

    guards = torch._C._dynamo.guards
    with (
        patch.object(AsyncCompile, "cpp_pybinding", lambda self, types, source: lambda *args: None),
        patch.object(guards, "_empty_strided_cpu", zeros),
    ):
        yield


def check(config: PreTrainedConfig, folder: Path, *, is_built: bool) -> None:
    """Compile it and run several lengths; no piece may be one that Inductor failed on."""
    model = random_model(config)
    options: dict[str, Any] = {"compiler": "inductor", "compilation_config": {"compile_workers": 0, "cache": False}}
    with (
        nullcontext() if is_built else kernels_that_do_nothing(),
        LLM(save(model, folder), skip_tokenizer_init=True, dtype="float32", cudagraph_mode="NONE", **options) as llm,
    ):
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
        assert llm.compiled.report().eager_pieces == {}, config
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        if is_built:
            assert_same_tokens(model, prompt, output.outputs[0].token_ids)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_inductor_compiles_every_tiny_shape(name: str, tmp_path: Path) -> None:
    for number in range(SHAPES):
        check(drawn(name, number), tmp_path / str(number), is_built=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT)
def test_every_tiny_shape_answers_like_transformers(name: str, tmp_path: Path) -> None:
    check(drawn(name, "built"), tmp_path, is_built=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_heads", "num_kv_heads", "head_dim", "hidden_size"),
    [
        ("llama", 4, 1, 8, 32),
        pytest.param("glm4", 4, 2, 16, 64, marks=pytest.mark.slow),
        pytest.param("gpt-oss", 1, 1, 8, 32, marks=pytest.mark.slow),
    ],
)
def test_shapes_that_inductor_refused(
    name: str, num_heads: int, num_kv_heads: int, head_dim: int, hidden_size: int, tmp_path: Path
) -> None:
    """The shapes have one KV head, a tensor that is also channels-last, and rotary tables transposed in memory."""
    config = shaped(
        name,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        num_hidden_layers=1,
        intermediate_size=24,
        num_experts=2,
        num_experts_per_tok=1,
    )
    check(config, tmp_path, is_built=False)
