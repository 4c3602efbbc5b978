"""Each linear is explained: how it is stored, what it is merged into, and the kernel that multiplies by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from piecegraph.config import CompileConfig
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.inspect.explanation import explain
from piecegraph.runner.inspect.linear_view import FEW_ROWS_KERNEL, ONEDNN_KERNEL, PLAIN_KERNEL, LinearRow
from piecegraph.runner.quantization.methods.all_methods import METHODS
from piecegraph.tools.command_line.passes_text import linear_line
from tests.runner.tiny_models import llama_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    llama_config(num_hidden_layers=3).save_pretrained(str(folder))
    return folder


def rows_of(folder: Path, *passes: str, quantization: str | None = None, dtype: str = "float32") -> list[LinearRow]:
    config = EngineConfig(
        source=ModelSource(model=str(folder)),
        device="cpu",
        dtype=dtype,
        quantization=quantization,
        compile=CompileConfig(passes=passes),
    )
    return list(explain(config).linears)


def test_layers_alike_are_together_and_merged_linears_are_one(folder: Path) -> None:
    rows = {row.names: row for row in rows_of(folder, "merge-projections")}
    attention, mlp = "model.layers.*.self_attn.", "model.layers.*.mlp."
    assert list(rows) == [
        (f"{attention}q_proj", f"{attention}k_proj", f"{attention}v_proj"),
        (f"{attention}o_proj",),
        (f"{mlp}gate_proj", f"{mlp}up_proj"),
        (f"{mlp}down_proj",),
        ("lm_head",),
    ]
    assert [row.calls for row in rows.values()] == [3, 3, 3, 3, 1]
    assert {(row.scheme, row.op, row.kernel) for row in rows.values()} == {("float32", "linear", PLAIN_KERNEL)}
    for row in rows.values():
        assert row.num_bytes == row.calls * row.num_columns * row.size * 4


def test_without_the_pass_each_linear_is_its_own(folder: Path) -> None:
    assert [len(row.names) for row in rows_of(folder)] == [1] * 8


def test_a_quantised_linear_tells_its_scheme_and_its_kernel(folder: Path) -> None:
    rows = rows_of(folder, "merge-projections", quantization="int8")
    assert {(row.scheme, row.op) for row in rows} == {("int8", "piecegraph::int8_linear")}
    assert {row.kernel for row in rows} == {METHODS["int8"].kernels["cpu"]}
    first = rows[0]
    assert first.num_bytes == 3 * first.num_columns * (first.size + 4), "a byte a weight and a float32 a channel"


def test_the_kernels_of_a_pass_are_told(tmp_path: Path) -> None:
    """The norm behind a linear may be part of its op, and the linear behind that."""
    llama_config(num_hidden_layers=3, hidden_size=128, intermediate_size=256).save_pretrained(str(tmp_path))
    rows = rows_of(tmp_path, "merge-projections", "fuse-add-rms-norm", "fuse-linear", dtype="bfloat16")
    assert {row.kernel for row in rows} == {FEW_ROWS_KERNEL}
    assert sum(row.calls for row in rows) == 13


def test_large_linears_in_float32_are_onednns(tmp_path: Path) -> None:
    llama_config(num_hidden_layers=2, hidden_size=64, vocab_size=4096).save_pretrained(str(tmp_path))
    rows = {row.names: (row.op, row.kernel) for row in rows_of(tmp_path, "merge-projections", "use-onednn")}
    assert rows.pop(("lm_head",)) == ("piecegraph::onednn_linear", ONEDNN_KERNEL)
    assert set(rows.values()) == {("linear", PLAIN_KERNEL)}


def test_a_line_names_merged_linears_once(folder: Path) -> None:
    row = LinearRow(
        names=("layers.*.q_proj", "layers.*.k_proj"), calls=2, num_columns=96, size=64, scheme="int8",
        op="piecegraph::int8_linear", kernel="a kernel", num_bytes=12_480,
    )  # fmt: skip
    assert linear_line(row) == (
        "2 x layers.*.q_proj + k_proj: 96 x 64, int8, 0.0 MB, by a kernel (piecegraph::int8_linear)"
    )
