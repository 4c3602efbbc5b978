"""Pieces and stitched source as files, and in torch's structured trace."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

import piecegraph as pg
from piecegraph.errors import ConfigError
from tests.compiler.toy import DIMS, SPLIT_OPS, Decoder, batch

ROOT = Path(__file__).parents[3]


def compile_into(folder: Path) -> pg.CompiledModel:
    config = pg.CompileConfig(split_ops=SPLIT_OPS, compiler="eager", passes=(), dump_dir=str(folder))
    return pg.compile(Decoder(), config, dynamic_dims=DIMS, example_inputs=batch(4))


def test_a_folder_receives_graph_pieces_and_stitched_source(tmp_path: Path) -> None:
    compiled = compile_into(tmp_path / "dump")
    files = {path.name for path in (tmp_path / "dump").iterdir()}
    pieces = {f"piece_{index}.py" for index in range(4)} | {f"piece_{index}.canonical.txt" for index in range(4)}
    assert files == {"graph.py", "stitched.py"} | pieces
    assert (tmp_path / "dump" / "stitched.py").read_text() == compiled.source
    assert "pgtoy.attention" in (tmp_path / "dump" / "graph.py").read_text()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"dump_dir=.*file.* cannot be written"):
        compile_into(tmp_path / "file")


@pytest.mark.slow
def test_structured_trace_carries_pieces_and_source(tmp_path: Path) -> None:
    """tlparse reads these artifacts by name."""
    program = """
        import torch, piecegraph as pg
        from tests.compiler.toy import DIMS, SPLIT_OPS, Decoder, batch
        config = pg.CompileConfig(split_ops=SPLIT_OPS, compiler="eager", passes=())
        pg.compile(Decoder(), config, dynamic_dims=DIMS, example_inputs=batch(4))
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={"TORCH_TRACE": str(tmp_path), "PYTHONPATH": ":".join(path for path in sys.path if path) + ":."},
        check=True,
    )
    log = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    for name in ("piecegraph_piece_0", "piecegraph_piece_3", "piecegraph_stitched"):
        assert f'"{name}"' in log


@pytest.mark.slow
def test_depyf_sees_what_torch_compiled(tmp_path: Path) -> None:
    """depyf's folder has the graphs and the decompiled bytecode, by backend name and by piecegraph.compile."""
    if find_spec("depyf") is None:
        pytest.skip("depyf is not installed")
    program = f"""
        import depyf, torch, piecegraph as pg
        from tests.compiler.toy import DIMS, SPLIT_OPS, Decoder, batch
        model = Decoder(2).requires_grad_(False)
        options = {{"split_ops": list(SPLIT_OPS), "compiler": "eager"}}
        with depyf.prepare_debug({str(tmp_path)!r}):
            torch.compile(model, backend="piecegraph", fullgraph=True, dynamic=True, options=options)(*batch(9, 3))
            config = pg.CompileConfig(split_ops=SPLIT_OPS, compiler="eager")
            pg.compile(model, config, dynamic_dims=DIMS, example_inputs=batch(4))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, capture_output=True, cwd=ROOT)
    names = {path.name for path in tmp_path.iterdir()}
    assert "__transformed_code_0_for_forward.py" in names
    assert any(name.startswith("__compiled_fn_1.") for name in names)
