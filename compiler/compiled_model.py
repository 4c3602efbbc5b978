"""A compiled model: called like the module it was made from, for any size of the declared dims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from piecegraph.compiler.building.background import BackgroundCompile
from piecegraph.compiler.building.build import BeforeCompile
from piecegraph.compiler.building.capturable import CapturableModel
from piecegraph.compiler.building.deferred_weights import LoadWeights
from piecegraph.compiler.building.ready import Parts, ReadyModel
from piecegraph.compiler.common.report import CompileReport
from piecegraph.compiler.load_or_compile import load_or_compile
from piecegraph.compiler.own_kernels.registry import OWN_KERNELS
from piecegraph.compiler.splitting.piece import UniquePiece
from piecegraph.compiler.splitting.plan import Plan, SplitCall
from piecegraph.compiler.tracing.dynamic_dims import DynamicDims
from piecegraph.compiler.tracing.guards import GuardAudit
from piecegraph.config import CompileConfig
from piecegraph.errors import CompileError, NotCompiled
from piecegraph.progress import OnPhase

if TYPE_CHECKING:
    from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
    from piecegraph.compiler.graphs.capture import MakeInputs
    from piecegraph.compiler.graphs.graphs import Graphs


class CompiledModel(CapturableModel):
    """A compiled module: the result of `piecegraph.compile`, called like the module.

    A call runs the compiled pieces for inference (no gradients), with any sizes of the declared dims; nothing is
    traced or compiled again. An argument that does not match the traced call raises `InputMismatch`. Without example
    inputs, the first call traces and compiles.

    The module must be in its final state, because its parameters and buffers are bound as they are. In-place changes
    of their values take effect. So does assigning other memory (`parameter.data = ...`), unless a graph was captured or
    the parameter was merged with others. Any other change, such as replacing a parameter, raises `InputMismatch` at the
    next call; `refresh_weights` adopts the new values.

    Everything else that the forward method reads is a constant of the compile: plain attributes (numbers, strings,
    tensors that are neither parameters nor buffers), hooks, and the methods themselves. A later change of one of them
    has no effect; compile the module again.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        config: CompileConfig,
        dynamic_dims: DynamicDims,
        on_phase: OnPhase | None = None,
        before_compile: BeforeCompile | None = None,
        load_weights: LoadWeights | None = None,
        background: BackgroundCompile | None = None,
        *,
        waits_for_others: bool = False,
    ) -> None:
        self._module: torch.nn.Module | None = module  # None once closed
        self._config = config
        self._dynamic_dims = dict(dynamic_dims)
        self._on_phase: OnPhase = on_phase or (lambda phase: None)
        self._before_compile = before_compile
        self._load_weights = load_weights
        self._background = background
        self._waits_for_others = waits_for_others
        self._ready: ReadyModel | None = None
        self._closed = False

    def compile_for(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Trace with these example arguments and compile, or load the result of an earlier process from the cache.

        The values of tensor arguments are not read.
        """
        self._refuse_closed()
        if self._ready is not None:
            raise CompileError("this CompiledModel is compiled already; make another with piecegraph.compile.")
        assert self._module is not None, "only a closed model has none"
        self._ready = load_or_compile(
            self._module,
            args,
            kwargs,
            self._dynamic_dims,
            self._config,
            on_phase=self._on_phase,
            before_compile=self._before_compile,
            load_weights=self._load_weights,
            background=self._background,
            waits_for_others=self._waits_for_others,
        )
        self._load_weights = None  # the function may hold the loaded weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled pieces; the first call compiles where there were no example inputs."""
        self._refuse_closed()
        if self._ready is None:
            self.compile_for(args, kwargs)
            assert self._ready is not None
        return self._ready.run(args, kwargs)

    def report(self) -> CompileReport:
        """Return pieces, unique pieces and seconds per phase. Raises `NotCompiled` before the first trace."""
        built = self._compiled().built
        return OWN_KERNELS.with_kernel_counts(built.forwards.with_failures(built.report))

    @property
    def source(self) -> str:
        """The Python source of the stitched module."""
        return self._compiled().built.source

    @property
    def plan(self) -> Plan:
        """The plan of the stitched module, as data."""
        return self._compiled().built.plan

    @property
    def bound(self) -> dict[str, Any]:
        """The values of the plan's bound slots by name, such as parameters. Read only."""
        built = self._compiled().built
        return {slot.name: built.namespace[slot.name] for slot in built.plan.bound}

    @property
    def unique_pieces(self) -> tuple[UniquePiece, ...]:
        """The graph of each unique piece after all passes. Read only: the compiled pieces are made of these graphs."""
        return self._compiled().built.read_unique()

    @property
    def split_calls(self) -> tuple[SplitCall, ...]:
        """All calls of split ops, in execution order."""
        return self._compiled().built.split_calls

    @property
    def guards(self) -> GuardAudit:
        """The guards of Dynamo, and why each guard needs no check per call. Printable."""
        return self._compiled().interface.read_guards()

    def capture(self, descriptors: Sequence[BatchDescriptor], make_inputs: MakeInputs, **options: Any) -> Graphs:
        """Call `piecegraph.capture(self, descriptors, make_inputs, **options)`."""
        from piecegraph.compiler.graphs.capture import capture

        return capture(self, descriptors, make_inputs, **options)

    def parts(self, args: Sequence[Any]) -> Parts:
        """Return the plan, the pieces and the bound values for these arguments, for a caller that runs step by step.

        Traces and compiles first if that has not happened. Raises `InputMismatch` as a call would.
        """
        self._refuse_closed()
        if self._ready is None:
            self.compile_for(args, {})
        return self._compiled().parts(args)

    def bound_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return every parameter, buffer and constant that the pieces read, by name."""
        return self._compiled().bound_tensors()

    def refresh_weights(self) -> int:
        """Adopt the values of the module's parameters and buffers that were replaced or given other memory.

        Returns the number of adopted tensors. Where graphs were captured, and where several parameters are stored as
        one (merge-projections), values are copied into the memory that the pieces read, and the module's tensors become
        views of that memory: addresses stay, so graphs remain valid. Otherwise the pieces read the new tensors from now
        on, and nothing is copied. In-place changes need no refresh.

        Raises `InputMismatch`, with nothing changed, where a tensor is missing or its shape, dtype or device is not
        that of the compiled model, where two names of one tensor now have different values, or where a submodule was
        replaced; `NotCompiled` before the first trace.
        """
        return self._compiled().weights.refresh()

    def move_weights(self, move: Callable[[Sequence[torch.Tensor]], None]) -> None:
        """Call `move` with all tensor objects through which pieces and their checks reach the weights, before capture.

        `move` may make each a view of other memory (`tensor.data = ...`) with the same values, shape, strides and
        alignment; tensors of one storage must stay views of one storage. Unlike assignments that the next call finds,
        it may move parameters that were merged. Raises `NotCompiled` before the first trace.
        """
        ready = self._compiled()
        ready.weights.move(move, [tensor for _, tensor in ready.bound_tensors()])

    def close(self) -> None:
        """Release the module, its weights and the compiled pieces; further calls raise `CompileError`. Idempotent."""
        self._closed = True
        if self._background is not None:
            self._background.close()
        self._ready = None
        self._module = None
        self._load_weights = None

    def __enter__(self) -> CompiledModel:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _compiled(self) -> ReadyModel:
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
