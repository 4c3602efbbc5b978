"""compile_sizes: static pieces run where every size fits exactly, dynamic ones everywhere else."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piecegraph as pg
from piecegraph.compiler.building.inductor_pieces import InductorPieceCompiler
from piecegraph.compiler.piece_compilers import compile_static as compile_static_module
from piecegraph.compiler.piece_compilers.forwards import Forwards
from piecegraph.compiler.workers.pool import CompileJob, CompilePool
from piecegraph.progress import Phase
from tests.compiler.toy import DIMS, SPLIT_OPS, Decoder, batch

SIZES = (1, 4)
NUM_UNIQUE = 4


def compiled_decoder(
    on_phase: Callable[[Phase], None] | None = None, **options: Any
) -> tuple[Decoder, pg.CompiledModel]:
    """A decoder and what it is compiled to, in this process unless `compile_workers` says otherwise."""
    model = Decoder(3)
    config = pg.CompileConfig(**{"split_ops": SPLIT_OPS, "passes": (), "compile_workers": 0, **options})
    return model, pg.compile(model, config, dynamic_dims=DIMS, example_inputs=batch(9, 2), on_phase=on_phase)


class Counted:
    """Counts which pieces a model runs: (unique piece, size or None)."""

    def __init__(self, model: pg.CompiledModel) -> None:
        self.ran: Counter[tuple[int, int | None]] = Counter()
        built: Any = model._compiled().built
        forwards: Forwards = built.forwards
        forwards._dynamic = tuple(self._counting(run, (u, None)) for u, run in enumerate(forwards._dynamic))
        forwards._static = {key: self._counting(run, key) for key, run in forwards._static.items()}
        forwards._loaded.clear()

    def _counting(self, run: Callable[..., Any], key: tuple[int, int | None]) -> Callable[..., Any]:
        def counted(*inputs: Any) -> Any:
            self.ran[key] += 1
            return run(*inputs)

        return counted

    def take(self) -> dict[int, int | None]:
        """The size that each unique piece ran at since the last call."""
        ran, self.ran = dict(self.ran), Counter()
        assert len({unique for unique, _ in ran}) == len(ran), "one kind of each piece ran"
        return dict(ran.keys())


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """float32 on CPU: Inductor may reorder sums, so a few ulps of the values' scale."""
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_any_size_is_right_and_runs_the_pieces_that_fit() -> None:
    """Static exactly where all the sizes a piece takes are one of compile_sizes; the last piece takes both."""
    model, static = compiled_decoder(compile_sizes=SIZES)
    _, dynamic = compiled_decoder()
    counted = Counted(static)
    for num_tokens in (1, 2, 3, 4, 5):
        for num_logits in (1, 2, 3, 4, 5):
            inputs = batch(num_tokens, num_logits, seed=num_tokens)
            result = static(*inputs)
            close(result, dynamic(*inputs))
            with torch.no_grad():
                close(result, model(*inputs))
            body = num_tokens if num_tokens in SIZES else None
            tail = body if num_logits == num_tokens else None
            assert counted.take() == {0: body, 1: body, 2: body, 3: tail}, (num_tokens, num_logits)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_captured_graphs_use_static_pieces(mode: str) -> None:
    _, static = compiled_decoder(compile_sizes=SIZES)
    counted = Counted(static)
    descriptors = [pg.BatchDescriptor(num_tokens=size) for size in (1, 3, 4)]
    graphs = static.capture(descriptors, lambda d: batch(d.num_tokens, d.num_tokens), mode=mode)
    counted.ran.clear()
    for descriptor in descriptors:
        inputs = batch(descriptor.num_tokens, descriptor.num_tokens, seed=5)
        replayed = graphs.replay(descriptor, *inputs).clone()
        size = descriptor.num_tokens if descriptor.num_tokens in SIZES else None
        assert counted.take() == dict.fromkeys(range(NUM_UNIQUE), size)
        assert torch.equal(replayed, static(*inputs))
        counted.take()


@pytest.mark.slow
def test_the_report_tells_sizes_and_seconds_apart() -> None:
    phases: list[Phase] = []
    _, model = compiled_decoder(phases.append, compile_sizes=(1, 4))
    report = model.report()
    assert report.static_sizes == (1, 4)
    assert [(row.size, row.unique) for row in report.static_pieces] == [
        (s, u) for s in (1, 4) for u in range(NUM_UNIQUE)
    ]
    assert all(row.is_used and row.kernels and not row.note for row in report.static_pieces)
    keys = {row.key for row in report.static_pieces} | {row.key for row in report.unique_pieces}
    assert len(keys) == 3 * NUM_UNIQUE
    assert report.static_compile_seconds > 0
    assert report.static_tune_seconds < report.static_compile_seconds
    assert "size 4: 4 of 4 pieces static" in str(report)
    assert report.as_dict()["static_pieces"][0]["size"] == 1
    names = list(dict.fromkeys(phase.name for phase in phases))
    assert names == ["trace", "passes", "split", "compile", "compile_sizes", "stitch", "store"]
    steps = [phase.done for phase in phases if phase.name == "compile_sizes" and phase.seconds is None]
    assert steps == list(range(2 * NUM_UNIQUE + 1))


