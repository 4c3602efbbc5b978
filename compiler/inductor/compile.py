"""The compile of one piece by Inductor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from piecegraph.compiler.common.fake_values import fake_mode_of
from piecegraph.compiler.common.symbolic_sizes import shape_env_of, without_assumptions
from piecegraph.compiler.inductor.written_inputs import with_outputs_apart
from piecegraph.compiler.splitting.exact_strides import with_exact_strides
from piecegraph.compiler.torch_compat.versions import (
    allow_unbacked_layouts,
    compare_sizes_of_views_for_all_values,
    undecided_constants_are_kept,
    undecided_layouts_are_contiguous,
    undecided_layouts_are_copied,
    without_fake_tensor_cache,
)


def standalone_compile(graph_module: fx.GraphModule, examples: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Compile one piece for the sizes of its own placeholders and return a `CompiledArtifact`.

    The outputs of the compiled piece have the strides of their values in the graph, and share no memory with inputs
    that the piece writes. Raises what Inductor raises, and `SizesAssumed` if it assumed something of a dynamic size.
    """
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    try:
        return _compile(graph_module, examples, options)
    except GuardOnDataDependentSymNode:
        # The cache asks for the memory format of each tensor, which an unbacked size in a stride may leave undecided.
        with without_fake_tensor_cache(fake_mode_of(examples)):
            return _compile(graph_module, examples, options)


def _compile(graph_module: fx.GraphModule, examples: Sequence[Any], options: Mapping[str, Any]) -> Any:
    import torch._inductor

    with (
        torch.no_grad(),
        without_assumptions(examples),
        allow_unbacked_layouts(),
        compare_sizes_of_views_for_all_values(),
        undecided_layouts_are_contiguous(),
        undecided_layouts_are_copied(),
        undecided_constants_are_kept(),
    ):
        if (shape_env := shape_env_of(examples)) is not None:
            shape_env.pending_fresh_unbacked_symbols.clear()  # of values computed before, which no graph makes
        return torch._inductor.standalone_compile(
            with_exact_strides(graph_module),
            list(examples),
            dynamic_shapes="from_graph",
            options={"config_patches": with_outputs_apart(options)},
        )


def asks_dynamo_to_trace_again(error: Exception) -> bool:
    """Return whether Inductor asks Dynamo to trace again with a float as a constant, which is not a failure."""
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis

    return isinstance(error, TensorifyScalarRestartAnalysis)


def generated_kernels() -> int:
    """Return the number of kernels that Inductor generated in this process so far, cache hits included."""
    from torch._inductor import metrics

    return int(metrics.generated_kernel_count)
