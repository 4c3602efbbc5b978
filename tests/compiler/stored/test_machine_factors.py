"""What a key says of this machine is plain, and nothing of where things lie."""

from __future__ import annotations

import os

import pytest
import torch

from piecegraph.cache.keys import plain
from piecegraph.compiler.own_sources import OF_PIECES
from piecegraph.compiler.stored.machine_factors import build_factors, machine_factors, settings_factors, version_of


def test_factors_are_plain_and_the_same_each_time() -> None:
    for _ in range(2):
        found = plain([build_factors(OF_PIECES), machine_factors(torch.device("cpu")), settings_factors()])
        assert found == plain([build_factors(OF_PIECES), machine_factors(torch.device("cpu")), settings_factors()])
        assert os.getcwd() not in str(found)


def test_a_version_that_is_not_installed_is_none() -> None:
    assert version_of("torch") == torch.__version__
    assert version_of("no-such-distribution") is None


@pytest.mark.gpu
def test_a_gpu_is_told_in_full() -> None:
    gpu = machine_factors(torch.device("cuda"))["gpu"]
    assert gpu["index"] == torch.cuda.current_device()
    assert set(gpu) == {"index", "name", "capability", "driver", "cuda"}
    assert gpu["driver"] >= 11000
