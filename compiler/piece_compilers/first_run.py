"""The first run of pieces at new sizes, in which failed assertions of generated code are handled.

Code that Inductor generates asserts the sizes and strides of its inputs and of the results of library calls. A piece
whose assertion fails is replaced by its graph, which accepts any strides. A forward that has run once at some sizes
passes the same assertions in every later call at these sizes, so those calls are not watched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from piecegraph.compiler.common.piece_errors import shortened
from piecegraph.compiler.piece_compilers.protocol import Fallback, RunPiece
from piecegraph.passes.matching.effects import written_inputs


def written_positions(graph: fx.Graph) -> tuple[int, ...]:
    """Return the positions, among the inputs of a piece, of the tensors that it may change in place."""
    written = set(written_inputs(graph))
    return tuple(number for number, node in enumerate(graph.find_nodes(op="placeholder")) if node in written)


class WatchedPiece:
    """A compiled piece that is replaced by its graph when one of its own checks fails.

    A check may fail after kernels have run. Inputs that the piece changes in place are therefore copied before the run
    and restored before the graph runs. Nothing is copied while a CUDA graph is captured: there, the error of a piece
    that changes CUDA inputs in place propagates.
    """

    def __init__(self, run: RunPiece, fallback: Fallback, on_failure: Callable[[str], None]) -> None:
        """Watch `run`. `on_failure` is called with the reason after the graph has run in its place."""
        self._run = run
        self._fallback = fallback
        self._on_failure = on_failure
        self._is_graph = False

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Run the piece, or its graph if one of the piece's checks fails or has failed before."""
        if self._is_graph:
            return self._run(*inputs)
        copies = self._copies(inputs)
        try:
            return self._run(*inputs)
        except AssertionError as error:
            if copies is None:
                raise
            for position, copy in copies.items():
                inputs[position].copy_(copy)
            run = self._fallback.graph()
            outputs = run(*inputs)  # an error of the graph is an error of the model, and propagates
            self._run, self._is_graph = run, True
            self._on_failure(f"its first run failed a check of its own: {shortened(str(error))}")
            return outputs

    def _copies(self, inputs: Sequence[Any]) -> dict[int, torch.Tensor] | None:
        """Return copies of the inputs that the piece changes, by position; None where nothing can be copied."""
        written = {position: inputs[position] for position in self._fallback.writes}
        if any(tensor.is_cuda for tensor in written.values()) and torch.cuda.is_current_stream_capturing():
            return None
        return {position: tensor.clone() for position, tensor in written.items()}
