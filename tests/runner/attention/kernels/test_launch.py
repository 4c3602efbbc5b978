"""A prepared kernel launches what it was prepared with, except for the arguments that change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from piecegraph.runner.attention.kernels.launch import KernelCall, KernelPreparer


class Kernel:
    """Stands for a function under `triton.jit`: `[launches]` receives what Triton's launcher would."""

    def __init__(self, *names: str) -> None:
        self.params = [SimpleNamespace(name=name) for name in names]
        self.launches: list[tuple[Any, ...]] = []
        self.by_name: list[tuple[Any, dict[str, Any]]] = []
        self.num_compiled = 0
        self.compiled: Any = SimpleNamespace(
            _init_handles=lambda: None,
            run=lambda *args: self.launches.append(args),
            function="function",
            packed_metadata="metadata",
        )

    def warmup(self, *args: Any, grid: Any, **options: Any) -> Any:
        assert options == {"num_warps": 4}
        self.num_compiled += 1
        return self.compiled

    def __getitem__(self, grid: Any) -> Any:
        return lambda **arguments: self.by_name.append((grid, arguments))


def call(kernel: Kernel, tensor: torch.Tensor) -> KernelCall:
    return KernelCall(kernel, (1, 2, 3), {"x": tensor, "n": 5, "sinks": None, "BLOCK": 16}, {"num_warps": 4})


def test_tensors_become_addresses() -> None:
    kernel, tensor = Kernel("x", "n", "sinks", "BLOCK"), torch.zeros(4)
    prepared = KernelPreparer().prepare(call(kernel, tensor), changing=("n",))
    prepared.launch((7, 1, 1), 99, 6)
    assert kernel.launches == [(7, 1, 1, 99, "function", "metadata", None, None, None, tensor.data_ptr(), 6, None, 16)]


def test_changing_arguments_are_given_in_the_order_they_were_named() -> None:
    kernel, tensor = Kernel("x", "n", "sinks", "BLOCK"), torch.zeros(4)
    prepared = KernelPreparer().prepare(call(kernel, tensor), changing=("n", "x"))
    prepared.launch((1, 1, 1), 0, 8, 4096)
    prepared.launch((1, 1, 1), 0, 9, 8192)
    assert [launch[-4:-2] for launch in kernel.launches] == [(4096, 8), (8192, 9)]


def test_calls_of_one_kind_share_a_compiled_kernel() -> None:
    """Other addresses and changing numbers are one kind; other constants, dtypes and alignments are not."""
    kernel, preparer = Kernel("x", "n", "sinks", "BLOCK"), KernelPreparer()
    plain = call(kernel, torch.zeros(4))
    preparer.prepare(plain, changing=("n",))
    preparer.prepare(call(kernel, torch.zeros(64)), changing=("n",))
    preparer.prepare(plain._replace(arguments=plain.arguments | {"n": 6}), changing=("n",))
    assert kernel.num_compiled == 1
    for other in ({"BLOCK": 32}, {"x": torch.zeros(4).half()}, {"x": torch.zeros(5)[1:]}, {"sinks": torch.zeros(4)}):
        before = kernel.num_compiled
        preparer.prepare(plain._replace(arguments=plain.arguments | other), changing=("n",))
        assert kernel.num_compiled == before + 1


def test_what_equals_and_is_of_another_type_is_another_kind() -> None:
    """Triton compiles 1.0 and 1, or True and 1, differently."""
    kernel, preparer = Kernel("x", "n", "sinks", "BLOCK"), KernelPreparer()
    plain = call(kernel, torch.zeros(4))
    for number, value in enumerate((1, 1.0, True)):
        for _ in range(2):
            preparer.prepare(plain._replace(arguments=plain.arguments | {"BLOCK": value}), changing=("n",))
        assert kernel.num_compiled == number + 1


def test_a_tensor_that_changes_may_lie_anywhere() -> None:
    """Its dtype still makes another kernel; so does which arguments change."""
    kernel, preparer = Kernel("x", "n", "sinks", "BLOCK"), KernelPreparer()
    aligned, shifted = torch.zeros(4), torch.zeros(5)[1:]
    for tensor in (aligned, shifted):
        prepared = preparer.prepare(call(kernel, tensor), changing=("x",))
        assert kernel.num_compiled == 1
    prepared.launch((1, 1, 1), 0, aligned.data_ptr())
    assert kernel.launches[-1][-4] == aligned.data_ptr()
    preparer.prepare(call(kernel, aligned.half()), changing=("x",))
    assert kernel.num_compiled == 2
    preparer.prepare(call(kernel, aligned), changing=("n",))
    assert kernel.num_compiled == 3


def test_another_triton_is_launched_the_ordinary_way() -> None:
    """If its compiled kernels cannot be called as we know: slower, and right."""
    kernel, tensor = Kernel("x", "n", "sinks", "BLOCK"), torch.zeros(4)
    kernel.compiled = SimpleNamespace()
    KernelPreparer().prepare(call(kernel, tensor), changing=("x",)).launch((7, 1, 1), 99, 4096)
    ((grid, arguments),) = kernel.by_name
    assert grid == (7, 1, 1)
    assert (arguments["x"].data_ptr(), arguments["x"].dtype) == (4096, torch.float32)
    assert (arguments["n"], arguments["sinks"], arguments["BLOCK"], arguments["num_warps"]) == (5, None, 16, 4)


def test_all_arguments_are_given_in_order() -> None:
    """The launcher in C knows no names."""
    with pytest.raises(AssertionError):
        KernelPreparer().prepare(call(Kernel("n", "x", "sinks", "BLOCK"), torch.zeros(4)), changing=())


def test_an_empty_grid_is_not_launched() -> None:
    kernel = Kernel("x")
    KernelCall(kernel, (4, 0, 1), {"x": torch.zeros(1)}, {}).launch()
    assert not kernel.by_name
