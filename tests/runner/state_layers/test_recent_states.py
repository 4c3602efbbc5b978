"""A request goes on after any of its last tokens."""

from __future__ import annotations

import torch

from piecegraph.runner.attention.interface.cache_spec import CacheTensor
from piecegraph.runner.state_layers.calls import SHORT_CONV_OP
from piecegraph.runner.state_layers.layer import StateLayer
from piecegraph.runner.state_layers.recent_states import allocate_recent_states, place_of, state_after


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
            (state,) = state_after(found["a"], 1, kept, 3)
            assert state.eq(kept).all()
    assert tensor[:3].eq(0).all() and tensor[6:].eq(0).all()
