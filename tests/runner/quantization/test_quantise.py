"""Which weights of a model are quantised, and that shared ones stay shared."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from piecegraph.errors import CheckpointError, UnsupportedModel
from piecegraph.runner.quantization.modules import QuantisedEmbedding, QuantisedLinear
from piecegraph.runner.quantization.online import online_schemes
from piecegraph.runner.quantization.quantise import bytes_by_dtype, quantise_model

SCHEMES = online_schemes("int8")


class OtherLinear(nn.Linear):
    """A linear that may read its weight in a way of its own."""


class Model(nn.Module):
    def __init__(self, is_tied: bool = True, head: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(12, 32), nn.Linear(32, 32), head(32, 12, bias=False)
        self.norm = nn.LayerNorm(32)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.inner(self.embedding(tokens))))
        return logits


def test_linears_and_embeddings_are_quantised_and_shared_weights_stay_shared() -> None:
    model = Model().requires_grad_(False)
    tokens = torch.arange(12)
    before = model(tokens)
    summary = quantise_model(model, "int8", SCHEMES)
    assert isinstance(model.head, QuantisedLinear) and isinstance(model.embedding, QuantisedEmbedding)
    assert model.head.weight_packed is model.embedding.weight_packed
    assert model.head.weight_scale is model.embedding.weight_scale
    assert not hasattr(model.head, "weight")  # who would read it must not take integers for weights
    assert (summary.counts, summary.left) == ({"linears are int8": 2, "embeddings are int8": 1}, ())
    assert summary.bytes_by_dtype == bytes_by_dtype(model) == {"int8": 12 * 32 + 32 * 32, "float32": 4 * (44 + 96)}
    assert (model(tokens) - before).abs().amax() < 0.05 * before.abs().amax()


def test_what_is_not_quantised_is_said() -> None:
    """A shared weight stays as it is if one of its modules is of a class that cannot be quantised."""
    model = Model(head=OtherLinear)
    summary = quantise_model(model, "int8", SCHEMES)
    assert type(model.head) is OtherLinear and type(model.embedding) is nn.Embedding
    assert summary.left == ("1 x OtherLinear.weight (neither a plain linear nor a plain embedding)",)
    assert "1 linears are int8" in str(summary) and "not quantised: 1 x OtherLinear.weight" in str(summary)


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_a_transposed_weight_is_stored_in_rows(scheme: str) -> None:
    """Kernels read rows; values that kept the strides of their weight were read as another matrix."""
    found = []
    for is_transposed in (False, True):
        model = Model(is_tied=False)
        torch.manual_seed(0)
        weight = torch.randn(32, 32)
        model.inner.weight = nn.Parameter(weight.t().contiguous().t() if is_transposed else weight)
        quantise_model(model, scheme, online_schemes(scheme))
        inner = model.inner
        assert isinstance(inner, QuantisedLinear) and inner.weight_packed.is_contiguous()
        found.append(inner.weight_packed)
    assert torch.equal(found[0].view(torch.uint8), found[1].view(torch.uint8))


def test_a_model_without_such_weights_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="Sequential has no weights that quantization='int8' can quantise"):
        quantise_model(nn.Sequential(nn.LayerNorm(4)), "int8", SCHEMES)


def test_a_weight_that_is_not_finite_is_named() -> None:
    model = Model()
    with torch.no_grad():
        model.inner.weight[3, 4] = float("nan")
    with pytest.raises(CheckpointError, match=r"inner\.weight cannot be quantised to int8: it has values that are inf"):
        quantise_model(model, "int8", SCHEMES)
