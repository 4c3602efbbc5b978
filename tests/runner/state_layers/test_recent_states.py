"""A request goes on after any of its last tokens."""

from __future__ import annotations

import pytest
import torch

from piecegraph.errors import OutOfMemory
from piecegraph.runner.attention.interface.cache_spec import CacheTensor
from piecegraph.runner.state_layers.calls import SHORT_CONV_OP
from piecegraph.runner.state_layers.layer import StateLayer
from piecegraph.runner.state_layers.recent_states import allocate_recent_states, place_of


def test_each_of_the_last_tokens_has_a_place_of_its_own() -> None:
    """Layers without a rollback keep none."""
    states = (CacheTensor(name="conv", shape=(2, 3), dtype=torch.float32),)
    layers = [StateLayer(name=name, op=SHORT_CONV_OP, states=states, rollback=n) for name, n in (("a", 2), ("b", 0))]
    found = allocate_recent_states(layers, 4, torch.device("cpu"))
    assert list(found) == ["a"] and layers[0].cache_spec.rollback == 2
    (tensor,) = found["a"]
    assert tensor.shape == (4 * 3, 2, 3)
    for position in range(5, 12):
        tensor[place_of(1, position, 3)] = position
        for kept in range(max(5, position - 2), position + 1):
            assert tensor[place_of(1, kept, 3)].eq(kept).all()
    assert tensor[:3].eq(0).all() and tensor[6:].eq(0).all()


def test_more_states_than_memory_has_are_refused_with_their_size() -> None:
    states = (CacheTensor(name="recurrent", shape=(1 << 20, 1 << 20), dtype=torch.float32),)
    layer = StateLayer(name="a", op=SHORT_CONV_OP, states=states, rollback=3)
    with pytest.raises(OutOfMemory, match=r"the last 4 states of 256 requests in 1 layers, .* take 4194304\.00 GiB"):
        allocate_recent_states([layer], 256, torch.device("cpu"))
