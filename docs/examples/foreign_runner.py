"""A runner of your own: its attention op, its paged cache, its metadata; from piecegraph only the compiler.

    python docs/examples/foreign_runner.py

piecegraph cuts the model at `foreign::attention`, compiles what is left, and captures it: FULL for steps in
which every request decodes one token, PIECEWISE for all others. It never learns what attention reads. The
rule that makes this work: whatever a kernel reads lies in buffers that stay where they are, and changes by
being written in place before a replay. tests/compiler/graphs/test_foreign_runner.py runs all of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

import piecegraph as pg

VOCABULARY, HIDDEN, NUM_HEADS, HEAD_DIM, NUM_LAYERS = 64, 32, 2, 16, 3
BLOCK_SIZE, MAX_BLOCKS, MAX_REQS = 4, 8, 4
MAX_LEN = BLOCK_SIZE * MAX_BLOCKS
NUM_BLOCKS = 1 + MAX_REQS * MAX_BLOCKS  # block 0 is nobody's: padding points there
CAPTURE_SIZES = (1, 2, 4, 8, 16)  # a batch is padded to one of these numbers of tokens
PAD_SLOT_ID = -1


# What attention reads -------------------------------------------------------------------------------------------


class Cache(NamedTuple):
    key: torch.Tensor  # [NUM_BLOCKS * BLOCK_SIZE, NUM_HEADS, HEAD_DIM]
    value: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class BatchMetadata:
    """One bucket's view of the persistent buffers; padded requests and tokens are included."""

    block_table: torch.Tensor  # [num_reqs, MAX_BLOCKS] int32
    seq_lens: torch.Tensor  # [num_reqs] int32, this step's tokens included
    query_start_loc: torch.Tensor  # [num_reqs + 1] int32
    slot_mapping: torch.Tensor  # [num_tokens] int64, PAD_SLOT_ID for padding
    caches: dict[str, Cache]  # by layer


_current_batch: ContextVar[BatchMetadata] = ContextVar("current_batch")


@contextmanager
def current_batch(metadata: BatchMetadata) -> Iterator[None]:
    """Attention inside the `with` reads `metadata`: pieces pass tensors only, so it comes from the side."""
    token = _current_batch.set(metadata)
    try:
        yield
    finally:
        _current_batch.reset(token)


# The op a model is cut at ---------------------------------------------------------------------------------------


def paged_attention(
    query: torch.Tensor,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,  # written
    layer: str,
    batch: BatchMetadata,
) -> None:
    """Cache this step's keys and values, then attend causally over each request's pages.

    Plain torch over fixed shapes: nothing is read back by the host, so a CUDA graph can hold it.
    """
    cache = batch.caches[layer]
    is_padding = (batch.slot_mapping == PAD_SLOT_ID)[:, None, None]
    slots = batch.slot_mapping.clamp(min=0)
    for cached, new in zip(cache, (key, value), strict=True):  # padding writes back what is there
        cached.index_copy_(0, slots, torch.where(is_padding, cached[slots], new))
    token = torch.arange(query.shape[0], device=query.device, dtype=torch.int32)
    request = torch.searchsorted(batch.query_start_loc[1:], token, right=True).clamp(max=batch.seq_lens.shape[0] - 1)
    visible = (batch.seq_lens[request] - batch.query_start_loc[request + 1] + token + 1).clamp(min=1)
    blocks = batch.block_table[request].long()  # [num_tokens, MAX_BLOCKS]
    slots = (blocks[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=query.device)).flatten(1)
    is_visible = torch.arange(MAX_LEN, device=query.device) < visible[:, None]
    scores = torch.einsum("thd,tshd->ths", query, cache.key[slots]) * HEAD_DIM**-0.5
    weights = scores.masked_fill(~is_visible[:, None], float("-inf")).softmax(-1)
    out.copy_(torch.einsum("ths,tshd->thd", weights, cache.value[slots]))


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, layer: str) -> None:
    paged_attention(query, key, value, out, layer, _current_batch.get())


def _prepare(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, layer: str
) -> Callable[[BatchMetadata], None]:
    """What a PIECEWISE replay calls for the op, with the step's metadata, instead of going through torch."""
    return partial(paged_attention, query, key, value, out, layer)


