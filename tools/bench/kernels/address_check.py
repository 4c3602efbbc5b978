"""Measure the cost of checking at every replay that weights still lie where a graph reads them.

`python -m piecegraph.tools.bench.kernels.address_check` prints microseconds for a model with as many tensors as the
embedded one, on a GPU with CUDA graphs, elsewhere with recorded graphs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import click
import torch
from torch import nn

from piecegraph.compiler.api import compile as compile_module
from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.compiler.graphs.graphs import Graphs
from piecegraph.config import CompileConfig

HIDDEN = {"cuda": 576, "cpu": 32}
"""The hidden size by device: on a GPU that of the embedded model, so that a replay takes as long as a decode step."""

LINEARS_OF_A_LAYER = 9
"""The number of tensors of one layer of the embedded model."""

ROUNDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressCheck:
    """Microseconds per replay: the median of rounds, each the mean of its replays."""

    device: str
    num_weights: int
    num_watched: int
    check_us: float  # the check alone
    replay_us: float  # a replay and the wait for it, with the check
    unchecked_us: float  # the same without


class _Layers(nn.Module):
    """A chain of linears that cannot be merged, so that every parameter is watched and read."""

    def __init__(self, num_layers: int, hidden: int, device: torch.device) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden, hidden, bias=False, device=device) for _ in range(LINEARS_OF_A_LAYER))
            for _ in range(num_layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[num_tokens, hidden]` to a tensor of the same shape."""
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleList)
            for linear in layer:
                x = linear(x)
        return x


def measure_address_check(num_layers: int = 30, replays: int = 20) -> AddressCheck:
    """Time replays of one graph of one row with the check of all addresses and without, by turns."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hidden = HIDDEN[device.type]
    x = torch.randn(1, hidden, device=device)
    caches = [(f"cache {number}", torch.zeros(16, device=device)) for number in range(2 * num_layers)]
    descriptor = BatchDescriptor(num_tokens=1)
    with torch.no_grad():
        compiled = compile_module(
            _Layers(num_layers, hidden, device),
            CompileConfig(compiler="eager", cache=False),
            dynamic_dims={"x": {0: "num_tokens"}},
            example_inputs=(torch.randn(2, hidden, device=device),),
        )
        with compiled, compiled.capture([descriptor], lambda _: [x], mode="FULL", watched=caches) as graphs:

            def replay() -> None:
                graphs.replay(descriptor)
                if device.type == "cuda":
                    torch.cuda.synchronize()

            def unchecked() -> None:
                check = Graphs._check
                Graphs._check = lambda self: None  # type: ignore[method-assign]  # put back below
                try:
                    for _ in range(replays):
                        replay()
                finally:
                    Graphs._check = check  # type: ignore[method-assign]

            replay()
            with_it, without, alone = [], [], []
            for _ in range(ROUNDS):
                with_it.append(_seconds(replay, replays))
                without.append(_seconds(unchecked, 1))
                alone.append(_seconds(graphs._check, replays))
    return AddressCheck(
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        num_weights=num_layers * LINEARS_OF_A_LAYER,
        num_watched=len(caches),
        check_us=median(alone) / replays * 1e6,
        replay_us=median(with_it) / replays * 1e6,
        unchecked_us=median(without) / replays * 1e6,
    )


def _seconds(run: Callable[[], object], times: int) -> float:
    started = time.perf_counter()
    for _ in range(times):
        run()
    return time.perf_counter() - started


@click.command()
@click.option("--layers", default=30, show_default=True, help="Of nine tensors each.")
def main(layers: int) -> None:
    """Print the cost of the check at every replay."""
    found = measure_address_check(layers)
    click.echo(
        f"{found.device}: {found.num_weights} weights and {found.num_watched} watched tensors: the check takes "
        f"{found.check_us:.1f} us; a replay with the wait for it {found.replay_us:.1f} us with it, "
        f"{found.unchecked_us:.1f} us without"
    )


if __name__ == "__main__":
    main()
