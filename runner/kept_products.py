"""Products that a start will have the library run: noted by the first start, and kept in the cache for others.

They are asked for before anything is known of the model but its config, so their key is of that and of what was asked
for. It need not tell all that makes a difference: products that are not run cost milliseconds, and so do those that
are missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from piecegraph.cache.keys import EXCLUDED, config_factors
from piecegraph.compiler.own_sources import OF_PLANS
from piecegraph.compiler.stored.compile_cache import CompileCache
from piecegraph.compiler.stored.kept_json import KeptJson
from piecegraph.compiler.stored.machine_factors import build_factors, machine_factors
from piecegraph.errors import KeyFactorError
from piecegraph.passes.library_products import Product
from piecegraph.runner.engine_config import EngineConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PRODUCTS_FORMAT = 1
"""Of the blob; part of every key."""

ROLE = "products"

MOST = 4096
"""Products that are kept."""


def products_factors(
    config: EngineConfig, hf_config: PretrainedConfig, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Raises `KeyFactorError` for passes that no key can be made of."""
    return {
        "kind": "products",
        "format": PRODUCTS_FORMAT,
        "of": hashlib.sha256(hf_config.to_json_string(use_diff=False).encode()).hexdigest(),
        "build": build_factors(OF_PLANS),
        "machine": machine_factors(device),
        "dtype": str(dtype).removeprefix("torch."),
        "config": config_factors(config.compile, {**EXCLUDED, "passes": "only their names count, below"}),
        "passes": None
        if config.compile.passes is None
        else [getattr(each, "name", each) for each in config.compile.passes],
        "sizes": {
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "max_num_seqs": config.max_num_seqs,
            "cudagraph_mode": str(config.cudagraph_mode),
            "cudagraph_capture_sizes": config.cudagraph_capture_sizes and list(config.cudagraph_capture_sizes),
        },
    }


class KeptProducts:
    """Those of one start, over one cache. Nothing here raises for what a disk says."""

    def __init__(self, cache: CompileCache, factors: dict[str, Any]) -> None:
        self._kept = KeptJson(cache, factors, ROLE)
        self.key = self._kept.key
        self._found: tuple[str, tuple[Product, ...]] | None = None  # and the plan they were noted for

    @classmethod
    def open(
        cls, config: EngineConfig, hf_config: PretrainedConfig, dtype: torch.dtype, device: torch.device
    ) -> KeptProducts | None:
        """None where there is no GPU, nothing may be kept, or no key can be made."""
        cache = CompileCache.open(config.compile) if device.type == "cuda" else None
        if cache is None or cache.store is None:
            return None
        try:
            return cls(cache, products_factors(config, hf_config, dtype, device))
        except (KeyFactorError, TypeError, ValueError):  # also a config that transformers cannot write
            return None

    def load(self) -> Sequence[Product]:
        """In the order in which they were noted."""
        self._found = self._kept.load(_products)
        return () if self._found is None else self._found[1]

    def keep(self, noted: Iterable[Product], plan: str) -> None:
        """Those of a start whose plan has this key, unless they are kept. A start that has less from the cache may
        run more, and none of those is forgotten."""
        of, known = (plan, ()) if self._found is None else self._found
        products = tuple(dict.fromkeys((*noted, *(known if of == plan else ()))))[:MOST]
        if products and (of != plan or set(products) != set(known)):
            self._found = plan, products
            value = {"plan": plan, "products": [list(each) for each in products]}
            self._kept.save(value, seconds={}, notes={"of": plan, "products": len(products)})


def _products(said: Any) -> tuple[str, tuple[Product, ...]]:
    found = tuple(Product(*each) for each in said["products"][:MOST])
    for each in found:
        sizes = (each.num_rows, each.size, each.num_columns)
        is_dtype = type(each.dtype) is str and isinstance(getattr(torch, each.dtype, None), torch.dtype)
        if not is_dtype or type(each.has_bias) is not bool or not all(type(n) is int and n > 0 for n in sizes):
            raise ValueError(f"it has {each}")
    return str(said["plan"]), found
