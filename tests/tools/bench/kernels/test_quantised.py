"""Tests of the weights that the bench of quantised linears packs; its times can only be tested on a GPU."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from piecegraph.runner.quantization.methods.all_methods import METHODS
from piecegraph.tools.bench.kernels import quantised
from piecegraph.tools.bench.kernels.linear import Linear
from piecegraph.tools.bench.kernels.quantised import SCHEMES, main, packed_weights, stored_bytes

LINEAR = Linear(name="down", num_columns=128, size=256)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_packs_and_multiplies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its weights are when they are unpacked, and within the bound that the bench has for rounded inputs."""
    monkeypatch.setattr(quantised, "POOL_BYTES", 1)
    packed, copy = packed_weights(LINEAR, SCHEMES[name], torch.device("cpu"))
    assert torch.equal(packed.values.view(torch.uint8), copy.values.view(torch.uint8))
    assert packed.values.data_ptr() != copy.values.data_ptr()
    assert stored_bytes(packed) < LINEAR.weight_bytes * 0.7
    method, x = METHODS[SCHEMES[name].method], torch.randn(3, LINEAR.size)
    wanted = x @ method.unpack(packed).float().T
    error = (method.apply(x.bfloat16(), packed, None).float() - wanted).norm() / wanted.norm()
    assert error < quantised.BOUND.get(SCHEMES[name].method, 1e-2)


def test_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told = CliRunner().invoke(main, [])
    assert told.exit_code == 1 and "sees no NVIDIA GPU" in told.output
