"""The digest of a compiled piece's outputs on inputs made from a seed.

It is stored with the piece, and computed again by `piecegraph cache verify --run`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from piecegraph.compiler.common.piece_errors import shortened
from piecegraph.compiler.common.symbolic_sizes import evaluate_size
from piecegraph.compiler.inductor.caches import inductor_cache_dir
from piecegraph.compiler.inductor.files import LoadedPiece
from piecegraph.compiler.inductor.options import no_compile_workers
from piecegraph.compiler.splitting.piece_format import find_process_local_function, load_piece
from piecegraph.passes.matching.effects import view_source, written_by
from piecegraph.passes.matching.torch_ir import value_of

SEED = 0

SIZE = 8
"""The value of every size of a dynamic piece in a run, clamped to the size's range."""

MAX_BYTES = {"cpu": 128 * 2**20, "cuda": 4 * 2**30}
"""The largest total bytes of inputs and computed tensors, by device type. Larger inputs take seconds to make."""

_SCALE = 0.1
"""The scale of floating-point inputs, small enough for sums of thousands of products in float16."""

_VIEWS = frozenset({"view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "flatten", "contiguous"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDigest:
    """The digest of a run."""

    seed: int
    sizes: Mapping[str, int]  # by symbol of the graph
    digest: str  # sha256 of the bytes of all computed outputs, hex


@dataclass(frozen=True, slots=True)
class NotRun:
    """The absence of a digest, with the reason."""

    reason: str


def proof_as_data(proof: OutputDigest | NotRun) -> dict[str, Any]:
    """Return `proof` as JSON data."""
    if isinstance(proof, NotRun):
        return {"reason": proof.reason}
    return {"seed": proof.seed, "sizes": dict(proof.sizes), "digest": proof.digest}


def proof_from_data(data: Mapping[str, Any]) -> OutputDigest | NotRun:
    """Return the proof that `proof_as_data` wrote. Raises KeyError for other data."""
    if "reason" in data:
        return NotRun(data["reason"])
    return OutputDigest(seed=data["seed"], sizes=data["sizes"], digest=data["digest"])


class Trial:
    """A piece's graph at given sizes, which makes inputs for the piece and digests of its outputs.

    `text` comes from `dump_piece`; with `is_static` the piece takes tensors only. Raises what torch raises for sizes
    that the graph does not allow.
    """

    def __init__(self, text: str, sizes: Mapping[str, int], seed: int, *, is_static: bool) -> None:
        self.graph, self._examples = load_piece(text, sizes)
        self._seed = seed
        self._takes = _inputs_in(text, sizes, self._examples, is_static)
        self._nodes = list(self.graph.graph.nodes)
        tensors = [each for each in self._takes if isinstance(each, torch.Tensor)]
        self.device = next((each.device for each in tensors if each.device.type != "cpu"), torch.device("cpu"))
        self.writes = any(written_by(node) for node in self._nodes)
        self.is_computed = [not _is_uninitialized(node) for node in _results(self.graph)]  # by result

    @property
    def num_bytes(self) -> int:
        """An upper bound on the bytes of all inputs and all tensors that the graph computes."""
        total = sum(_extent(each) * each.element_size() for each in self._examples)
        made = [
            node for node in self._nodes if node.op in ("call_function", "call_method") and view_source(node) is None
        ]
        for value in (value_of(node) for node in made):
            total += value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
        return int(total)

    def inputs(self) -> list[Any]:
        """Return the same tensors and sizes in every call.

        Integers may be indices, so they are smaller than every size in the graph.
        """
        generators = {device: torch.Generator(device) for device in {each.device for each in self._examples}}
        for generator in generators.values():
            generator.manual_seed(self._seed)
        below = self._least_size()
        made = [
            _made(each, below, generators[each.device]) if isinstance(each, torch.Tensor) else each
            for each in self._takes
        ]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # kernels may read weights before the preceding kernels have ended
        return made

    def digest(self, inputs: list[Any], outputs: list[Any]) -> str:
        """Return the sha256 (hex) of `outputs`, and of `inputs` where the graph writes to tensors.

        Outputs that are uninitialised memory are left out.
        """
        digest = hashlib.sha256()
        computed = [each for each, is_computed in zip(outputs, self.is_computed, strict=True) if is_computed]
        for each in [*computed, *(inputs if self.writes else ())]:
            if isinstance(each, torch.Tensor):
                digest.update(each.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def _least_size(self) -> int:
        """Return the least size of a dim that could be indexed: any dim of an input, or a computed dim other than 1."""
        taken = [int(size) for each in self._examples for size in each.shape]
        values = [value_of(node) for node in self._nodes]
        made = [int(size) for each in values if isinstance(each, torch.Tensor) for size in each.shape if size != 1]
        return max(1, min([*taken, *made], default=1))


def sizes_of(text: str, size: int | None) -> dict[str, int]:
    """Return a number for each symbol of the graph: the static `size`, or `SIZE` clamped to the symbol's range."""
    found = {}
    for symbol in json.loads(text)["symbols"]:
        within = max(SIZE, symbol["lower"])
        dynamic = within if symbol["upper"] is None else min(within, symbol["upper"])
        found[symbol["name"]] = dynamic if size is None else size
    return found


def prove(done: LoadedPiece, text: str | None, size: int | None) -> OutputDigest | NotRun:
    """Run a piece that was just compiled and return its digest, or why it was not run. Never raises.

    `text` is its graph from `dump_piece`, `size` its static size. Only the memory that torch's allocator reserves
    changes.
    """
    if text is None:
        return NotRun("its graph is not plain data")
    try:
        sizes = sizes_of(text, size)
        trial = Trial(text, sizes, SEED, is_static=size is not None)
        obstacle = _obstacle(trial, size)
        if obstacle is not None:
            return NotRun(obstacle)
        digest = digest_of(done, trial)
        if digest_of(done, trial) != digest:
            return NotRun("it does not compute the same twice")
    except Exception as error:  # whatever a kernel raises
        return NotRun(f"running it: {shortened(f'{type(error).__name__}: {error}')}")
    return OutputDigest(seed=SEED, sizes=sizes, digest=digest)


def digest_of(done: LoadedPiece, trial: Trial) -> str:
    """Run a piece on the inputs of `trial` and return the digest. Raises what the piece raises."""
    with running(done, trial.device):
        inputs = trial.inputs()
        return trial.digest(inputs, list(done.run(*inputs)))


@contextlib.contextmanager
def running(done: LoadedPiece, device: torch.device) -> Iterator[None]:
    """Run a piece inside this block as in any process, with Triton's files in the piece's folders.

    The state of random number generators is restored at the end.
    """
    gpus = [device] if device.type == "cuda" else []
    with (
        inductor_cache_dir(done.folder, done.triton),
        no_compile_workers(),
        torch.random.fork_rng(gpus),
        torch.autocast(device.type, enabled=False),
        torch.no_grad(),
    ):
        yield


def _obstacle(trial: Trial, size: int | None) -> str | None:
    """Return why the piece cannot be run; None if it can."""
    foreign = find_process_local_function(trial.graph)
    if foreign is not None:
        return f"{foreign} may do more than compute"
    kind = trial.device.type
    if kind not in MAX_BYTES:
        return f"nothing is known of device {kind!r}"
    bound = MAX_BYTES[kind]
    if kind == "cuda":
        if not torch.cuda.is_available():
            return "there is no GPU here"
        if size is None:
            return "its kernels are measured when it first runs, and what is chosen decides how it rounds"
        bound = min(bound, torch.cuda.mem_get_info(trial.device)[0] // 4)
    if trial.num_bytes > bound:
        return f"a run takes {trial.num_bytes / 2**20:.0f} MiB; at most {bound / 2**20:.0f} MiB are used for one"
    return None


def _inputs_in(text: str, sizes: Mapping[str, int], examples: tuple[Any, ...], is_static: bool) -> list[Any]:
    """Return the example tensors, and for a dynamic piece the sizes, in the order of the piece's inputs."""
    tensors = iter(examples)
    found: list[Any] = []
    for op, _, *rest in json.loads(text)["nodes"]:
        if op != "placeholder":
            continue
        if "size" not in rest[0]:
            found.append(next(tensors))
        elif not is_static:
            size = rest[0]["size"]
            found.append(size if isinstance(size, int) else int(evaluate_size(size, sizes)))
    return found


def _results(graph: fx.GraphModule) -> list[Any]:
    """Return the nodes of the graph's results."""
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    results = output.args[0]
    return list(results) if isinstance(results, tuple | list) else [results]


def _is_uninitialized(node: Any) -> bool:
    """Return whether `node` is memory that another piece or a split op fills, or a view of it."""
    while isinstance(node, fx.Node) and str(node.target) in _VIEWS:
        node = node.args[0]
    name = str(getattr(node, "target", ""))
    return "empty" in name and isinstance(node, fx.Node) and node.op in ("call_function", "call_method")


def _made(example: torch.Tensor, below: int, generator: torch.Generator) -> torch.Tensor:
    """Return a random tensor like `example` with its own storage; integers are smaller than `below`."""
    length, dtype, device = _extent(example), example.dtype, example.device
    if dtype.is_floating_point or dtype.is_complex:
        is_narrow = dtype.is_floating_point and dtype.itemsize == 1
        values = torch.randn(length, generator=generator, device=device, dtype=torch.float32 if is_narrow else dtype)
        values = values.mul_(_SCALE).to(dtype)
    else:
        below = 2 if dtype == torch.bool else below
        values = torch.randint(0, below, (length,), generator=generator, device=device, dtype=dtype)
    return values.as_strided(
        [int(size) for size in example.shape],
        [int(stride) for stride in example.stride()],
        int(example.storage_offset()),
    )


def _extent(example: torch.Tensor) -> int:
    """Return the number of storage elements that a tensor needs."""
    if example.numel() == 0:
        return int(example.storage_offset())
    last = sum((int(size) - 1) * int(stride) for size, stride in zip(example.shape, example.stride(), strict=True))
    return int(example.storage_offset()) + last + 1
