"""A pass as data: made again, or a reason why not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from torch import fx

from piecegraph.passes.matching.graph_pass import GraphPass, PassContext, PassResult
from piecegraph.passes.matching.pass_data import NotData, pass_as_data, pass_from_data


@dataclass(frozen=True)
class Options(GraphPass):
    name: ClassVar[str] = "options"
    times: int = 1
    sizes: tuple[tuple[int, float], ...] = ()
    word: str | None = None
    other: Any = None

    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        return PassResult()


def test_a_pass_is_rebuilt_from_json() -> None:
    each = Options(times=3, sizes=((1, 0.5), (2, 0.25)), word="x")
    made = pass_from_data(json.loads(json.dumps(pass_as_data(each))))
    assert made == each
    assert made.uuid() == each.uuid()


def test_a_pass_that_is_not_plain_data_is_refused() -> None:
    @dataclass(frozen=True)
    class Local(Options):
        pass

    with pytest.raises(NotData, match="Local is not a class that another process can import"):
        pass_as_data(Local())
    with pytest.raises(NotData, match=r"Options\.other is a object, which is not plain data"):
        pass_as_data(Options(other=object()))
    data = pass_as_data(Options())
    with pytest.raises(NotData, match="Options is another in another process"):
        pass_from_data({**data, "uuid": "0"})
    with pytest.raises(NotData, match="Options cannot be made in another process: ModuleNotFoundError"):
        pass_from_data({**data, "module": "no_such_module"})
