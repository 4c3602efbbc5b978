"""One piece through Inductor, with a pass of ours inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx


def standalone_compile(graph_module: fx.GraphModule, examples: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Compile one piece for the sizes of its own placeholders; a `CompiledArtifact`."""
    import torch._inductor

    with torch.no_grad():
        return torch._inductor.standalone_compile(
            graph_module, list(examples), dynamic_shapes="from_graph", options={"config_patches": dict(options)}
        )


POST_GRAD_OPTION = "post_grad_custom_post_pass"


def custom_graph_pass(function: Callable[[fx.Graph], None], uuid: str) -> Any:
    """What `POST_GRAD_OPTION` takes: Inductor calls `function` on its graph after its own passes, and `uuid` is
    part of its cache's key."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Call(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            function(graph)

        def uuid(self) -> str:
            return uuid

    return Call()


def asks_dynamo_to_trace_again(error: Exception) -> bool:
    """Not a failure: Inductor wants the graph traced with some float as a constant, and Dynamo waits for this."""
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis

    return isinstance(error, TensorifyScalarRestartAnalysis)


def generated_kernels() -> int:
    """Kernels Inductor generated in this process so far (cache hits count as well)."""
    from torch._inductor import metrics

    return int(metrics.generated_kernel_count)
