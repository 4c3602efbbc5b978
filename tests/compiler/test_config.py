"""What a caller may choose about compiling (`piecegraph.config`): checked when it is made."""

from __future__ import annotations

from typing import Any

import pytest

import piecegraph as pg
from piecegraph.errors import ConfigError


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (4, r"compile_sizes is 4; give a tuple of sizes, e.g. \(1, 2, 4\)"),
        ("1,2", r"compile_sizes is '1,2'; give a tuple"),
        ((0, 1), "compile_sizes has 0; a size is a whole number, 1 or more"),
        ((1, -2), "compile_sizes has -2"),
        ((1, 2.0), r"compile_sizes has 2\.0"),
        ((True,), "compile_sizes has True"),
        (("4",), "compile_sizes has '4'"),
        ((4, 1), r"compile_sizes is \(4, 1\); sizes ascend and appear once: give \(1, 4\)"),
        ((1, 1, 2), r"give \(1, 2\)"),
    ],
)
def test_compile_sizes_that_mean_nothing_are_refused(sizes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pg.CompileConfig(compile_sizes=sizes)


@pytest.mark.parametrize("options", [{"passes": ("tail",)}, {"expect": {"tail": 1}}])
def test_the_former_name_of_a_pass_is_refused_with_the_new_one(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="pass 'tail' is named 'select-rows-early' now"):
        pg.CompileConfig(**options)


def test_compile_sizes_by_name_may_be_a_list() -> None:
    """Options come from `torch.compile(options=...)` and from files, where sequences are lists."""
    config = pg.CompileConfig.from_options({"compile_sizes": [1, 2, 8]})
    assert config.compile_sizes == (1, 2, 8)
    assert config.compile_sizes_options == {"coordinate_descent_tuning": True}
    assert pg.CompileConfig().compile_sizes == ()
