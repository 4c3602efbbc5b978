"""The report on a compiled model: counts, seconds, and a row per piece."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from piecegraph.passes.matching.graph_pass import Miss

NOTHING_TO_GAIN = "it has no reduction, so a static size gains it next to nothing"
"""The note of a piece without a reduction, which is compiled for no static size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRow:
    """The outcome of one pass, over the traced graph or over all pieces."""

    name: str
    matches: int
    misses: tuple[Miss, ...]
    nodes_removed: int
    seconds: float
    place: str = "traced"  # a `Place`
    error: str = ""  # why the pass was undone, where it was
    note: str = ""  # what `matches` leaves out, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceRow:
    """One piece of the model."""

    index: int
    unique: int  # which unique piece runs it
    num_inputs: int
    num_outputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UniquePieceRow:
    """One compiled piece."""

    index: int
    key: str
    shared_by: int  # number of pieces of the model that it runs
    num_nodes: int  # operations of the traced graph
    kernels: int | None  # generated kernels (library calls such as matmuls come on top); None: not known
    compile_seconds: float
    note: str
    eager_reason: str = ""  # why it runs as its graph although it was to be compiled; empty: it was compiled
    passes: Mapping[str, int] = field(default_factory=dict)
    """The operations in the piece that each pass made (items of a tuple do not count): usually one a match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticPieceRow:
    """One unique piece at one of `compile_sizes`. If `is_used` is false, `note` says why and the dynamic piece runs."""

    unique: int
    size: int
    key: str
    is_used: bool
    kernels: int | None
    compile_seconds: float
    tune_seconds: float  # of its first run, which measures kernels on a GPU
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport:
    """The cache's part in a compiled model: what was loaded, and the reason if the next start will not find it."""

    state: str  # "hit": loaded; "miss": traced, and compiled except for pieces that were stored; "off"
    key: str = ""  # of the plan; empty: no key was made
    reason: str = ""  # why it is not a hit
    not_stored: str = ""  # why the next start will not find what was compiled; empty: it will, or need not
    loaded_pieces: int = 0  # unique and static pieces that were loaded
    loaded_kernels: int = 0  # of this package (attention, ops of passes, ...), so far: each is loaded when needed
    compiled_kernels: int = 0  # of this package, not found in the cache
    load_seconds: float = 0.0  # of a hit: all the time but the two below
    import_seconds: float = 0.0  # of a hit: imports of torch that were still missing
    bind_seconds: float = 0.0  # of a hit: concatenating weights again (`merge-projections`), if they are read only now
    saved_seconds: float = 0.0  # seconds that compiling took, less `load_seconds`


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileReport:
    """All figures of one compile. Seconds are wall time.

    `compile_seconds` is the time of all unique pieces together, which may compile in parallel.
    `static_compile_seconds` is what `compile_sizes` took in addition, and `static_tune_seconds` the part of that spent
    on measuring.
    """

    compiler: str
    num_pieces: int
    num_unique_pieces: int
    num_split_ops: int
    trace_seconds: float
    split_seconds: float
    compile_seconds: float
    stitch_seconds: float
    static_compile_seconds: float
    static_tune_seconds: float
    pieces: tuple[PieceRow, ...]
    unique_pieces: tuple[UniquePieceRow, ...]
    static_pieces: tuple[StaticPieceRow, ...]
    passes: tuple[PassRow, ...] = ()
    trace_note: str = ""  # how layers were traced
    weights_first: str = ""  # why weights were not loaded while pieces compiled, where that was asked for
    cache: CacheReport = CacheReport(state="off")

    @property
    def static_sizes(self) -> tuple[int, ...]:
        """The sizes for which every piece is static that takes sizes and gains by being static."""
        rows = [row for row in self.static_pieces if row.note != NOTHING_TO_GAIN]
        sizes = dict.fromkeys(row.size for row in rows)
        return tuple(size for size in sizes if all(row.is_used for row in rows if row.size == size))

    @property
    def eager_pieces(self) -> dict[int, str]:
        """The reason for each unique piece that was to be compiled but runs eagerly, by index."""
        return {row.index: row.eager_reason for row in self.unique_pieces if row.eager_reason}

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CompileReport:
        """Return the report that `as_dict` wrote. Raises `KeyError` or `TypeError` for anything else."""
        passes = [{**row, "misses": tuple(Miss(**miss) for miss in row["misses"])} for row in values["passes"]]
        rows = {
            "pieces": tuple(PieceRow(**row) for row in values["pieces"]),
            "unique_pieces": tuple(UniquePieceRow(**row) for row in values["unique_pieces"]),
            "static_pieces": tuple(StaticPieceRow(**row) for row in values["static_pieces"]),
            "passes": tuple(PassRow(**row) for row in passes),
            "cache": CacheReport(**values["cache"]),
        }
        return cls(**{**values, **rows})

    def __str__(self) -> str:
        lines = [
            f"{self.num_pieces} pieces -> {self.num_unique_pieces} unique, {self.num_split_ops} split ops "
            f"({self.compiler})",
            f"trace {self.trace_seconds:.2f} s, split {self.split_seconds:.2f} s, "
            f"compile {self.compile_seconds:.2f} s, stitch {self.stitch_seconds:.2f} s",
            *([f"trace: {self.trace_note}"] if self.trace_note else []),
            " unique  key           pieces  nodes  kernels  seconds",
        ]
        for row in self.unique_pieces:
            kernels = "-" if row.kernels is None else str(row.kernels)
            lines.append(
                f" {row.index:6d}  {row.key[:12]}  {row.shared_by:6d}  {row.num_nodes:5d}  {kernels:>7s}  "
                f"{row.compile_seconds:7.2f}  {row.note}".rstrip()
            )
        for each in self.passes:
            misses = f", {len(each.misses)} misses" if each.misses else ""
            lines.append(f" pass {each.name}: {each.matches} matches{misses}, {each.seconds:.2f} s")
            lines += [f"  {text}" for text in (each.error and f"undone: {each.error}", each.note) if text]
        for size in dict.fromkeys(row.size for row in self.static_pieces):
            rows = [row for row in self.static_pieces if row.size == size]
            seconds = sum(row.compile_seconds for row in rows), sum(row.tune_seconds for row in rows)
            lines.append(
                f" size {size}: {sum(row.is_used for row in rows)} of {len(rows)} pieces static, "
                f"compile {seconds[0]:.2f} s, tune {seconds[1]:.2f} s"
            )
            lines += [f"  unique {row.unique}: {row.note}" for row in rows if row.note]
        lines += self._cache_lines()
        if self.static_pieces:
            lines.append(f" static sizes took {self.static_compile_seconds:.2f} s")
        return "\n".join(lines)

    def _cache_lines(self) -> list[str]:
        found = self.cache
        key = f" {found.key[:12]}" if found.key else ""
        why = f": {found.reason}" if found.reason else ""
        if found.state == "hit":
            why = (
                f": loaded in {found.load_seconds:.2f} s, imports {found.import_seconds:.2f} s, "
                f"weights {found.bind_seconds:.2f} s, saved {found.saved_seconds:.2f} s"
            )
        lines = [f"cache {found.state}{key}{why}"]
        if found.loaded_pieces and found.state != "hit":
            lines.append(f" {found.loaded_pieces} pieces were loaded")
        if found.loaded_kernels or found.compiled_kernels:
            lines.append(f" kernels of ours: {found.loaded_kernels} loaded, {found.compiled_kernels} compiled")
        return lines + ([f" not stored: {found.not_stored}"] if found.not_stored else [])
