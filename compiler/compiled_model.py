"""A compiled model: called like the module it was made from, for any size of the declared dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from piecegraph.compiler.build import BeforeCompile
from piecegraph.compiler.dynamic_dims import DynamicDims
from piecegraph.compiler.guards import GuardAudit
from piecegraph.compiler.late_weights import LoadWeights
from piecegraph.compiler.piece import UniquePiece
from piecegraph.compiler.plan import Plan, SplitCall
from piecegraph.compiler.ready import Parts, Ready
from piecegraph.compiler.report import CompileReport
from piecegraph.compiler.start import start
from piecegraph.compiler.stored.own_kernels import OWN_KERNELS
from piecegraph.config import CompileConfig
from piecegraph.errors import CompileError, NotCompiled
from piecegraph.progress import OnPhase

if TYPE_CHECKING:
    from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
    from piecegraph.compiler.graphs.capture import MakeInputs
    from piecegraph.compiler.graphs.graphs import Graphs


class CompiledModel:
    """What `piecegraph.compile` returns.

    Calling it runs the compiled pieces, for inference (no gradients), with any sizes of the declared
    dims; nothing is ever traced or compiled again. An argument that does not fit what was traced
    raises `InputMismatch`. Without example inputs, the first call traces and compiles.

    The module must be in its final state: parameters are bound as they are. Changing one's values in
    place is seen; replacing one raises `InputMismatch` at the next check (first call, and every
    1024th).
    """

    def __init__(
        self,
        module: torch.nn.Module,
        config: CompileConfig,
        dynamic_dims: DynamicDims,
        on_phase: OnPhase | None = None,
        before_compile: BeforeCompile | None = None,
        load_weights: LoadWeights | None = None,
    ) -> None:
        self._module: torch.nn.Module | None = module  # None once closed
        self._config = config
        self._dynamic_dims = dict(dynamic_dims)
        self._on_phase: OnPhase = on_phase or (lambda phase: None)
        self._before_compile = before_compile
        self._load_weights = load_weights
        self._ready: Ready | None = None
        self._closed = False

    def compile_for(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Trace with these example arguments and compile, or load what that came to in an earlier process. Their
        tensors' values are not read."""
        self._refuse_closed()
        if self._ready is not None:
            raise CompileError("this CompiledModel is compiled already; make another with piecegraph.compile.")
        assert self._module is not None, "only a closed model has none"
        self._ready = start(
            self._module,
            args,
            kwargs,
            self._dynamic_dims,
            self._config,
            on_phase=self._on_phase,
            before_compile=self._before_compile,
            load_weights=self._load_weights,
        )
        self._load_weights = None  # it may hold what it loaded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_closed()
        if self._ready is None:
            self.compile_for(args, kwargs)
            assert self._ready is not None
        return self._ready.run(args, kwargs)

    def report(self) -> CompileReport:
        """Pieces, unique pieces, seconds per phase. Raises `NotCompiled` before the first trace."""
        return OWN_KERNELS.told_in(self._compiled().built.report)

    @property
    def source(self) -> str:
        """The stitched module's source."""
        return self._compiled().built.source

    @property
    def plan(self) -> Plan:
        """The stitched module as data."""
        return self._compiled().built.plan

    @property
    def unique_pieces(self) -> tuple[UniquePiece, ...]:
        """The graph of each unique piece, as passes left it. To read; the compiled pieces are made of them."""
        return self._compiled().built.read_unique()

    @property
    def split_calls(self) -> tuple[SplitCall, ...]:
        """Every call of a split op, in order."""
        return self._compiled().built.split_calls

    @property
    def guards(self) -> GuardAudit:
        """What Dynamo guarded on, and why each guard needs no check per call. Printable."""
        return self._compiled().interface.read_guards()

    def capture(self, descriptors: Sequence[BatchDescriptor], make_inputs: MakeInputs, **options: Any) -> Graphs:
        """Short for `piecegraph.capture(self, descriptors, make_inputs, ...)`."""
        from piecegraph.compiler.graphs.capture import capture

        return capture(self, descriptors, make_inputs, **options)

    def parts(self, args: Sequence[Any]) -> Parts:
        """The stitched module taken apart over these arguments, for whoever replays it step by step.

        Traces and compiles first if that has not happened. Raises `InputMismatch` as a call would.
        """
        self._refuse_closed()
        if self._ready is None:
            self.compile_for(args, {})
        return self._compiled().parts(args)

    def bound_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Every parameter, buffer and constant the pieces read, by name."""
        return self._compiled().bound_tensors()

    def close(self) -> None:
        """Let go of the module, its weights and the compiled pieces; further calls raise `CompileError`.
        Harmless when repeated."""
        self._closed = True
        self._ready = None
        self._module = None
        self._load_weights = None

    def __enter__(self) -> CompiledModel:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _compiled(self) -> Ready:
        self._refuse_closed()
        if self._ready is None:
            raise NotCompiled(
                "nothing is compiled yet: piecegraph.compile was given no example_inputs, so tracing waits for the "
                "first call. "
                "Call the model once, or pass example_inputs."
            )
        return self._ready

    def _refuse_closed(self) -> None:
        if self._closed:
            raise CompileError("this CompiledModel is closed.")
