"""Experts of a mixture whose weights are quantised; a module of transformers gets a class of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from piecegraph.errors import CheckpointError, UnsupportedModel
from piecegraph.passes.kernels.moe.stored_experts import CLAMPED_SWIGLU, Gate
from piecegraph.passes.ops.act_mul import ACTIVATIONS
from piecegraph.passes.ops.quantised.experts import QUANTISED_EXPERTS, gated
from piecegraph.runner.quantization.expert_names import DOWN, GATE_UP, PROJECTIONS, ExpertNames
from piecegraph.runner.quantization.methods.all_methods import METHODS
from piecegraph.runner.quantization.methods.linear_method import (
    Block,
    DoesNotFit,
    NotFinite,
    PackedWeight,
    Scheme,
)
from piecegraph.runner.quantization.methods.shard import Shard

KERNELS: Mapping[str, str] = {
    "cpu": "the linears of the chosen experts, one expert at a time",
    "cuda": "our Triton kernel over pairs sorted by expert",
}
"""The kernels of quantised experts by the type of the device, as `explain` shows them."""


class QuantisedExperts(nn.Module):
    """Experts without float weights; an instance is a module of transformers, with its attributes.

    Of each projection it has values `[num_experts, ...]` and scales `[num_experts, ...]`, each expert's as its
    `LinearMethod` stores those of a linear `[rows, size]`.
    """

    scheme: str
    gate: tuple[str, bool, float, float]  # a `Gate`
    has_bias: bool
    gate_up_proj_packed: nn.Parameter
    gate_up_proj_scale: nn.Parameter
    gate_up_proj_bias: nn.Parameter
    gate_up_proj_block: Block
    down_proj_packed: nn.Parameter
    down_proj_scale: nn.Parameter
    down_proj_bias: nn.Parameter
    down_proj_block: Block

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum of the chosen experts' results by their weights, `[num_tokens, hidden]`."""
        activation, is_interleaved, alpha, limit = self.gate
        out: torch.Tensor = QUANTISED_EXPERTS(
            hidden_states,
            top_k_weights,
            top_k_index,
            self.gate_up_proj_packed,
            self.gate_up_proj_scale,
            self.gate_up_proj_bias if self.has_bias else None,
            self.gate_up_proj_block,
            self.down_proj_packed,
            self.down_proj_scale,
            self.down_proj_bias if self.has_bias else None,
            self.down_proj_block,
            METHODS[self.scheme].inputs,
            activation,
            is_interleaved,
            alpha,
            limit,
        )
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedLayers:
    """The result of `quantise_experts`."""

    schemes: dict[str, Scheme] = field(default_factory=dict)  # by the path of the experts
    shapes: dict[tuple[str, ...], tuple[int, int]] = field(default_factory=dict)  # of an expert, by (parameter,)
    left: dict[str, str] = field(default_factory=dict)  # by the path of experts that stay as they are, the reason


def quantise_experts(
    model: nn.Module, scheme_of: Callable[[str, str], Scheme | None], *, is_read: bool, must_fit: bool
) -> QuantisedLayers:
    """Quantise the experts of a model in place, an expert after another. Arguments are those of `quantise_model`.

    The scheme of experts is that of their linears, by the names that these have in files. Raises `CheckpointError` as
    `quantise_model` does, and `UnsupportedModel` for experts of a layer that have several schemes, and for those of
    which a checkpoint has quantised weights that cannot be multiplied by.
    """
    found = QuantisedLayers()
    gates = {path: gate_of(module) for path, module in model.named_modules() if _has_experts(module)}
    names = ExpertNames(model, gates) if gates else None
    for path, gate in gates.items():
        assert names is not None
        module: Any = model.get_submodule(path)
        if gate is None:
            found.left[path] = _NOT_KNOWN
            down = names.linears(path, DOWN)[0].replace("*", "0")
            if must_fit and scheme_of(down, "Linear") is not None:
                raise UnsupportedModel(
                    f"the checkpoint's experts are quantised, and those of {path} ({type(module).__name__}) cannot be "
                    f"multiplied by here: {_NOT_KNOWN}. Use an unquantised checkpoint of the model."
                )
            continue
        scheme = _scheme(path, names, scheme_of, module.down_proj.shape[0])
        if scheme is None:
            found.left[path] = "not quantised in the checkpoint"
            continue
        try:
            with torch.no_grad():
                packed = {short: _packed(module, short, scheme, is_read=is_read) for short in PROJECTIONS}
        except (NotFinite, DoesNotFit) as error:
            if isinstance(error, DoesNotFit) and not must_fit:
                found.left[path] = str(error)
                continue
            raise CheckpointError(
                f"the experts {path} cannot be quantised to {scheme}: {error}. Check the checkpoint, or leave "
                "quantization out."
            ) from error
        for short, weight in packed.items():
            _, rows, size = _shape(module._parameters[short], is_transposed=module.is_transposed)
            found.shapes[(f"{path}.{short}",)] = rows, size
            del module._parameters[short]
            _set(module, short, weight)
        module.__class__ = QuantisedExperts
        module.scheme, module.gate = scheme.method, tuple(gate)
        module._is_hf_initialized = True  # transformers would initialise weights
        found.schemes[path] = scheme
    return found


