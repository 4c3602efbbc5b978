"""Products are noted while somebody asks, each once, as they are run."""

from __future__ import annotations

import torch

from piecegraph.passes.library_products import Product, note_product, noting_products

WEIGHT = torch.zeros(32, 16)
PRODUCT = Product(num_rows=6, size=16, num_columns=32, dtype="float32", has_bias=False)


def test_each_is_noted_once_in_the_order_they_run() -> None:
    rows = torch.zeros(2, 3, 16)
    with noting_products() as noted:
        for bias in (None, torch.zeros(32), None):
            note_product(rows, WEIGHT, bias)
    assert list(noted) == [PRODUCT, PRODUCT._replace(has_bias=True)]


def test_nothing_is_noted_where_nobody_asks() -> None:
    with noting_products() as noted:
        pass
    note_product(torch.zeros(6, 16), WEIGHT, None)
    assert not noted


def test_who_asked_last_is_told() -> None:
    with noting_products() as outer:
        with noting_products() as inner:
            note_product(torch.zeros(6, 16), WEIGHT, None)
        assert not outer and list(inner) == [PRODUCT]
        note_product(torch.zeros(6, 16), WEIGHT, None)
    assert list(outer) == [PRODUCT]
