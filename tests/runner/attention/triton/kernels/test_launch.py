"""A prepared kernel launches what it was prepared with, except for the arguments that change."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from piecegraph.passes.kernels.common.own_kernel import NotKept
from piecegraph.runner.attention.triton.kernels import launch
from piecegraph.runner.attention.triton.kernels.launch import KernelCall, KernelPreparer


class Kernel:
    """Stands for a function under `triton.jit`: `[launches]` receives what Triton's launcher would."""

    __hash__ = None  # type: ignore[assignment]  # Triton's hash their source, and those they call must have before

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


def test_changing_arguments_are_passed_in_the_order_they_were_named() -> None:
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


def test_alike_calls_are_made_once() -> None:
    """The further ones have their own addresses. A call with a tensor that is not named is made for itself."""
    kernel, preparer, made = Kernel("x", "n", "sinks", "BLOCK"), KernelPreparer(), []
    tensors = [torch.empty(4) for _ in range(3)]

    def prepare(kind: str, tensor: torch.Tensor, name: str) -> Any:
        def make() -> KernelCall:
            made.append(tensor)
            return call(kernel, tensor)

        return preparer.prepare_alike(kind, {name: tensor}, make, ["n"])

    for tensor in tensors:
        prepare("a", tensor, "x").launch((1, 1, 1), 0, 6)
        prepare("b", tensor, "y").launch((1, 1, 1), 0, 6)
    assert [launched[9:] for launched in kernel.launches] == [
        (tensor.data_ptr(), 6, None, 16) for tensor in tensors for _ in "ab"
    ]
    assert [id(one) for one in made] == [id(tensors[0]), *(id(one) for one in tensors)]


def test_kernels_that_are_prepared_together_compile_in_parallel() -> None:
    """Each once, though two calls need the same; all of them at a time."""
    kernel, preparer = Kernel("x", "n", "sinks", "BLOCK"), KernelPreparer()
    plain = call(kernel, torch.zeros(4))
    all_at_once = threading.Barrier(3)
    warmup = kernel.warmup

    def met(*args: Any, **options: Any) -> Any:
        all_at_once.wait(timeout=60)
        return warmup(*args, **options)

    kernel.warmup = met  # type: ignore[method-assign]
    blocks = (16, 32, 64, 32)
    calls = [(plain._replace(arguments=plain.arguments | {"BLOCK": block}), ("n",)) for block in blocks]
    for number, prepared in enumerate(preparer.prepare_all(calls)):
        prepared.launch((1, 1, 1), 0, number)
    assert kernel.num_compiled == 3
    assert [launch[-3:] for launch in kernel.launches] == [(n, None, block) for n, block in enumerate(blocks)]


def test_stored_kernels_are_loaded_one_by_one_and_others_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results come in the order that was asked for."""
    kernel, preparer = Kernel("x", "n", "sinks", "BLOCK"), KernelPreparer()
    plain = call(kernel, torch.zeros(4))
    kept, threads, is_loading = {16, 64}, [], [False]
    warmup = kernel.warmup

    @contextlib.contextmanager
    def loading() -> Iterator[None]:
        is_loading[0] = True
        yield
        is_loading[0] = False

    def load_or_compile(*args: Any, **options: Any) -> Any:
        if is_loading[0] and args[-1] not in kept:
            is_loading[0] = False
            raise NotKept("it is not")
        threads.append((args[-1], threading.current_thread() is threading.main_thread()))
        return warmup(*args, **options)

    kernel.warmup = load_or_compile  # type: ignore[method-assign]
    monkeypatch.setattr(launch, "may_be_kept", lambda each: each is kernel)
    monkeypatch.setattr(launch, "loading_only", loading)
    blocks = (16, 32, 64, 128)
    calls = [(plain._replace(arguments=plain.arguments | {"BLOCK": block}), ("n",)) for block in blocks]
    for number, prepared in enumerate(preparer.prepare_all(calls)):
        prepared.launch((1, 1, 1), 0, number)
    assert sorted(threads) == [(16, True), (32, False), (64, True), (128, False)]
    assert [each[-3:] for each in kernel.launches] == [(n, None, block) for n, block in enumerate(blocks)]


def test_a_kernel_that_does_not_compile_is_an_error_among_others_too() -> None:
    kernel, broken = Kernel("x", "n", "sinks", "BLOCK"), Kernel("x", "n", "sinks", "BLOCK")

    def fail(*args: Any, **options: Any) -> Any:
        raise ValueError("out of registers")

    broken.warmup = fail  # type: ignore[method-assign]
    calls = [(call(each, torch.zeros(4)), ("n",)) for each in (kernel, broken)]
    with pytest.raises(ValueError, match="out of registers"):
        KernelPreparer().prepare_all(calls)


def test_equal_arguments_of_different_types_compile_separately() -> None:
    """Triton compiles 1.0 and 1, or True and 1, differently."""
    kernel, preparer = Kernel("x", "n", "sinks", "BLOCK"), KernelPreparer()
    plain = call(kernel, torch.zeros(4))
    for number, value in enumerate((1, 1.0, True)):
        for _ in range(2):
            preparer.prepare(plain._replace(arguments=plain.arguments | {"BLOCK": value}), changing=("n",))
        assert kernel.num_compiled == number + 1


def test_a_tensor_that_changes_may_have_any_alignment() -> None:
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


def test_a_triton_with_an_unknown_launcher_is_launched_the_ordinary_way() -> None:
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
