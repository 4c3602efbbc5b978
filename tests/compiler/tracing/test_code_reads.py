"""Bytecode gives the names that a function reads."""

from __future__ import annotations

import types

from piecegraph.compiler.tracing.code_reads import first_absent, global_chains, imported_modules


def reader() -> object:
    import json.decoder

    return json.decoder, types.SimpleNamespace, settings.scale  # type: ignore[name-defined]  # noqa: F821


def test_globals_are_read_with_their_attributes() -> None:
    assert global_chains(reader.__code__) == (("types", "SimpleNamespace"), ("settings", "scale"))
    assert imported_modules(reader.__code__) == ("json.decoder",)


def test_the_first_absent_name_is_found() -> None:
    home = {"settings": types.SimpleNamespace(by=2)}
    assert first_absent(home, ("settings", "by")) is None
    assert first_absent(home, ("settings", "scale")) == 1
    assert first_absent(home, ("other", "scale")) == 0
