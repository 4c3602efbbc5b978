"""A compilation config as scripts give vLLM's means the same here, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from piecegraph import CompileConfig
from piecegraph.errors import ConfigError
from piecegraph.runner.startup.compilation_options import compilation_options


@pytest.mark.parametrize(
    ("given", "compiler", "graphs"),
    [
        (None, "inductor", {}),
        (CompileConfig(compiler="eager"), "eager", {}),
        (3, "inductor", {}),
        (0, "eager", {}),
        ({"mode": 0}, "eager", {}),
        ({"level": 3, "mode": None, "cudagraph_mode": "PIECEWISE"}, "inductor", {"cudagraph_mode": "PIECEWISE"}),
        ({"cudagraph_capture_sizes": [1, 2], "passes": ()}, "inductor", {"cudagraph_capture_sizes": [1, 2]}),
    ],
)
def test_levels_and_graphs(given: Any, compiler: str, graphs: dict[str, Any]) -> None:
    found = compilation_options(given)
    assert (found.compile.compiler, found.graphs) == (compiler, graphs)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("x", "compilation_config='x'; it must be a CompileConfig, a dictionary"),
        (7, "compilation_config=7; a level is 0"),
        (True, "compilation_config=True; a level is 0"),
        ({"mode": "fast"}, r"compilation_config\['mode'\]='fast'; a level is"),
        ({"split_op": ()}, "unknown compile option 'split_op'"),
    ],
)
def test_a_value_that_is_not_a_config_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compilation_options(given)