_library = torch.library.Library("foreign", "DEF")
_library.define("attention(Tensor query, Tensor key, Tensor value, Tensor(a!) out, str layer) -> ()")
_library.impl("attention", _attention, "CompositeExplicitAutograd")
_library.impl("attention", lambda *args: None, "Meta")
pg.register_prepare("foreign::attention", _prepare, _current_batch.get)  # optional: without it the op is dispatched


# The model ------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * NUM_HEADS * HEAD_DIM)
        self.project = nn.Linear(NUM_HEADS * HEAD_DIM, HIDDEN)
        self.mlp = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 64), nn.SiLU(), nn.Linear(64, HIDDEN))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(hidden)).unflatten(-1, (3, NUM_HEADS, HEAD_DIM)).unbind(1)
        out = torch.empty_like(query)
        torch.ops.foreign.attention.default(query, key, value, out, self.name)
        hidden = hidden + self.project(out.flatten(1))
        result: torch.Tensor = hidden + self.mlp(hidden)
        return result


class Decoder(nn.Module):
    """`(input_ids [num_tokens], positions [num_tokens]) -> logits [num_tokens, VOCABULARY]`."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Embedding(MAX_LEN, HIDDEN)
        self.layers = nn.ModuleList([Layer(f"layers.{index}") for index in range(NUM_LAYERS)])
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(input_ids) + self.positions(positions)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


# The runner -----------------------------------------------------------------------------------------------------


@dataclass
class Request:
    token_ids: list[int]
    blocks: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0


class Scheduled(NamedTuple):
    """A request and how many of its tokens this step computes."""

    request: Request
    num_tokens: int


class Runner:
    """Owns the buffers, the cache and the graphs. `capture`, then `step` as often as you like, then `close`."""

    def __init__(self, *, device: str = "cpu", compiler: str = "inductor", seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Decoder().to(device).requires_grad_(False)
        shape = (NUM_BLOCKS * BLOCK_SIZE, NUM_HEADS, HEAD_DIM)
        self.caches = {
            f"layers.{index}": Cache(torch.zeros(shape, device=device), torch.zeros(shape, device=device))
            for index in range(NUM_LAYERS)
        }
        self.free_blocks = list(range(NUM_BLOCKS - 1, 0, -1))
        max_tokens = CAPTURE_SIZES[-1]
        self.input_ids = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.slot_mapping = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.block_table = torch.zeros(MAX_REQS, MAX_BLOCKS, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(MAX_REQS, dtype=torch.int32, device=device)
        self.query_start_loc = torch.zeros(MAX_REQS + 1, dtype=torch.int32, device=device)
        self.compiled = pg.compile(
            self.model,
            pg.CompileConfig(split_ops=("foreign::attention",), compiler=compiler),
            dynamic_dims={"input_ids": {0: "num_tokens"}, "positions": {0: "num_tokens"}},
            example_inputs=(self.input_ids, self.positions),
        )

    def capture(self) -> None:
        """Every graph that will be replayed: CUDA graphs on a GPU, recorded functions elsewhere."""
        self.fill(())  # only padding: nothing is cached while capturing
        decode_sizes = [size for size in CAPTURE_SIZES if size <= MAX_REQS]
        self.full = pg.capture(
            self.forward,
            [pg.BatchDescriptor(num_tokens=size, num_reqs=size, uniform_token_count=1) for size in decode_sizes],
            self.static_inputs,
            mode=pg.CUDAGraphMode.FULL,
            context=lambda descriptor, phase: current_batch(self.metadata(descriptor)),
        )
        self.piecewise = pg.capture(
            self.compiled,
            [pg.BatchDescriptor(num_tokens=size) for size in CAPTURE_SIZES],
            self.static_inputs,
            mode=pg.CUDAGraphMode.PIECEWISE,
            context=lambda descriptor, phase: current_batch(self.metadata(descriptor)),
        )

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What a FULL graph holds: the model, and the choice of the likeliest tokens."""
        logits = self.compiled(input_ids, positions)
        return logits, logits.argmax(-1)

    def static_inputs(self, descriptor: pg.BatchDescriptor) -> Sequence[torch.Tensor]:
        """The model's arguments: views of the persistent buffers, so that a replay has nothing to copy."""
        return self.input_ids[: descriptor.num_tokens], self.positions[: descriptor.num_tokens]

    def metadata(self, descriptor: pg.BatchDescriptor) -> BatchMetadata:
        """What attention reads in this bucket: views too. PIECEWISE pads tokens only, so all rows are there."""
        num_reqs = descriptor.num_reqs or MAX_REQS
        return BatchMetadata(
            block_table=self.block_table[:num_reqs],
            seq_lens=self.seq_lens[:num_reqs],
            query_start_loc=self.query_start_loc[: num_reqs + 1],
            slot_mapping=self.slot_mapping[: descriptor.num_tokens],
            caches=self.caches,
        )

    def fill(self, scheduled: Sequence[Scheduled]) -> None:
        """Write a step into the persistent buffers, in place, padding included."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, lens, table = [0], [], []
        for request, num_tokens in scheduled:
            first = request.num_computed_tokens
            while len(request.blocks) * BLOCK_SIZE < first + num_tokens:
                request.blocks.append(self.free_blocks.pop())
            for position in range(first, first + num_tokens):
                ids.append(request.token_ids[position])
                positions.append(position)
                slots.append(request.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
            starts.append(len(ids))
            lens.append(first + num_tokens)
            table.append(request.blocks + [0] * (MAX_BLOCKS - len(request.blocks)))
        _write(self.input_ids, ids, 0)
        _write(self.positions, positions, 0)
        _write(self.slot_mapping, slots, PAD_SLOT_ID)
        _write(self.query_start_loc, starts, len(ids))
        _write(self.seq_lens, lens, 0)
        _write(self.block_table, table, [0] * MAX_BLOCKS)

    def execute(
        self, scheduled: Sequence[Scheduled], *, with_graphs: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor, pg.BatchDescriptor]:
        """Logits and likeliest token of each row, padding included, and how the batch was padded.

        Views of the graphs' memory, valid until the next step. Without graphs the same pieces run over
        the same padded batch.
        """
        num_tokens = sum(item.num_tokens for item in scheduled)
        is_decode = all(item.num_tokens == 1 for item in scheduled)
        graphs = self.full if is_decode else self.piecewise
        descriptor = min((d for d in graphs.descriptors if d.num_tokens >= num_tokens), key=lambda d: d.num_tokens)
        self.fill(scheduled)
        if with_graphs and is_decode:
            logits, tokens = self.full.replay(descriptor)  # reads the persistent buffers, calls nothing of ours
            return logits, tokens, descriptor
        with current_batch(self.metadata(descriptor)):  # attention runs between the graphs, or without any
            if with_graphs:
                logits = self.piecewise.replay(descriptor)
                return logits, logits.argmax(-1), descriptor
            return *self.forward(*self.static_inputs(descriptor)), descriptor

    def step(self, scheduled: Sequence[Scheduled], *, with_graphs: bool = True) -> None:
        """Compute, and give every request whose tokens are all computed its next one."""
        tokens = self.execute(scheduled, with_graphs=with_graphs)[1].tolist()
        row = -1
        for request, num_tokens in scheduled:
            row += num_tokens
            request.num_computed_tokens += num_tokens
            if request.num_computed_tokens == len(request.token_ids):
                request.token_ids.append(tokens[row])

    def close(self) -> None:
        self.full.close()
        self.piecewise.close()
        self.compiled.close()


def _write(buffer: torch.Tensor, rows: list[int] | list[list[int]], padding: int | list[int]) -> None:
    """`rows`, then `padding` to the end, in one copy."""
    filled = [*rows, *[padding] * (buffer.shape[0] - len(rows))]
    buffer.copy_(torch.tensor(filled, dtype=buffer.dtype))


def main() -> None:
    runner = Runner(device="cuda" if torch.cuda.is_available() else "cpu", compiler="eager")
    runner.capture()
    first, second = Request([1, 2, 3, 4, 5]), Request([6, 7, 8])
    runner.step([Scheduled(first, 5)])
    runner.step([Scheduled(first, 1), Scheduled(second, 3)])  # a mixed batch: one decodes, one has its prompt computed
    for _ in range(8):
        runner.step([Scheduled(first, 1), Scheduled(second, 1)])
    lines = [
        f"{runner.compiled.report().num_pieces} pieces, {runner.full.kind} graphs",
        f"a FULL step: {runner.full.costs(runner.full.descriptors[0])}",
        f"a PIECEWISE step: {runner.piecewise.costs(runner.piecewise.descriptors[0])}",
        f"first: {first.token_ids}",
        f"second: {second.token_ids}",
    ]
    print("\n".join(lines))  # noqa: T201  (an example talks)
    runner.close()


if __name__ == "__main__":
    main()