def test_eager_pieces_take_compile_sizes_and_say_that_they_do_nothing() -> None:
    model, compiled = compiled_decoder(compiler="eager", compile_sizes=SIZES)
    inputs = batch(4, 4)
    with torch.no_grad():
        assert torch.equal(compiled(*inputs), model(*inputs))
    report = compiled.report()
    assert report.static_sizes == ()
    assert {row.note for row in report.static_pieces} == {"compile_sizes has no effect with compiler='eager'"}


@pytest.mark.slow
def test_a_static_compile_that_fails_leaves_the_dynamic_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, in another, and when the other dies: the reason is in the report, and size 4 is served."""
    line = CompileJob.line

    def broken(self: CompileJob) -> str:
        if self.sizes is None or set(self.sizes.values()) != {4}:
            return line(self)
        return line(self).replace(str(self.artifact), "/nonexistent/artifact") if self.index % 2 else "not json\n"

    monkeypatch.setattr(CompileJob, "line", broken)
    model, compiled = compiled_decoder(compile_sizes=SIZES, compile_workers=2, cache=False)
    counted = Counted(compiled)
    report = compiled.report()
    assert report.static_sizes == (1,)
    notes = [row.note for row in report.static_pieces if row.size == 4]
    assert len(notes) == NUM_UNIQUE
    assert sum("the compile process ended with status 1" in note for note in notes) == NUM_UNIQUE // 2
    assert sum("nonexistent" in note for note in notes) == NUM_UNIQUE // 2
    assert not any(row.is_used for row in report.static_pieces if row.size == 4)
    assert "size 4: 0 of 4 pieces static" in str(report)
    for size, ran in ((1, 1), (4, None)):
        inputs = batch(size, size)
        with torch.no_grad():
            close(compiled(*inputs), model(*inputs))
        assert counted.take() == dict.fromkeys(range(NUM_UNIQUE), ran)


@pytest.mark.slow
def test_pieces_are_tuned_by_a_first_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens on a GPU, on inputs as those of a call; a piece whose first run fails stays dynamic."""
    ran: list[Sequence[Any]] = []

    def tune(self: InductorPieceCompiler, run: Callable[..., Any], inputs: Sequence[Any]) -> None:
        ran.append(inputs)
        if len(ran) == 2:
            raise RuntimeError("no memory")
        run(*inputs)

    monkeypatch.setattr(compile_static_module, "needs_tuning", lambda piece: True)
    monkeypatch.setattr(InductorPieceCompiler, "tune", tune)
    phases: list[Phase] = []
    model, compiled = compiled_decoder(phases.append, compile_sizes=(4,), cache=False)
    embed = model.embed.weight
    assert any(value is embed for value in ran[0])
    assert all(value.shape[0] == 4 for inputs in ran for value in inputs if value.dtype == torch.int64)
    report = compiled.report()
    assert [row.is_used for row in report.static_pieces] == [True, False, True, True]
    assert report.static_pieces[1].note == "its first run failed: RuntimeError: no memory"
    assert [p.done for p in phases if p.name == "tune_sizes"] == [0, 1, 2, 3, 4]
    inputs = batch(4, 4)
    with torch.no_grad():
        close(compiled(*inputs), model(*inputs))


