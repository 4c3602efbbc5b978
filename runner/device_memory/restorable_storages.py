"""The storages of a module that a reload of its weights writes as a whole, so that their values need not be kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch


def restorable(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield a tensor of each storage of which every byte belongs to a tensor of the module's `state_dict`.

    `reload_weights` writes exactly these tensors.
    """
    by_storage: dict[int, list[torch.Tensor]] = {}
    for tensor in module.state_dict().values():
        by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    for tensors in by_storage.values():
        if _covered_bytes(tensors) >= tensors[0].untyped_storage().nbytes():
            yield tensors[0]


def _covered_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return how many bytes of their common storage contiguous tensors cover; 0 if one is not contiguous."""
    spans = []
    for tensor in tensors:
        if not tensor.is_contiguous():
            return 0
        begin = int(tensor.storage_offset()) * tensor.element_size()
        spans.append((begin, begin + tensor.nbytes))
    covered = end = 0
    for begin, last in sorted(spans):
        covered += max(last - max(begin, end), 0)
        end = max(end, last)
    return covered
