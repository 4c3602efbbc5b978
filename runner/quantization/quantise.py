"""Quantisation of a loaded model in place, and the summary of what was quantised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from piecegraph.errors import CheckpointError, UnsupportedModel
from piecegraph.runner.quantization.linear_method import METHODS, NotFinite
from piecegraph.runner.quantization.modules import REPLACED, replace_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisationSummary:
    """What is quantised in a model, and what is not."""

    scheme: str
    kernel: str
    num_linears: int
    num_embeddings: int
    bytes_by_dtype: dict[str, int]  # of all parameters, each once
    left: tuple[str, ...]  # weights of two dims or more that stay as they are, alike ones together, with reasons

    def __str__(self) -> str:
        sizes = ", ".join(f"{size / 1e6:.1f} MB {dtype}" for dtype, size in self.bytes_by_dtype.items())
        embeddings = f" and {self.num_embeddings} embedding" + ("s" if self.num_embeddings > 1 else "")
        what = f"{self.num_linears} linears{embeddings if self.num_embeddings else ''} are {self.scheme}"
        left = f"; not quantised: {'; '.join(self.left)}" if self.left else ""
        return f"quantization: {what}, multiplied by {self.kernel}; weights: {sizes}{left}"


def quantise_model(
    model: nn.Module, scheme: str, is_quantised: Callable[[str, str], bool] | None = None
) -> QuantisationSummary:
    """Quantise the weights of a model in place, one after another, so that no second copy of the model is made.

    Weights that several modules share are quantised once and stay shared; they stay as they are if one of the modules
    is of a class that cannot be quantised. Works on meta tensors too. `is_quantised`: which modules are, by their path
    and the name of their class; None: all that can be.

    Raises `CheckpointError` for a weight that is not finite, and `UnsupportedModel` if nothing can be quantised.
    """
    method = METHODS[scheme]
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for short, parameter in module._parameters.items():
            if parameter is not None and parameter.ndim > 1:
                owners.setdefault(id(parameter), []).append((path, module, short))
    counts: Counter[type[nn.Module]] = Counter()
    left: Counter[str] = Counter()
    for places in owners.values():
        path, first, short = places[0]
        why_not = next((why for why in (_why_not(*place, is_quantised) for place in places) if why), None)
        if why_not is not None:
            left[why_not] += 1
            continue
        counts.update({type(module) for _, module, _ in places})
        try:
            with torch.no_grad():
                packed = method.pack(first._parameters[short].detach())  # type: ignore[union-attr]  # see above
        except NotFinite as error:
            raise CheckpointError(
                f"{path}.{short} cannot be quantised to {scheme}: {error}. Check the checkpoint, or leave quantization "
                "out."
            ) from error
        values, scale = (nn.Parameter(each, requires_grad=False) for each in (packed.values, packed.scale))
        for _, module, _ in places:
            replace_weight(module, scheme, values, scale)
    if not counts:
        raise UnsupportedModel(
            f"{type(model).__name__} has no weights that quantization={scheme!r} can quantise "
            f"({'; '.join(left) or 'no matrices'}); leave it out."
        )
    return QuantisationSummary(
        scheme=scheme,
        kernel=method.kernel,
        num_linears=counts[nn.Linear],
        num_embeddings=counts[nn.Embedding],
        bytes_by_dtype=bytes_by_dtype(model),
        left=tuple(f"{count} x {what}" for what, count in left.items()),
    )


def bytes_by_dtype(model: nn.Module) -> dict[str, int]:
    """Return the bytes of a model's parameters by dtype, the largest first."""
    found: Counter[str] = Counter()
    for parameter in model.parameters():
        found[str(parameter.dtype).removeprefix("torch.")] += parameter.nbytes
    return dict(found.most_common())


def _why_not(path: str, module: nn.Module, short: str, is_quantised: Callable[[str, str], bool] | None) -> str | None:
    """Return why a parameter cannot be quantised, the same text for parameters that are alike; None if it can."""
    if type(module) in REPLACED and short == "weight":
        if is_quantised is None or is_quantised(path, type(module).__name__):
            return None
        return f"{type(module).__name__}.{short} (not quantised in the checkpoint)"
    return f"{type(module).__name__}.{short} (neither a plain linear nor a plain embedding)"
