"""How a traced module is called: what a call must look like, what its arguments become, how its result is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from piecegraph.compiler.call_spec import CallSpec, ResultSpec
from piecegraph.compiler.guards import GuardAudit
from piecegraph.compiler.trace import ArgumentInput, BoundInput, SizeInput, Traced


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """All that a call needs of a trace; the graph is not in it."""

    call_spec: CallSpec
    result_spec: ResultSpec
    arguments: tuple[SizeInput | ArgumentInput, ...]  # of the stitched function, in order
    size_symbols: Mapping[str, str]  # symbol -> size name
    read_guards: Callable[[], GuardAudit]

    @classmethod
    def of(cls, traced: Traced) -> Interface:
        """Of a trace."""
        return cls(
            call_spec=traced.call_spec,
            result_spec=traced.result_spec,
            arguments=tuple(each for each in traced.inputs if not isinstance(each, BoundInput)),
            size_symbols=traced.size_symbols,
            read_guards=lambda: traced.guards,
        )
