"""The part of a model for which its code is not one graph, and what it does there.

A trace fails at a line of code. Whose line it is, and whether it is a loop, a branch or an assignment, says which
mechanism of the model cannot run.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from traceback import FrameSummary

from torch import nn

from piecegraph.errors import CompileError, UnsupportedModel, shorten


@contextmanager
def refused_by_module(model: nn.Module) -> Iterator[None]:
    """Raise `UnsupportedModel` instead of a `CompileError` of tracing `model`, if a module of it is the reason."""
    try:
        yield
    except CompileError as error:
        reason = untraceable_part(model, error)
        if reason is None:
            raise
        raise UnsupportedModel(
            f"{reason}. piecegraph compiles a model as one graph, for batches of any size."
        ) from error


def untraceable_part(model: nn.Module, error: CompileError) -> str | None:
    """Return which module of `model` is not part of one graph, and why; None if that is not known."""
    stack: Sequence[object] = getattr(error.__cause__, "real_stack", None) or ()
    frames = [frame for frame in stack if isinstance(frame, FrameSummary)]
    innermost = [frame for frame in frames if "/torch/" not in frame.filename][-1:]
    for frame in reversed(frames):
        name = _module_with(frame, model)
        if name is not None and innermost:
            return f"{name} {_what(frame.line or '', innermost[0].line or '', str(error.__cause__))}"
    if error.__cause__ is None and "objects that outlive the call" in str(error):
        return _replaced_buffer(model)
    return None


def _module_with(frame: FrameSummary, model: nn.Module) -> str | None:
    """Return the name and the class of the first module whose class has the code of `frame`."""
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            method = inspect.unwrap(vars(kind).get(frame.name, None)) if frame.name in vars(kind) else None
            code = getattr(method, "__code__", None)
            if code is None or kind.__module__.startswith("torch."):
                continue
            lines = [line for _, _, line in code.co_lines() if line is not None]
            if code.co_filename == frame.filename and min(lines) <= (frame.lineno or 0) <= max(lines):
                return f"{name or 'the model'} ({type(module).__name__})"
    return None


def _what(line: str, innermost: str, error: str) -> str:
    """Return what a module does at `line` of its own code, from which code comes to the `innermost` line."""
    line, innermost = line.strip(), innermost.strip()
    if line.startswith("for "):
        return f"repeats a loop as often as the values or the size of a step say ({line})"
    if line.startswith(("if ", "while ")):
        return f"asks for the size or the values of a step, whose tokens are of several texts ({line})"
    if re.match(r"self\.\w+ = ", line):
        return f"replaces an attribute of its own in its forward ({line})"
    found = re.search(r"got (\w+\(['\"].*?['\"]\))", error)
    reason = found.group(1) if found else next((each.strip() for each in error.splitlines() if each.strip()), "")
    return f"runs code that cannot be traced ({innermost or line}): {shorten(reason, 200)}"


def _replaced_buffer(model: nn.Module) -> str | None:
    """Return the first module that assigns to a buffer of its own in its forward, and which."""
    for name, module in model.named_modules():
        try:
            code = inspect.getsource(inspect.unwrap(type(module).forward))
        except (OSError, TypeError):  # of a class without a file
            continue
        for line in code.splitlines():
            found = re.match(r"\s*self\.(\w+) = ", line)
            if found is not None and found.group(1) in module._buffers:
                return f"{name or 'the model'} ({type(module).__name__}) {_what(line, line, '')}"
    return None
