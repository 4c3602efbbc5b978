"""A GPU's context is made by a thread, left to others, and missed by nobody where there is no GPU."""

from __future__ import annotations

import ctypes
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from piecegraph.context_ahead import ContextAhead, making_context


class Driver:
    """Notes its calls. `fails`: a call that says so."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[tuple[str, Any]] = []
        self.fails = fails

    def _note(self, name: str, value: Any) -> int:
        assert threading.current_thread() is not threading.main_thread() or "Release" in name
        self.calls.append((name, value))
        return 100 if name == self.fails else 0

    def cuInit(self, flags: int) -> int:  # noqa: N802  the driver's
        return self._note("cuInit", flags)

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        device._obj.value = 70 + index
        return self._note("cuDeviceGet", index)

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:  # noqa: N802
        return self._note("cuDevicePrimaryCtxRetain", device.value)

    def cuDevicePrimaryCtxRelease_v2(self, device: ctypes.c_int) -> int:  # noqa: N802
        return self._note("cuDevicePrimaryCtxRelease_v2", device.value)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(ContextAhead.__init__, "__defaults__", (lambda: made,))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=bool)))
    return made


@pytest.mark.parametrize(("device", "index"), [(None, 0), ("cuda", 0), ("cuda:3", 3)])
def test_it_is_there_after_the_block_and_left_to_others(driver: Driver, device: str | None, index: int) -> None:
    with making_context(device):
        pass
    made = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2"]
    assert driver.calls == list(zip(made, [0, index, 70 + index, 70 + index], strict=True))


@pytest.mark.parametrize("device", ["cpu", "mps", "cuda:x"])
def test_nothing_is_made_for_another_device(driver: Driver, device: str) -> None:
    with making_context(device):
        pass
    assert driver.calls == []


def test_nothing_is_made_where_torch_has_its_own(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", torch)
    with making_context("cuda"):
        pass
    assert driver.calls == []


@pytest.mark.parametrize("fails", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"])
def test_what_the_driver_refuses_is_not_released(fails: str) -> None:
    driver = Driver(fails)
    ahead = ContextAhead(0, lambda: driver)
    ahead.start()
    ahead.release()
    assert driver.calls[-1][0] == fails and not ahead.is_retained


def test_without_a_driver_there_is_nothing() -> None:
    def load() -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    ahead = ContextAhead(0, load)
    ahead.start()
    ahead.release()
    ahead.release()
    assert not ahead.is_retained
