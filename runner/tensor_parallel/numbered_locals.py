"""A source whose local variables have numbers for names, so that two sources can be compared but for their names."""

from __future__ import annotations

import ast


def with_numbered_locals(source: str) -> str:
    """Return a source in which each name that is assigned, or is a parameter, is its place among these names."""
    tree = ast.parse(source)
    nodes = sorted(
        (node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.arg)),
        key=lambda node: (node.lineno, node.col_offset),
    )
    bound = {node.arg if isinstance(node, ast.arg) else node.id for node in nodes if _binds(node)}
    numbers: dict[str, str] = {}
    for node in nodes:
        name = node.arg if isinstance(node, ast.arg) else node.id
        if name in bound:
            number = numbers.setdefault(name, f"local_{len(numbers)}")
            if isinstance(node, ast.arg):
                node.arg = number
            else:
                node.id = number
    return ast.unparse(tree)


def _binds(node: ast.Name | ast.arg) -> bool:
    """Return whether a node gives its name a value."""
    return isinstance(node, ast.arg) or isinstance(node.ctx, ast.Store)
