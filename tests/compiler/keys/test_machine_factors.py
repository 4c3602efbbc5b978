"""The facts about this machine in a key are plain data and contain no path."""

from __future__ import annotations

import os

import numpy
import pytest
import torch

from piecegraph.cache.store.keys import plain
from piecegraph.compiler.keys.machine_factors import build_factors, machine_factors, settings_factors, version_of
from piecegraph.compiler.keys.own_sources import PIECE_SOURCES


def test_factors_are_plain_and_the_same_each_time() -> None:
    for _ in range(2):
        found = plain([build_factors(PIECE_SOURCES), machine_factors(torch.device("cpu")), settings_factors()])
        assert found == plain([build_factors(PIECE_SOURCES), machine_factors(torch.device("cpu")), settings_factors()])
        assert os.getcwd() not in str(found)


def test_a_version_that_is_not_installed_is_none() -> None:
    assert version_of("numpy") == numpy.__version__
    assert version_of("no-such-distribution") is None


@pytest.mark.gpu
def test_all_facts_of_a_gpu_are_in_the_key() -> None:
    gpu = machine_factors(torch.device("cuda"))["gpu"]
    assert gpu["index"] == torch.cuda.current_device()
    assert set(gpu) == {"index", "name", "capability", "driver", "cuda"}
    assert gpu["driver"] >= 11000
