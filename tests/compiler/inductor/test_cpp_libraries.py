"""A C++ kernel is known by what it is built from."""

from __future__ import annotations

from piecegraph.compiler.inductor.cpp_libraries import library_digest


def test_a_library_is_known_by_all_it_is_built_from() -> None:
    """Source, argument types, flags; not the function that a build is submitted to."""
    digest = library_digest("Cache", (["float*"], "source"), {"extra_flags": (), "submit_fn": print})
    same = library_digest("Cache", (["float*"], "source"), {"submit_fn": len, "extra_flags": ()})
    assert digest == same
    for args, kwargs in (
        ((["long"], "source"), {"extra_flags": ()}),
        ((["float*"], "other"), {"extra_flags": ()}),
        ((["float*"], "source"), {"extra_flags": ("-O1",)}),
    ):
        assert library_digest("Cache", args, kwargs) != digest
