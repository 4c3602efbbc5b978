from __future__ import annotations

from piecegraph.compiler.common.report import PassRow
from piecegraph.passes.matching.graph_pass import Miss
from piecegraph.runner.inspect.layer_view import LayerView
from piecegraph.tools.command_line.passes_text import layer_lines, pass_lines, pass_record


def row(name: str, *misses: tuple[str, str]) -> PassRow:
    return PassRow(
        name=name, matches=3, misses=tuple(Miss(*miss) for miss in misses), nodes_removed=7, seconds=0.5
    )  # fmt: skip


def test_a_line_a_pass() -> None:
    assert pass_lines([row("mine"), row("fuse-linear")]) == [
        "pass         matches  misses  nodes removed",
        "mine               3       0              7",
        "fuse-linear        3       0              7",
    ]
    assert pass_lines([]) == ["none"]


def test_equal_reasons_are_told_once_with_the_first_site() -> None:
    lines = pass_lines([row("mine", ("rsqrt", "it is float64"), ("rsqrt_1", "it is float64"), ("rsqrt_2", "a reader"))])
    assert lines[2:] == ["  not rsqrt and 1 more: it is float64", "  not rsqrt_2: a reader"]


def test_many_reasons_are_cut_and_say_so() -> None:
    lines = pass_lines([row("mine", *((f"n{i}", f"reason {i}") for i in range(5)))])
    assert len(lines) == 2 + 3 + 1
    assert lines[-1] == "  and 2 more reasons (--json has all)"


def test_a_pass_that_was_undone_says_why_and_a_miss_where() -> None:
    failed = PassRow(
        name="mine",
        matches=0,
        misses=(Miss("rsqrt", "it is float64", "model.py:7 (x * y)"),),
        nodes_removed=0,
        seconds=0.0,
        error="it raised KeyError",
        note="not counted",
    )
    lines = pass_lines([failed])
    assert lines[2:] == [
        "  undone: it raised KeyError",
        "  not counted",
        "  not rsqrt at model.py:7 (x * y): it is float64",
    ]
    record = pass_record(failed)
    assert (record["error"], record["misses"][0]["line"]) == ("it raised KeyError", "model.py:7 (x * y)")


def test_a_record_has_every_miss() -> None:
    record = pass_record(row("mine", *((f"n{i}", f"reason {i}") for i in range(5))))
    assert [miss["node"] for miss in record["misses"]] == ["n0", "n1", "n2", "n3", "n4"]
    assert "seconds" not in record


def test_a_layer_of_known_and_unknown_launches() -> None:
    layer = LayerView(
        unique_pieces=(1,),
        ours={"piecegraph::act_mul": 1},
        matmuls=4,
        left_to_inductor=12,
        split_ops={"piecegraph::attention": None},
    )
    assert layer_lines(layer) == [
        "5 launches known before compiling: piecegraph::act_mul 1, piecegraph::attention ?, matmuls 4",
        "left to Inductor: 12 operations",
    ]
