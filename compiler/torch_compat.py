"""What torch 2.11 and 2.13 do not have alike, and what of ours stands in for it. Checked against both.

The rule: a name, an option or a fault that one torch has and another has not is met here, and no other file names a
version of torch. Private modules of torch that both have alike are used where their concept lies: `dynamo.py`,
`symbolic_sizes.py`, `inductor_*.py`, `cpp_libraries.py`, `process_settings.py`, `graphs/cuda_graph.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from piecegraph import environment


def name_of_source(source: Any) -> str:
    """Where Dynamo found a value, as an expression. A method before torch 2.12, a property since."""
    name = source.name
    return str(name() if callable(name) else name)


def example_of(shape_env: ShapeEnv, symbol: Any) -> int:
    """The number a backed symbol was made from. torch 2.11 calls the mapping `var_to_val`."""
    examples = shape_env.backed_var_to_val if hasattr(shape_env, "backed_var_to_val") else shape_env.var_to_val
    return int(examples[symbol])


_TUNED_AT_FIRST_RUN = {
    # standalone_compile would measure kernels while it compiles, on random inputs, in processes side by side.
    "triton.autotune_at_compile_time": False,
    # torch 2.11 bundles such a kernel with the configuration it had before it was tuned and, where that was the
    # only one, never looks for what tuning found: every process would tune anew.
    "use_static_cuda_launcher": False,
}


def tuned_at_first_run() -> dict[str, Any]:
    """Inductor options under which kernels are measured when they first run, and found tuned after that."""
    from torch._inductor import config

    known = config.get_config_copy()
    return {name: value for name, value in _TUNED_AT_FIRST_RUN.items() if name in known}


def graph_exec_of(graph: torch.cuda.CUDAGraph) -> int:
    """The handle of an instantiated graph (torch 2.11 has the method, its stubs do not)."""
    handle: int = graph.raw_cuda_graph_exec()  # type: ignore[attr-defined,unused-ignore]
    return handle


def allocator_settings() -> str:
    """What torch's allocator was last told, by the program or the environment. A torch that does not tell is taken to
    be set by the environment."""
    ask = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if ask is not None:
        return str(ask() or "")
    return environment.read("PYTORCH_ALLOC_CONF") or environment.read("PYTORCH_CUDA_ALLOC_CONF") or ""
