"""A model's layers with states, read from the traced graph: no model family's config is consulted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from piecegraph.compiler.splitting.plan import SplitCall, TensorSpec
from piecegraph.errors import UnsupportedModel
from piecegraph.runner.attention.interface.cache_spec import CacheSpec, CacheTensor
from piecegraph.runner.scheduling.kv_cache_group import CacheKind
from piecegraph.runner.state_layers.calls import STATE_OPS, scan_kind
from piecegraph.runner.state_layers.libraries.choice import Installed, LibraryChoice, ScanKind, choose_library


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayer:
    """One module that keeps a state of fixed size instead of keys and values."""

    name: str  # the module's name in the model, e.g. "model.layers.3.linear_attn"
    op: str  # one of `STATE_OPS`
    states: tuple[CacheTensor, ...]
    rollback: int = 0  # tokens by which the state can be taken back
    scan: ScanKind | None = None  # None: a convolution alone
    prompts: LibraryChoice | None = None  # what computes prompts, once it is chosen (`with_libraries`)

    @property
    def cache_spec(self) -> CacheSpec:
        """Return what the layer keeps: one state a block."""
        return CacheSpec(kind=CacheKind.STATE, tensors=self.states, rollback=self.rollback)


def state_layers(calls: Sequence[SplitCall], *, rollback: int = 0) -> tuple[StateLayer, ...]:
    """Return the layers with states of a graph's split calls, in the order the model runs them.

    `rollback`: the tokens by which states can be taken back, the most drafts of a step.

    Raises `UnsupportedModel` if a layer runs twice a step: its second call would begin with the state of its first.
    """
    layers: dict[str, StateLayer] = {}
    for call in calls:
        if call.op not in STATE_OPS:
            continue
        name = call.args[-1]
        if name in layers:
            raise UnsupportedModel(
                f"{name} runs more than once in a forward pass; its second call would continue from the state of its "
                "first. It would need a state for each call; models that share one module with a state between layers "
                "cannot run here."
            )
        states = STATE_OPS[call.op](*_specs(call))
        scan = scan_kind(call.op, call.args)
        layers[name] = StateLayer(name=name, op=call.op, states=states, rollback=rollback, scan=scan)
    return tuple(layers.values())


def with_libraries(
    layers: Sequence[StateLayer], device_type: str, installed: Callable[[], Installed]
) -> tuple[StateLayer, ...]:
    """Return the layers with the choice of what computes their prompts on a device of that type.

    `installed` is asked for the libraries if the device could run one.
    """
    found = installed() if device_type == "cuda" and any(layer.scan is not None for layer in layers) else {}
    return tuple(
        [
            layer if layer.scan is None else replace(layer, prompts=choose_library(layer.scan, device_type, found))
            for layer in layers
        ]
    )


def library_notes(layers: Sequence[StateLayer]) -> tuple[str, ...]:
    """Return a sentence for each rule of the layers' scans about what computes prompts."""
    notes = [
        f"prompts: {layer.scan.rule.value} runs {layer.prompts.reason}"
        for layer in layers
        if layer.scan is not None and layer.prompts is not None
    ]
    return tuple(dict.fromkeys(notes))


def _specs(call: SplitCall) -> tuple[object, ...]:
    """Return the arguments of a call, whose tensors must have sizes that do not vary, the number of rows aside."""
    for argument in call.args:
        if isinstance(argument, TensorSpec) and not all(isinstance(size, int) for size in argument.shape[1:]):
            raise UnsupportedModel(f"{call.args[-1]}: a size of its state varies with the batch ({argument.shape}).")
    return call.args
