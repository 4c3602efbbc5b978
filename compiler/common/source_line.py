"""The line of the model's code that a node came from, as Dynamo recorded it."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path

import torch
from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in \S+\n\s*(.+)')
_TORCH = str(Path(torch.__file__).parent)

MAX_SEARCHED_NODES = 16
"""The most nodes that are searched for a line: a node without a line has the line of the nearest node it reads."""


def source_line(node: fx.Node) -> str:
    """Return `"file:line (code)"` of the innermost frame outside torch, or "" where Dynamo kept no line."""
    queue, seen = deque([node]), {node}
    while queue and len(seen) <= MAX_SEARCHED_NODES:
        asked = queue.popleft()
        frames = _FRAME.findall(asked.meta.get("stack_trace") or "")
        outside = [frame for frame in frames if not frame[0].startswith(_TORCH)]
        if outside:
            file, line, code = outside[-1]
            return f"{file}:{line} ({code.strip()})"
        new = [read for read in asked.all_input_nodes if read not in seen and read.op != "placeholder"]
        seen.update(new)
        queue.extend(new)
    return ""
