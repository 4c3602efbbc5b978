"""The libraries' functions for prompts, and which of them can be called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from piecegraph.runner.state_layers.libraries.choice import Installed, Library

Function = Callable[..., Any]

_FUNCTIONS: Mapping[Library, tuple[str, str, tuple[str, ...], str]] = {
    Library.FLA: (
        "fla.ops.gated_delta_rule",
        "chunk_gated_delta_rule",
        ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens", "chunk_indices"),
        "pip install 'flash-linear-attention>=0.6'",
    ),
    Library.MAMBA_SSM: (
        "mamba_ssm.ops.triton.ssd_combined",
        "mamba_chunk_scan_combined",
        ("chunk_size", "D", "initial_states", "return_final_states"),
        "pip install 'mamba-ssm>=2.2' --no-build-isolation",
    ),
}
"""By library: the module and the name of its function, the arguments that we pass by name, and how to install it."""


def load_function(library: Library) -> Function:
    """Import and return a library's function. Raises what the import raises."""
    module, name, _, _ = _FUNCTIONS[library]
    function: Function = getattr(import_module(module), name)
    return function


def installed(*, imports: bool = True) -> Installed:
    """Return which libraries can be called.

    `imports`: they are imported, which takes seconds, and their functions' arguments are read; otherwise a package that
    is found counts.
    """
    return {library: _missing(library, imports=imports) for library in Library}


def _missing(library: Library, *, imports: bool) -> str | None:
    module, name, wanted, install = _FUNCTIONS[library]
    if find_spec(module.partition(".")[0]) is None:
        return f"not installed ({install})"
    if not imports:
        return None
    try:
        parameters = inspect.signature(load_function(library)).parameters
    except Exception as error:  # whatever a package raises that was built for another torch
        line = next(iter(str(error).splitlines()), "")
        return f"installed, but cannot be imported ({type(error).__name__}: {line})"
    absent = [each for each in wanted if each not in parameters]
    return f"too old: its {name} takes no {', '.join(absent)} ({install})" if absent else None
