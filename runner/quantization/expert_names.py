"""The names that files have for the weights of experts, by transformers' conversion of checkpoints.

transformers 5 keeps the weights of a layer's experts in two parameters, `gate_up_proj` and `down_proj`, whose first dim
counts experts. Files mostly have a tensor for each expert and projection.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

GATE_UP, DOWN = "gate_up_proj", "down_proj"
PROJECTIONS = (GATE_UP, DOWN)
"""The parameters of a module of experts."""

_DEFAULT_LINEARS = {GATE_UP: ("gate_proj", "up_proj"), DOWN: ("down_proj",)}
_JOINS = frozenset({"MergeModulelist", "Concatenate"})


class Place(NamedTuple):
    """The place of a file's tensor among the parameters of experts."""

    module: str  # the path of the experts
    projection: str  # one of `PROJECTIONS`
    expert: int | None  # None: the tensor is of all experts
    part: int  # 0, or for rows that follow those of another tensor of the expert, 1


def merges_experts(converter: Any) -> bool:
    """Return whether tensors of single experts become one with a first dim that counts them."""
    first = converter.operations[0]
    return type(first).__name__ == "MergeModulelist" and first.dim == 0


def expert_of(name: str, pattern: str) -> int | None:
    """Return the number that stands in a tensor's name where `pattern` has its last `*`; None: there is none."""
    found = re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), name)
    return None if found is None else int(found.groups()[-1])


class ExpertNames:
    """The names in files of a model's experts. `experts` are the paths of these modules."""

    def __init__(self, model: Any, experts: Iterable[str]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        mapping = get_model_conversion_mapping(model)
        self._renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        self._converters = [each for each in mapping if isinstance(each, WeightConverter)]
        self._by_pattern = {pattern: each for each in self._converters for pattern in each.source_patterns}
        self._prefix = model.base_model_prefix
        floats = [f"{path}.{short}" for path in experts for short in PROJECTIONS]
        self._state = dict.fromkeys([*model.state_dict(), *floats])  # of which renaming reads the names alone

    def place_of(self, name: str) -> Place | None:
        """Return where the tensor `name`, which ends in ".weight" if it is of one expert, belongs; None: elsewhere."""
        from transformers.core_model_loading import rename_source_key

        target, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._state)
        module, _, short = target.rpartition(".")
        if short not in PROJECTIONS:
            return None
        if pattern is None:
            return Place(module, short, None, 0)
        converter = self._by_pattern[pattern]
        is_joined = merges_experts(converter) and _JOINS.issuperset(
            type(each).__name__ for each in converter.operations
        )
        expert = expert_of(name, pattern) if is_joined else None
        return None if expert is None else Place(module, short, expert, converter.source_patterns.index(pattern))

    def linears(self, module: str, projection: str) -> tuple[str, ...]:
        """Return the paths in files of the linears of a projection, in the order of their rows, `*` for the expert."""
        full = f"{module}.{projection}"
        for converter in self._converters:
            target = converter.target_patterns[0]
            if merges_experts(converter) and full.endswith(target):
                sources = (full.removesuffix(target) + source for source in converter.source_patterns)
                return tuple(self._in_files(source.removesuffix(".weight")) for source in sources)
        return tuple(f"{module}.*.{short}" for short in _DEFAULT_LINEARS[projection])

    def _in_files(self, path: str) -> str:
        for renaming in self._renamings:
            path = renaming.reverse_transform().rename_source_key(path)[0]
        return path
