"""Fixtures of these tests."""

from tests.compiler.stored.small_models import whole_cache

__all__ = ["whole_cache"]
