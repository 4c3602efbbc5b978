"""Quantisation of a loaded model in place, and the summary of what was quantised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from piecegraph.errors import CheckpointError, UnsupportedModel
from piecegraph.runner.quantization.experts import KERNELS, QuantisedExperts, quantise_experts
from piecegraph.runner.quantization.methods.all_methods import METHODS, fastest
from piecegraph.runner.quantization.methods.linear_method import DoesNotFit, NotFinite, Scheme
from piecegraph.runner.quantization.methods.shard import Shard
from piecegraph.runner.quantization.modules import REPLACED, replace_weight

SchemeOf = Callable[[str, str], Scheme | None]
"""A function from the path and the class name of a module to its scheme; None: it is not quantised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisationSummary:
    """What is quantised in a model, and what is not."""

    scheme: str
    counts: Mapping[str, int]  # of modules, by what they are and the scheme that they have
    kernels: Mapping[str, str]  # by method
    bytes_by_dtype: dict[str, int]  # of all parameters, each once
    left: tuple[str, ...]  # weights of two dims or more that stay as they are, alike ones together, with reasons
    methods: Mapping[str, Scheme]  # by the path of a module
    experts: Mapping[str, Scheme] = field(default_factory=dict)  # by the path of a module of experts
    shapes: Mapping[tuple[str, ...], tuple[int, int]] = field(default_factory=dict)
    """The shapes of weights in floats, whole: of linears and embeddings by the paths of those that share one, of one
    expert by `(name of the parameter,)`."""

    def __str__(self) -> str:
        sizes = ", ".join(f"{size / 1e6:.1f} MB {dtype}" for dtype, size in self.bytes_by_dtype.items())
        what = "; ".join(f"{count} {kind}" for kind, count in self.counts.items())
        kernels = "; ".join(f"{method} by {kernel}" for method, kernel in self.kernels.items())
        left = f"; not quantised: {'; '.join(self.left)}" if self.left else ""
        return f"quantization: {what}; {kernels}; weights: {sizes}{left}"


def quantise_model(
    model: nn.Module,
    scheme: str,
    scheme_of: SchemeOf,
    *,
    device_type: str = "cpu",
    is_read: bool = False,
    must_fit: bool = False,
    shards: Mapping[str, Shard] | None = None,
) -> QuantisationSummary:
    """Quantise the weights of a model in place, one after another, so that no second copy of the model is made.

    Weights that several modules share are quantised once and stay shared; they stay as they are if one of the modules
    is of a class that cannot be quantised, or has no scheme. `scheme` names what was asked for. `device_type`: where
    the model runs, which decides between kernels; the weights may lie elsewhere. `is_read`: whether the weights are
    read from a checkpoint later, so that they get their shapes only; so they do on the meta device.
    `must_fit`: whether a weight that the scheme cannot store is an error, instead of one that stays as it is. `shards`:
    by a weight's name the part that a rank will hold, for which the kernels are chosen; weights stay whole.

    Raises `CheckpointError` for a weight that is not finite or does not fit, and
    `UnsupportedModel` if nothing can be quantised.
    """
    experts = quantise_experts(model, scheme_of, is_read=is_read, must_fit=must_fit)
    counts = Counter(f"layers of experts are {scheme}" for scheme in experts.schemes.values())
    left: Counter[str] = Counter()
    methods: dict[str, Scheme] = {}
    shapes = dict(experts.shapes)
    for places in _owners(model):
        path, first, short = places[0]
        weight = first._parameters[short]
        assert weight is not None, path
        shard = (shards or {}).get(f"{path}.{short}")
        chosen, why_not = _chosen(places, scheme_of, weight, device_type, shard)
        if chosen is None:
            left[f"{type(first).__name__}.{short} ({experts.left[path]})" if path in experts.left else why_not] += 1
            continue
        method = METHODS[chosen.method]
        try:
            with torch.no_grad():
                make = method.empty if is_read or weight.is_meta else method.pack
                packed = make(weight.detach().contiguous(), chosen)
        except (NotFinite, DoesNotFit) as error:
            if isinstance(error, DoesNotFit) and not must_fit:
                left[f"{type(first).__name__}.{short} ({error})"] += 1
                continue
            raise CheckpointError(
                f"{path}.{short} cannot be quantised to {chosen}: {error}. Check the checkpoint, or leave quantization "
                "out."
            ) from error
        for kind in {type(module) for _, module, _ in places}:
            counts[f"{'linears' if kind is nn.Linear else 'embeddings'} are {chosen}"] += 1
        methods.update(dict.fromkeys((place[0] for place in places), chosen))
        shapes[tuple(place[0] for place in places)] = weight.shape[0], weight.shape[1]
        values, scale = (nn.Parameter(each, requires_grad=False) for each in (packed.values, packed.scale))
        for _, module, _ in places:
            replace_weight(module, chosen.method, values, scale, packed.block)
    if not methods and not experts.schemes:
        raise UnsupportedModel(
            f"{type(model).__name__} has no weights that quantization={scheme!r} can quantise "
            f"({'; '.join(left) or 'no matrices'}); leave it out."
        )
    used = sorted({found.method for found in methods.values()})
    kernels = {method: METHODS[method].kernels[device_type] for method in used}
    if experts.schemes:
        kernels["experts"] = KERNELS[device_type]
    return QuantisationSummary(
        scheme=scheme,
        counts=dict(counts),
        kernels=kernels,
        bytes_by_dtype=bytes_by_dtype(model),
        left=tuple(f"{count} x {what}" for what, count in left.items()),
        methods=methods,
        experts=experts.schemes,
        shapes=shapes,
    )


def _owners(model: nn.Module) -> list[list[tuple[str, nn.Module, str]]]:
    """Return the places of each parameter of two dims or more: the path of a module, this, and the name there."""
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for short, parameter in module._parameters.items():
            if parameter is not None and parameter.ndim > 1 and not isinstance(module, QuantisedExperts):
                owners.setdefault(id(parameter), []).append((path, module, short))
    return list(owners.values())


def bytes_by_dtype(model: nn.Module) -> dict[str, int]:
    """Return the bytes of a model's parameters by dtype, the largest first."""
    found: Counter[str] = Counter()
    for parameter in model.parameters():
        found[str(parameter.dtype).removeprefix("torch.")] += parameter.nbytes
    return dict(found.most_common())


def _chosen(
    places: list[tuple[str, nn.Module, str]],
    scheme_of: SchemeOf,
    weight: torch.Tensor,
    device_type: str,
    shard: Shard | None,
) -> tuple[Scheme | None, str]:
    """Return the scheme of a parameter and "", or None and why it has none, the same text for parameters alike."""
    schemes: list[Scheme] = []
    for path, module, short in places:
        name = f"{type(module).__name__}.{short}"
        if type(module) not in REPLACED or short != "weight":
            return None, f"{name} (neither a plain linear nor a plain embedding)"
        scheme = scheme_of(path, type(module).__name__)
        if scheme is None:
            return None, f"{name} (not quantised in the checkpoint)"
        schemes.append(scheme)
    # A linear that shares its weight with an embedding has the scheme of the embedding, which comes first.
    is_linear = all(type(module) is nn.Linear for _, module, _ in places)
    return fastest(schemes[0], weight, is_linear=is_linear, device_type=device_type, shard=shard), ""
