"""The grouping of a model's layers by shared block tables, and of the groups' layers by shared cache tensors.

The design follows vLLM's hybrid KV cache manager. Layers that attend to different ranges of the past keep different
blocks, so each kind of layer has its own block tables. All groups have the same number of places for layers, and layer
`i` of each group is stored in cache tensor `i`: a block number belongs to one group at a time, so the groups share the
tensors, and one pool of equal blocks serves all groups. The functions here are pure.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from piecegraph.runner.attention.interface.cache_spec import CachedLayer, CacheSpec, Reach, common_page_bytes
from piecegraph.runner.scheduling.kv_cache_group import KVCacheGroup

MAX_GROUPS = 8
"""The largest number of groups, each of which costs the host a few microseconds a step."""

MIN_SAVING = 0.1
"""The share of a longest request's memory that several groups must save compared with one group."""

MAX_BLOCK_SIZE = 4096
"""The largest number of tokens of a block that is chosen for a model with states."""

MAX_EMPTY = 0.05
"""The share of additional memory, for places that stay empty, at which larger groups are still preferred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheLayout:
    """The groups of layers for the scheduler, and the cache tensors of the layers."""

    groups: tuple[KVCacheGroup, ...]  # `layers` are indices in the model's order
    group_of: Mapping[str, int]  # by the layer's name
    tensors: tuple[tuple[str, ...], ...]  # names of the layers that share a cache tensor, at most one of each group
    reaches: tuple[frozenset[Reach], ...]  # per group, how far back its layers see
    note: str | None  # the reason for the layout; None if there was no choice
    page_bytes: int | None = None  # of a page that layers of any kind share; None: layers of one kind share tensors
    beside: tuple[str, ...] = ()  # names of layers that keep tokens in tensors of their own, outside of such pages

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes for the engine: `note`, if there is one."""
        return () if self.note is None else (f"kv cache groups: {self.note}",)

    def of_stage(self, names: Container[str]) -> KVCacheLayout:
        """Return the layout of a stage of a pipeline that holds the layers `names`: all groups, and its own tensors."""
        own = [tuple(name for name in shared if name in names) for shared in self.tensors]
        return replace(self, tensors=tuple(shared for shared in own if shared))

    def blocks_per_request(self, num_tokens: int, block_size: int, max_step_tokens: int) -> int:
        """Return the largest number of blocks that a request of `num_tokens` holds at a time, over all groups."""
        return sum(group.max_blocks(num_tokens, block_size, max_step_tokens) for group in self.groups)


def kv_cache_layout(
    layers: Sequence[CachedLayer],
    *,
    max_model_len: int,
    block_size: int,
    kernel_block_size: int | None = None,
    keeps_boundaries: bool = True,
) -> KVCacheLayout:
    """Group `layers`, at least one, by what they keep, if that saves memory.

    A window of `max_model_len` or more counts as none. A model with one kind of layers has one group. Otherwise the
    kinds are split into groups of equal size, the largest size at which few places stay empty, weighted by the blocks
    that a decoding request of `max_model_len` holds. Layers of attention whose blocks differ cannot share memory and
    form one group, which keeps what its layer with the largest window needs. Layers with states always have groups of
    their own, and all layers of such a model have pages of one size, that of the largest.

    `kernel_block_size`: the tokens of a block as kernels see it; None: `block_size`. `keeps_boundaries`: whether the
    states at all block boundaries are kept, for later requests with the same prefix.
    """
    assert layers, "a model without attention or state layers has no cache to lay out"
    kinds: dict[KVCacheGroup, list[int]] = {}
    for number, layer in enumerate(layers):
        kinds.setdefault(_kind(layer.cache_spec, max_model_len, keeps_boundaries), []).append(number)
    held = {kind: kind.max_blocks(max_model_len, block_size, max_step_tokens=1) for kind in kinds}
    has_states = any(kind.is_state for kind in kinds)
    what = ", ".join(_text(len(numbers), kind) for kind, numbers in kinds.items())
    if not has_states:
        reason = _reason_for_one_group(layers, kinds, held, max_model_len)
        if reason is not None:
            widest = _widest(kinds, held)
            note = None if kinds.keys() == {KVCacheGroup()} else f"{what}: one group{reason}"
            return _layout(layers, [replace(widest, layers=tuple(range(len(layers))))], note)
    counts = {kind: len(numbers) for kind, numbers in kinds.items()}
    size = _group_size(counts, held)
    groups = [
        replace(kind, layers=tuple(numbers[first : first + size]))
        for kind, numbers in kinds.items()
        for first in range(0, len(numbers), size)
    ]
    if has_states:
        specs = [layer.cache_spec for layer in layers]
        page_bytes = common_page_bytes(specs, block_size, kernel_block_size or block_size)
        note = f"{what}: {len(groups)} groups of up to {size} layers; {_page_note(specs, block_size, page_bytes)}"
        return replace(_layout(layers, groups, note), page_bytes=page_bytes)
    needed, at_once = _places(counts, held, size), held[_widest(kinds, held)] * len(layers)
    return _layout(
        layers,
        groups,
        f"{what}: {len(groups)} groups of up to {size} layers; while it decodes, a request of {max_model_len} tokens "
        f"takes {needed / at_once:.0%} of the memory that one group would",
    )


