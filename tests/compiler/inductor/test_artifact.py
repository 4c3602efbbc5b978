"""A compiled piece that torch cannot save is an error of its own, with torch's reason and no address in it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import fx

from piecegraph.compiler.inductor.artifact import NotSavable, artifact_bytes, check_savable, save_artifact


def graph_of(function: object) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output((graph.call_function(function, (graph.placeholder("x"),)),))  # type: ignore[arg-type]
    return fx.GraphModule({}, graph)


def test_a_function_that_torch_does_not_save_is_known_before_the_compile() -> None:
    check_savable(graph_of(torch.relu))
    with pytest.raises(NotSavable, match=r"cannot save .*target <function relu>\)$"):
        check_savable(graph_of(torch._refs.nn.functional.relu))


def test_what_torch_says_when_it_saves_nothing_is_the_reason(tmp_path: Path) -> None:
    def save(**options: str) -> None:
        raise RuntimeError("failed to save.\nCacheInfo(...)")

    with pytest.raises(NotSavable, match=r"^torch cannot save the compiled piece \(failed to save\)$"):
        save_artifact(SimpleNamespace(save=save), tmp_path / "artifact")
    assert artifact_bytes(SimpleNamespace(save=save)) is None