@pytest.mark.slow
@pytest.mark.parametrize(("options", "at_once"), [({"max_autotune_gemm": True}, 1), ({}, None)])
def test_measuring_while_compiling_is_done_one_at_a_time(
    options: dict[str, Any], at_once: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[int | None] = []
    submit = CompilePool.submit

    def spied(self: CompilePool, jobs: Sequence[CompileJob], *, at_once: int | None = None) -> None:
        submitted.append(at_once)
        submit(self, jobs, at_once=at_once)

    monkeypatch.setattr(CompilePool, "submit", spied)
    compiled_decoder(compile_sizes=(4,), compile_workers=2, compile_sizes_options=options, cache=False)
    assert submitted[-2:] == [None, at_once]


@pytest.mark.slow
def test_options_of_static_sizes_are_theirs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On top of inductor_options; unknown ones are refused before anything compiles."""
    seen: list[Mapping[str, Any]] = []
    line = CompileJob.line

    def spied(self: CompileJob) -> str:
        seen.append(self.options)
        return line(self)

    monkeypatch.setattr(CompileJob, "line", spied)
    compiled_decoder(
        compile_sizes=(4,),
        compile_workers=2,
        inductor_options={"epilogue_fusion": False},
        compile_sizes_options={"max_autotune_pointwise": True},
        cache=False,
    )
    static = [options for options in seen if "max_autotune_pointwise" in options]
    assert len(seen) == 2 * len(static) == 2 * NUM_UNIQUE
    assert all(options["epilogue_fusion"] is False for options in seen)
    with pytest.raises(pg.errors.ConfigError, match="compile_sizes_options has 'max_autotun'.*Did you mean"):
        compiled_decoder(compile_sizes=(4,), compile_sizes_options={"max_autotun": True})


def test_sizes_no_call_can_have_are_refused_with_a_reason() -> None:
    class Halves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._check(x.shape[0] >= 3)
            return x.cumsum(0)

    config = pg.CompileConfig(compile_sizes=(2, 4), compile_workers=0)
    compiled = pg.compile(Halves(), config, dynamic_dims={"x": 0}, example_inputs=(torch.ones(8),))
    report = compiled.report()
    assert report.static_sizes == (4,)
    (refused,) = (row for row in report.static_pieces if not row.is_used)
    assert refused.size == 2
    assert "num_tokens" in refused.note
    assert compiled(torch.ones(4)).tolist() == [1, 2, 3, 4]


def test_a_model_without_sizes_has_nothing_static_to_add() -> None:
    config = pg.CompileConfig(compile_sizes=(1,), compile_workers=0)
    compiled = pg.compile(nn.Linear(4, 4), config, example_inputs=(torch.ones(3, 4),))
    assert compiled.report().static_pieces == ()


@pytest.mark.slow
def test_by_name_uses_static_pieces_too() -> None:
    """`torch.compile(backend="piecegraph")` tells sizes as arguments of the graph."""
    torch._dynamo.reset()
    model = Decoder().requires_grad_(False)
    options: Any = {"split_ops": list(SPLIT_OPS), "compile_sizes": [2, 4], "passes": (), "compile_workers": 0}
    compiled = torch.compile(model, backend="piecegraph", fullgraph=True, dynamic=True, options=options)
    close(compiled(*batch(9, 3)), model(*batch(9, 3)))
    (graph,) = pg.compiled_models(compiled)
    assert graph.report().static_sizes == (2, 4)
    ran: Counter[tuple[int, int | None]] = Counter()
    forwards = graph._built.forwards

    def counting(run: Callable[..., Any], key: tuple[int, int]) -> Callable[..., Any]:
        def counted(*inputs: Any) -> Any:
            ran[key] += 1
            return run(*inputs)

        return counted

    forwards._static = {key: counting(run, key) for key, run in forwards._static.items()}
    for num_tokens, num_logits, static in ((4, 4, 5), (4, 2, 4), (4, 3, 4), (3, 3, 0), (2, 2, 5)):
        ran.clear()
        inputs = batch(num_tokens, num_logits)
        close(compiled(*inputs), model(*inputs))
        assert sum(ran.values()) == static, (num_tokens, num_logits, ran)


@pytest.mark.slow
def test_the_cache_folder_is_the_only_place_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", str(tmp_path))
    _, compiled = compiled_decoder(compile_sizes=(1,))
    assert compiled.report().static_sizes == (1,)
    assert {path.name for path in tmp_path.iterdir()} == {"v1"}


class Projects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(1024, 4096, bias=False)
        self.down = nn.Linear(4096, 1024, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(self.up(x).softmax(-1))
        return result


def measurements_of_a_start() -> tuple[tuple[int, ...], int, int, list[torch.Tensor]]:
    """(static sizes in use, kernels measured, kernels of Inductor's assembled in this process, outputs for 1, 2 and 3
    tokens) of a compile on the GPU."""
    from triton.backends.nvidia.compiler import CUDABackend

    assembled = 0
    make_cubin = CUDABackend.make_cubin

    def counted(self: Any, src: Any, metadata: dict[str, Any], *options: Any) -> Any:
        nonlocal assembled
        assembled += metadata["name"].startswith("triton_")
        return make_cubin(self, src, metadata, *options)

    CUDABackend.make_cubin = counted
    model = Projects().to("cuda", torch.bfloat16)
    config = pg.CompileConfig(compile_sizes=(1, 2))
    example = torch.ones(8, 1024, device="cuda", dtype=torch.bfloat16)
    compiled = pg.compile(model, config, dynamic_dims={"x": 0}, example_inputs=(example,))
    measured = torch._dynamo.utils.counters["inductor"]["coordesc_tuning_bench"]
    outputs = []
    for num_tokens in (1, 2, 3):
        torch.manual_seed(num_tokens)
        x = torch.randn(num_tokens, 1024, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            outputs.append(compiled(x).cpu())
            torch.testing.assert_close(outputs[-1], model(x).cpu(), rtol=2e-2, atol=2e-2)  # bfloat16, another order
    return compiled.report().static_sizes, measured, assembled, outputs


@pytest.mark.gpu
def test_on_a_gpu_one_token_is_tuned_once_and_found_tuned_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one process measured, the next one finds, with the kernels it chose, and computes the same to the bit.

    A second compile in the process that measured is no such case: torch keeps its kernels there as they
    were before they were measured.
    """
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", str(tmp_path))
    starts = []
    for _ in range(2):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            starts.append(process.submit(measurements_of_a_start).result())
    (sizes, measured, assembled, outputs), (sizes_later, measured_later, assembled_later, outputs_later) = starts
    assert sizes == sizes_later == (1, 2)
    assert measured > 0 and assembled > 0
    assert measured_later == 0 and assembled_later == 0
    assert all(map(torch.equal, outputs, outputs_later))