def fitting_block_size(layers: Sequence[CachedLayer], block_size: int) -> int:
    """Return the tokens of a block, `block_size` times a power of two, that take as much memory as a layer's state.

    Every page of a model with states is as large as the largest, so smaller blocks would waste most of the memory of
    layers with attention. `block_size` itself if no layer has a state, or all have.
    """
    specs = [layer.cache_spec for layer in layers]
    of_states = max((spec.page_bytes(block_size) for spec in specs if spec.is_state), default=0)
    of_a_token = max((spec.page_bytes(1) for spec in specs if not spec.is_state), default=0)
    while 0 < block_size * of_a_token < of_states and block_size < MAX_BLOCK_SIZE:
        block_size *= 2
    return block_size


def _reason_for_one_group(
    layers: Sequence[CachedLayer],
    kinds: Mapping[KVCacheGroup, Sequence[int]],
    held: Mapping[KVCacheGroup, int],
    max_model_len: int,
) -> str | None:
    """Return why these layers, which all keep tokens, are one group, as the end of a note; None: they are several."""
    if len(kinds) == 1:
        return ""
    widest = _widest(kinds, held)
    shapes = {layer.cache_spec.tensors for layer in layers}
    if len(shapes) > 1:
        kept = "everything" if widest.keeps_all_tokens else f"{widest.sliding_window or widest.chunk_size} tokens"
        return (
            f", which keeps {kept}, since layers whose keys and values have {len(shapes)} different shapes cannot "
            "share memory"
        )
    counts = {kind: len(numbers) for kind, numbers in kinds.items()}
    if _places(counts, held, _group_size(counts, held)) > (1 - MIN_SAVING) * held[widest] * len(layers):
        return (
            f", since several would save less than {MIN_SAVING:.0%} of the memory of a request of {max_model_len} "
            "tokens"
        )
    return None


def _widest(kinds: Mapping[KVCacheGroup, Sequence[int]], held: Mapping[KVCacheGroup, int]) -> KVCacheGroup:
    return max(kinds, key=lambda kind: (held[kind], kind.keeps_all_tokens, kind.sliding_window or kind.chunk_size or 0))


def _page_note(specs: Sequence[CacheSpec], block_size: int, page_bytes: int) -> str:
    """Return how much of a page the layers use, and at which block size tokens would fill it."""
    of_tokens = max((spec.page_bytes(block_size) for spec in specs if not spec.is_state), default=0)
    of_states = max(spec.page_bytes(block_size) for spec in specs if spec.is_state)
    text = f"a page takes {page_bytes} bytes, of which {block_size} tokens use {of_tokens} and a state {of_states}"
    if 0 < of_tokens < page_bytes // 2:
        text += (
            f"; block_size={page_bytes * block_size // of_tokens // 16 * 16 or block_size} would fill it with tokens"
        )
    return text


def _layout(layers: Sequence[CachedLayer], groups: Sequence[KVCacheGroup], note: str | None) -> KVCacheLayout:
    names = [[layers[number].name for number in group.layers] for group in groups]
    return KVCacheLayout(
        groups=tuple(groups),
        group_of={name: number for number, of_group in enumerate(names) for name in of_group},
        tensors=tuple(
            tuple(of_group[place] for of_group in names if place < len(of_group))
            for place in range(max(map(len, names)))
        ),
        reaches=tuple(frozenset(layers[number].cache_spec.reach for number in group.layers) for group in groups),
        note=note,
    )


def _kind(spec: CacheSpec, max_model_len: int, keeps_boundaries: bool) -> KVCacheGroup:
    """Return the group of a layer without its layers: what it keeps of a request of `max_model_len`."""
    if (spec.window or spec.chunk_size) >= max_model_len:
        return KVCacheGroup()
    return spec.group(keeps_boundaries=keeps_boundaries)


def _group_size(counts: Mapping[KVCacheGroup, int], held: Mapping[KVCacheGroup, int]) -> int:
    """Return the largest group size, and so the fewest groups, whose memory exceeds the best by at most `MAX_EMPTY`."""
    largest = max(counts.values())
    sizes = [size for size in range(1, largest + 1) if _num_groups(counts, size) <= max(MAX_GROUPS, len(counts))]
    best = min(_places(counts, held, size) for size in sizes)
    return max(size for size in sizes if _places(counts, held, size) <= (1 + MAX_EMPTY) * best)


def _num_groups(counts: Mapping[KVCacheGroup, int], size: int) -> int:
    return sum(-(-count // size) for count in counts.values())


def _places(counts: Mapping[KVCacheGroup, int], held: Mapping[KVCacheGroup, int], size: int) -> int:
    """Return the blocks per layer, empty places included, that such a request holds in groups of `size`."""
    return sum(-(-count // size) * size * held[kind] for kind, count in counts.items())


def _text(count: int, kind: KVCacheGroup) -> str:
    if kind.is_state:
        return f"{count} x state"
    if kind.is_latent:
        return f"{count} x latent attention"
    if kind.chunk_size is not None:
        return f"{count} x chunks of {kind.chunk_size} tokens"
    window = kind.sliding_window
    return f"{count} x " + ("full attention" if window is None else f"window of {window} tokens")
