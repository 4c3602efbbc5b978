"""Fixtures of these tests."""

from tests.compiler.store.small_models import whole_cache

__all__ = ["whole_cache"]
