"""The effect of passes on a model, as lines of text and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from piecegraph.compiler.common.report import PassRow
    from piecegraph.runner.inspect.layer_view import LayerView
    from piecegraph.runner.inspect.linear_view import LinearRow

SHOWN_MISSES = 3
"""The most reasons that a text shows for each pass; a record has all."""


def pass_lines(rows: Sequence[PassRow]) -> list[str]:
    """Return a table with a line per pass, and below it the near misses, with equal reasons together."""
    if not rows:
        return ["none"]
    width = max(len("pass"), *(len(row.name) for row in rows))
    lines = [f"{'pass':<{width}}  matches  misses  nodes removed"]
    for row in rows:
        lines.append(f"{row.name:<{width}}  {row.matches:>7}  {len(row.misses):>6}  {row.nodes_removed:>13}")
        lines += [f"  undone: {row.error}"] if row.error else []
        lines += [f"  {row.note}"] if row.note else []
        reasons: dict[str, list[str]] = {}
        for miss in row.misses:
            reasons.setdefault(miss.reason, []).append(miss.node + (f" at {miss.line}" if miss.line else ""))
        for reason, nodes in list(reasons.items())[:SHOWN_MISSES]:
            others = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
            lines.append(f"  not {nodes[0]}{others}: {reason}")
        if len(reasons) > SHOWN_MISSES:
            lines.append(f"  and {len(reasons) - SHOWN_MISSES} more reasons (--json has all)")
    return lines


def pass_record(row: PassRow) -> dict[str, Any]:
    """Return a row for `--json`, with every miss. It has no seconds, because those are the seconds of tracing."""
    return {
        "name": row.name,
        "matches": row.matches,
        "misses": [{"node": miss.node, "reason": miss.reason, "line": miss.line} for miss in row.misses],
        "nodes_removed": row.nodes_removed,
        "place": row.place,
        "error": row.error,
        "note": row.note,
    }


def layer_lines(layer: LayerView) -> list[str]:
    """Return the launches of a decode step for the middle layer, as far as they are known before compilation."""
    known = [f"{op} {count}" for op, count in layer.ours.items()]
    known += [f"{op} {'?' if count is None else count}" for op, count in layer.split_ops.items()]
    if layer.matmuls:
        known.append(f"matmuls {layer.matmuls}")
    return [
        f"{layer.launches} launches known before compiling: {', '.join(known)}",
        f"left to Inductor: {layer.left_to_inductor or 'no'} operations",
    ]


def linear_line(row: LinearRow) -> str:
    """Return how linears alike are stored and which kernel multiplies by them; merged ones are joined by `+`."""
    folder, _, first = row.names[0].rpartition(".")
    others = [name.removeprefix(f"{folder}.") for name in row.names[1:]]
    name = " + ".join((f"{folder}.{first}" if folder else first, *others))
    op = "" if row.op == "linear" else f" ({row.op})"
    size = f"{row.num_columns} x {row.size}, {row.scheme}, {row.num_bytes / 1e6:.1f} MB"
    return f"{row.calls} x {name}: {size}, by {row.kernel}{op}"


def layer_record(layer: LayerView) -> dict[str, Any]:
    return {
        "unique_pieces": list(layer.unique_pieces),
        "ours": layer.ours,
        "matmuls": layer.matmuls,
        "left_to_inductor": layer.left_to_inductor,
        "split_ops": layer.split_ops,
        "launches": layer.launches,
    }
