"""What the tensors of a quantised module have to be, checked by the headers of files before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from piecegraph.errors import CheckpointError

FLOATS = ("F32", "BF16", "F16")
"""safetensors' names of the dtypes of scales."""


class Form(NamedTuple):
    """A way in which a tensor may be stored."""

    dtypes: tuple[str, ...]  # safetensors' names
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{' or '.join(self.dtypes)} {list(self.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A tensor of a quantised module, as its format stores it."""

    forms: tuple[Form, ...] = ()  # none: it is not used, whatever it is
    is_optional: bool = False
    values: torch.Tensor | None = None  # of a small tensor of whole numbers, which is read to be compared
    what_others_mean: str = ""  # about other values, for a message

    @classmethod
    def one(cls, dtypes: tuple[str, ...], *shape: int) -> Wanted:
        """Return a tensor that is stored in one way."""
        return cls(forms=(Form(dtypes, shape),))


NOT_USED = Wanted(is_optional=True)


def check_tensors_of(path: str, found: Mapping[str, Any], wanted: Mapping[str, Wanted]) -> None:
    """Raise `CheckpointError` unless the tensors of the module at `path` are those that its format needs.

    `found`: as safetensors' slices, by the last part of their names, of which the headers are read and the small
    tensors that have to have certain values.
    """
    for suffix, want in wanted.items():
        name = full_name(path, suffix)
        part = found.get(suffix)
        if part is None:
            if not want.is_optional:
                raise CheckpointError(f"the checkpoint has a tensor missing: {name}. Copy or download the files again.")
            continue
        dtype, shape = str(part.get_dtype()), tuple(part.get_shape())
        if want.forms and not any(dtype in form.dtypes and shape == form.shape for form in want.forms):
            raise CheckpointError(
                f"{name} is {dtype} {list(shape)} in the files, and the module needs "
                f"{', or '.join(map(str, want.forms))}. Check that config.json belongs to these weights."
            )
        if want.values is not None and not torch.equal(part[...].long(), want.values):
            raise CheckpointError(f"{name} {want.what_others_mean}")
    for suffix in found:
        if suffix not in wanted:
            raise CheckpointError(
                f"{full_name(path, suffix)} is in the files, and such a module needs {', '.join(wanted)}. Check that "
                "config.json belongs to these weights."
            )


def full_name(path: str, suffix: str) -> str:
    """Return the name of a tensor: some suffixes follow the path of all experts without a dot."""
    return f"{path}{suffix}" if suffix.startswith("_") else f"{path}.{suffix}"


class OfOneExpert:
    """A stored tensor of all experts, as that of one: its first dim counts experts."""

    def __init__(self, part: Any) -> None:
        """Keep the stored tensor."""
        self._part = part

    def get_shape(self) -> list[int]:
        """Return the shape without the first dim."""
        return list(self._part.get_shape())[1:]

    def get_dtype(self) -> str:
        """Return safetensors' name of the dtype."""
        return str(self._part.get_dtype())