_NOT_KNOWN = "their gate, or the shape of their weights, is of a kind that is not known"
"""Why experts stay floats, or cannot be read."""


def _has_experts(module: nn.Module) -> bool:
    """Return whether a module has the weights of experts in floats, with a gate that is known or not."""
    down = module._parameters.get(DOWN)
    return down is not None and down.ndim == 3


def _scheme(
    path: str, names: ExpertNames, scheme_of: Callable[[str, str], Scheme | None], num_experts: int
) -> Scheme | None:
    linears = [name for short in PROJECTIONS for name in names.linears(path, short)]
    schemes = {scheme_of(name.replace("*", str(expert)), "Linear") for name in linears for expert in range(num_experts)}
    if len(schemes) > 1:
        found = ", ".join(sorted(map(str, schemes)))
        raise UnsupportedModel(
            f"the experts {path} are quantised in several ways ({found}), and the experts of a layer are multiplied "
            "together here; use a checkpoint that quantises them alike."
        )
    return schemes.pop()


def _packed(module: Any, short: str, scheme: Scheme, *, is_read: bool) -> PackedWeight:
    """Return the weights of a projection quantised, or tensors of their shapes. Raises `NotFinite` and `DoesNotFit`."""
    method = METHODS[scheme.method]
    weights = module._parameters[short].detach()
    if module.is_transposed:
        weights = weights.transpose(1, 2)
    blank = method.empty(torch.empty(weights.shape[1:], dtype=weights.dtype, device=weights.device), scheme)
    if short == GATE_UP and blank.block[0] > 1 and (weights.shape[1] // 2) % blank.block[0]:
        raise DoesNotFit(f"blocks of {blank.block[0]} rows do not divide the {weights.shape[1] // 2} of gate and of up")
    found = stack_of(blank, weights.shape[0])
    if not (is_read or weights.is_meta):
        for expert, weight in enumerate(weights):
            put(found, expert, method.pack(weight.contiguous(), scheme))
    return found


def stack_of(one: PackedWeight, num_experts: int) -> PackedWeight:
    """Return zeros for as many experts whose weights are stored like `one`."""
    values, scale = (each.new_zeros((num_experts, *each.shape)) for each in (one.values, one.scale))
    return PackedWeight(values=values, scale=scale, block=one.block)


def put(stack: PackedWeight, place: int, one: PackedWeight) -> None:
    """Write the weights of one expert. Raises `DoesNotFit` if they are of another shape than the others'."""
    for whole, part in ((stack.values, one.values), (stack.scale, one.scale)):
        if whole.shape[1:] != part.shape or (whole.dtype != part.dtype and not whole.is_floating_point()):
            raise DoesNotFit(f"{part.dtype} {tuple(part.shape)}, and {whole.dtype} {tuple(whole.shape[1:])} is needed")
        whole[place].copy_(part)


def _set(module: Any, short: str, packed: PackedWeight) -> None:
    for name, tensor in (("packed", packed.values), ("scale", packed.scale)):
        module.register_parameter(f"{short}_{name}", nn.Parameter(tensor, requires_grad=False))
    setattr(module, f"{short}_block", packed.block)


def weights_of(module: Any, short: str) -> PackedWeight:
    """Return the weights of one projection of all experts of a `QuantisedExperts`."""
    values, scale = (getattr(module, f"{short}_{name}").detach() for name in ("packed", "scale"))
    return PackedWeight(values=values, scale=scale, block=getattr(module, f"{short}_block"))


def cut_experts(module: Any, short: str, shard: Shard) -> None:
    """Give a `QuantisedExperts` the rank's part of a projection, in place: some experts whole, or a part of each.

    `shard` is of the float parameter. Raises `DoesNotFit`.
    """
    whole = weights_of(module, short)
    if shard.dim == -3:
        values, scale = (
            Shard(dim=-each.ndim, full_size=shard.full_size, parts=shard.parts).of(each)
            for each in (whole.values, whole.scale)
        )
        _set(module, short, PackedWeight(values=values, scale=scale, block=whole.block))
        return
    method = METHODS[module.scheme]
    part = of_linear(module, short, shard)
    num_experts = whole.values.shape[0]
    found = stack_of(method.cut(of_expert(whole, 0), part), num_experts)
    if not whole.values.is_meta:
        for place in range(num_experts):
            put(found, place, method.cut(of_expert(whole, place), part))
    _set(module, short, found)


def of_expert(stack: PackedWeight, place: int) -> PackedWeight:
    """Return the weights of one expert, views of those of all."""
    return PackedWeight(values=stack.values[place], scale=stack.scale[place], block=stack.block)


def of_linear(module: Any, short: str, shard: Shard) -> Shard:
    """Return a rank's part of an expert's weight `[rows, size]`, for its part of the float parameter.

    Raises `DoesNotFit` where rows of gate and up alternate, and where inputs are rounded with a scale for each token.
    """
    dim = {-1: -2, -2: -1}[shard.dim] if module.is_transposed else shard.dim
    if dim == -1 and METHODS[module.scheme].inputs == "tokens":
        raise DoesNotFit("the inputs of experts are rounded with a scale for each token, of which a rank has a part")
    if short == GATE_UP and dim == -2 and module.gate[1]:
        raise DoesNotFit("rows of gate and up alternate")
    return Shard(dim=dim, full_size=shard.full_size, parts=shard.parts)


def gate_of(module: Any) -> Gate | None:
    """Return the gate of experts that can be quantised; None for any other module.

    Such a module is one whose forward transformers replaces by `grouped_mm` (it has two parameters and perhaps two
    biases, whose first dim counts experts), and whose gate is known here by the numbers that it computes.
    """
    flags = [getattr(module, name, None) for name in ("has_gate", "has_bias", "is_transposed")]
    if isinstance(module, QuantisedExperts) or not all(isinstance(flag, bool) for flag in flags) or not flags[0]:
        return None
    parameters = {name: each for name, each in module._parameters.items() if each is not None}
    biases = {f"{short}_bias" for short in PROJECTIONS} if flags[1] else set()
    if parameters.keys() != {*PROJECTIONS, *biases} or any(parameters[short].ndim != 3 for short in PROJECTIONS):
        return None
    num_experts, rows, hidden = _shape(parameters[GATE_UP], is_transposed=bool(flags[2]))
    if (num_experts, hidden, rows / 2) != _shape(parameters[DOWN], is_transposed=bool(flags[2])):
        return None
    return _known_gate(module, rows)


def _shape(parameter: torch.Tensor, *, is_transposed: bool) -> tuple[int, int, int]:
    num_experts, rows, size = parameter.shape
    return (num_experts, size, rows) if is_transposed else (num_experts, rows, size)


def _known_gate(module: Any, rows: int) -> Gate | None:
    """Return the gate that computes what the module's does."""
    gates = [Gate(name, is_interleaved, 0.0, 0.0) for name in ACTIVATIONS for is_interleaved in (False, True)]
    alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
    if isinstance(alpha, float) and isinstance(limit, float):
        gates = [Gate(CLAMPED_SWIGLU, is_interleaved, alpha, limit) for is_interleaved in (False, True)] + gates
    numbers = torch.arange(3 * rows, dtype=torch.float32, device="cpu").mul_(0.7391).sin_().mul_(12).view(3, rows)
    numbers = torch.cat((numbers, 1e4 * numbers))  # beyond the limit of any gate that clamps
    try:
        wanted = module._apply_gate(numbers)
    except Exception:  # whatever a gate that is not known raises; its experts stay floats
        return None
    for gate in gates:
        found = gated(gate, numbers)
        if found.shape == wanted.shape and torch.allclose(found, wanted):
            return gate
    return None
