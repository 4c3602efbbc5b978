"""The grouping of a model's layers by shared block tables, and of the groups' layers by shared cache tensors.

The design follows vLLM's hybrid KV cache manager. Layers that attend to different ranges of the past keep different
blocks, so each kind of layer has its own block tables. All groups have the same number of places for layers, and layer
`i` of each group is stored in cache tensor `i`: a block number belongs to one group at a time, so the groups share the
tensors, and one pool of equal blocks serves all groups. The functions here are pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.scheduling.kv_cache_group import KVCacheGroup, blocks_for

MAX_GROUPS = 8
"""The largest number of groups, each of which costs the host a few microseconds a step."""

MIN_SAVING = 0.1
"""The share of a longest request's memory that several groups must save compared with one group."""

MAX_EMPTY = 0.05
"""The share of additional memory, for places that stay empty, at which larger groups are still preferred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheLayout:
    """The groups of layers for the scheduler, and the cache tensors of the layers."""

    groups: tuple[KVCacheGroup, ...]  # `layers` are indices in the model's order
    group_of: Mapping[str, int]  # by the layer's name
    tensors: tuple[tuple[str, ...], ...]  # names of the layers that share a cache tensor, at most one of each group
    windows: tuple[frozenset[int], ...]  # per group, the values of its layers' `AttentionLayer.window`
    note: str | None  # the reason for the layout; None if there was no choice

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes for the engine: `note`, if there is one."""
        return () if self.note is None else (f"kv cache groups: {self.note}",)

    def blocks_per_request(self, num_tokens: int, block_size: int, max_step_tokens: int) -> int:
        """Return the largest number of blocks that a request of `num_tokens` holds at a time, over all groups."""
        return sum(group.max_blocks(num_tokens, block_size, max_step_tokens) for group in self.groups)


def kv_cache_layout(layers: Sequence[AttentionLayer], *, max_model_len: int, block_size: int) -> KVCacheLayout:
    """Group `layers`, at least one, by their sliding windows, if that saves memory.

    A window of `max_model_len` or more counts as none. A model with one kind of layers has one group. Otherwise the
    kinds are split into groups of equal size, the largest size at which few places stay empty, weighted by the blocks
    that a decoding request of `max_model_len` holds. Layers whose blocks differ cannot share memory and form one group,
    which keeps what its layer with the largest window needs.
    """
    assert layers, "a model without attention layers has no cache to lay out"
    kinds: dict[int | None, list[int]] = {}
    for number, layer in enumerate(layers):
        kinds.setdefault(_sliding_window(layer, max_model_len), []).append(number)
    held = {window: _blocks_held(window, max_model_len, block_size) for window in kinds}
    widest = max(kinds, key=lambda window: (held[window], window is None, window or 0))
    single = [KVCacheGroup(layers=tuple(range(len(layers))), sliding_window=widest)]
    if len(kinds) == 1:
        if widest is None:
            return _layout(layers, single, None)
        return _layout(layers, single, f"{_kind(len(layers), widest)}: one group")
    what = ", ".join(_kind(len(numbers), window) for window, numbers in kinds.items())
    shapes = {(layer.num_kv_heads, layer.key_dim, layer.value_dim, layer.dtype) for layer in layers}
    if len(shapes) > 1:
        return _layout(
            layers,
            single,
            f"{what}: one group, which keeps {'everything' if widest is None else f'{widest} tokens'}, since layers "
            f"whose keys and values have {len(shapes)} different shapes cannot share memory",
        )
    counts = {window: len(numbers) for window, numbers in kinds.items()}
    size = _group_size(counts, held)
    needed, at_once = _places(counts, held, size), held[widest] * len(layers)
    if needed > (1 - MIN_SAVING) * at_once:
        return _layout(
            layers,
            single,
            f"{what}: one group, since several would save less than {MIN_SAVING:.0%} of the memory of a request of "
            f"{max_model_len} tokens",
        )
    groups = [
        KVCacheGroup(layers=tuple(numbers[first : first + size]), sliding_window=window)
        for window, numbers in kinds.items()
        for first in range(0, len(numbers), size)
    ]
    return _layout(
        layers,
        groups,
        f"{what}: {len(groups)} groups of up to {size} layers; while it decodes, a request of {max_model_len} tokens "
        f"takes {needed / at_once:.0%} of the memory that one group would",
    )


def _layout(layers: Sequence[AttentionLayer], groups: Sequence[KVCacheGroup], note: str | None) -> KVCacheLayout:
    names = [[layers[number].name for number in group.layers] for group in groups]
    return KVCacheLayout(
        groups=tuple(groups),
        group_of={name: number for number, of_group in enumerate(names) for name in of_group},
        tensors=tuple(
            tuple(of_group[place] for of_group in names if place < len(of_group))
            for place in range(max(map(len, names)))
        ),
        windows=tuple(frozenset(layers[number].window for number in group.layers) for group in groups),
        note=note,
    )


def _sliding_window(layer: AttentionLayer, max_model_len: int) -> int | None:
    return layer.window if 0 < layer.window < max_model_len else None


def _blocks_held(window: int | None, max_model_len: int, block_size: int) -> int:
    """Return the blocks of one layer that a decoding request of `max_model_len` holds."""
    if window is None:
        return blocks_for(max_model_len, block_size)
    return KVCacheGroup(sliding_window=window).max_blocks(max_model_len, block_size, max_step_tokens=1)


def _group_size(counts: Mapping[int | None, int], held: Mapping[int | None, int]) -> int:
    """Return the largest group size, and so the fewest groups, whose memory exceeds the best by at most `MAX_EMPTY`."""
    largest = max(counts.values())
    sizes = [size for size in range(1, largest + 1) if _num_groups(counts, size) <= max(MAX_GROUPS, len(counts))]
    best = min(_places(counts, held, size) for size in sizes)
    return max(size for size in sizes if _places(counts, held, size) <= (1 + MAX_EMPTY) * best)


def _num_groups(counts: Mapping[int | None, int], size: int) -> int:
    return sum(-(-count // size) for count in counts.values())


def _places(counts: Mapping[int | None, int], held: Mapping[int | None, int], size: int) -> int:
    """Return the blocks per layer, empty places included, that such a request holds in groups of `size`."""
    return sum(-(-count // size) * size * held[window] for window, count in counts.items())


def _kind(count: int, window: int | None) -> str:
    return f"{count} x " + ("full attention" if window is None else f"window of {window} tokens")
