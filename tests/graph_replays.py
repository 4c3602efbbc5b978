"""What a function computes inside a CUDA graph, where kernels may overlap, beside what it computes outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def assert_replays_equal(function: Callable[[], Sequence[torch.Tensor]], num_replays: int = 50) -> None:
    """Bit by bit, replay after replay, over results that were cleared."""
    wanted = function()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = function()
    for _ in range(num_replays):
        for each in found:
            each.zero_()
        graph.replay()
        assert all(map(torch.equal, found, wanted))
