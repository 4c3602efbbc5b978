"""A start that serves while pieces compile and graphs are captured: the tokens are the same before, between and after.

Also tests `cudagraphs/late_dispatcher.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from piecegraph import LLM, SamplingParams
from piecegraph.cache.store.store import Loaded
from piecegraph.compiler import load_or_compile
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.compiler.store.cache_choice import open_store
from piecegraph.compiler.workers.process import CompileProcess
from piecegraph.config import CompileConfig
from piecegraph.errors import CaptureError, CompileError, ConfigError
from piecegraph.runner.cudagraphs.manager import CudaGraphManager
from piecegraph.runner.engine.metrics import Counter
from tests.compiler.later_compiler import LaterCompiler
from tests.runner.tiny_models import llama_config, random_model, save

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
PROMPTS: list[Any] = [{"prompt_token_ids": [7 + length] * length} for length in (1, 5, 12)]
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "device": "cpu",
    "num_kv_blocks": 16,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "cudagraph_capture_sizes": (1, 2, 4, 16),
    "graph_kind": "recorded",
    "attention_backend": "triton",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(llama_config(vocab_size=64)), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    with LLM(folder, compiler="eager", **OPTIONS) as llm:
        return answers(llm)


def answers(llm: LLM) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@contextmanager
def started_fast(folder: Path, compiler: LaterCompiler, **options: Any) -> Iterator[LLM]:
    """An `LLM` whose pieces are compiled when the test says so."""
    with (
        patch.object(load_or_compile, "inductor_compiler", lambda *arguments, **more: compiler),
        LLM(folder, start="fast", compilation_config={"cache": False}, **{**OPTIONS, **options}) as llm,
    ):
        yield llm


def release_and_wait(llm: LLM, compiler: LaterCompiler) -> None:
    """Let a piece become ready, and wait until the engine may take it."""
    assert llm._loaded is not None and llm._loaded.start is not None
    compiler.release()
    assert llm._loaded.start._background.wait(60)


@pytest.mark.parametrize("seed", [0, 1])
def test_greedy_tokens_are_equal_whenever_a_piece_is_swapped_in(
    folder: Path, expected: list[list[int]], seed: int
) -> None:
    """The steps before which pieces arrive are drawn at random; graphs are captured in the steps after the last."""
    draw = random.Random(seed)
    compiler = LaterCompiler()
    with started_fast(folder, compiler) as llm:
        assert str(llm.start_progress) == "compiling 0 of 3"
        for number, prompt in enumerate(PROMPTS):
            llm.engine.add_request(str(number), prompt["prompt_token_ids"], GREEDY)
        found: dict[str, list[int]] = {}
        for step in range(64):
            if not llm.engine.has_unfinished:
                break
            if step and draw.random() < 0.5 and str(llm.start_progress).startswith("compiling"):
                release_and_wait(llm, compiler)
            for output in llm.engine.step():
                found[output.request_id] = list(output.outputs[0].token_ids)
        assert [found[str(number)] for number in range(len(PROMPTS))] == expected
        assert compiler.calls and all(compiler.calls.values())
        compiler.release(3)
        llm.finish_start()
        assert str(llm.start_progress) == "full speed"
        assert answers(llm) == expected


def test_the_graphs_in_use_are_captured_first_and_the_rest_in_idle_moments(
    folder: Path, expected: list[list[int]]
) -> None:
    compiler = LaterCompiler()
    with started_fast(folder, compiler) as llm:
        assert answers(llm) == expected
        assert llm.runner.counters.by_mode().keys() == {CUDAGraphMode.NONE}
        (reason,) = {row.reason for row in llm.runner.counters.rows() if row.num_tokens == 3}
        assert reason == "start='fast' has not captured FULL for 4 tokens yet"
        compiler.release(3)
        assert llm.use_idle_moment() is not None
        while str(llm.start_progress).startswith("compiling"):
            llm.use_idle_moment()
        assert llm.runner.graphs.graphs == {}
        assert answers(llm) == expected
        in_use = {(mode, one.num_tokens) for mode in CUDAGraphMode for one in llm.runner.graphs.descriptors(mode)}
        assert (CUDAGraphMode.FULL, 4) in in_use
        assert (CUDAGraphMode.PIECEWISE, 2) not in in_use
        assert str(llm.start_progress) == f"capturing {len(in_use)} of 7"
        assert llm.runner.counters.by_mode()[CUDAGraphMode.FULL] > 0
        while llm.use_idle_moment() is not None:
            pass
        assert str(llm.start_progress) == "full speed"
        assert len(llm.runner.graphs.descriptors(CUDAGraphMode.PIECEWISE)) == 4
        assert answers(llm) == expected
        assert llm.runner.graphs.ready
        with pytest.raises(CaptureError, match="during the start only"):
            llm.runner.graphs.capture_more(CUDAGraphMode.FULL, ())


def test_a_failed_compile_or_capture_is_a_note_and_a_counter(folder: Path, expected: list[list[int]]) -> None:
    def refuse(*arguments: Any) -> Any:
        raise RuntimeError("no room")

    compiler = LaterCompiler(fails_at=1)
    compiler.release(3)
    with started_fast(folder, compiler) as llm, patch.object(CudaGraphManager, "_piecewise_inputs", refuse):
        llm.finish_start()
        assert answers(llm) == expected
        notes = [note for note in llm.notes if note.startswith("start: ")]
        assert notes[0] == "start: pieces run as their graphs: RuntimeError: the compiler is broken"
        assert notes[1].startswith("start: PIECEWISE for 16 tokens was not captured: RuntimeError: no room")
        (counter,) = [one for one in llm.get_metrics() if one.name == "piecegraph:start_failures"]
        assert isinstance(counter, Counter) and counter.value == len(notes) == 5
        assert str(llm.start_progress) == "full speed"


def test_strict_makes_a_failed_compile_an_error_of_every_step(folder: Path) -> None:
    compiler = LaterCompiler(fails_at=0)
    with started_fast(folder, compiler, strict=True) as llm:
        assert len(answers(llm)) == 3, "before it fails"
        release_and_wait(llm, compiler)
        for _ in range(2):
            with pytest.raises(CompileError, match="the compiler is broken"):
                answers(llm)


def test_strict_makes_a_failed_capture_an_error(folder: Path) -> None:
    def refuse(*arguments: Any) -> Any:
        raise RuntimeError("no room")

    compiler = LaterCompiler()
    compiler.release(3)
    with started_fast(folder, compiler, strict=True) as llm:
        with patch.object(CudaGraphManager, "_piecewise_inputs", refuse), pytest.raises(CaptureError, match="no room"):
            llm.finish_start()
        assert str(llm.start_progress) != "full speed"


def test_what_cannot_start_fast_starts_full_with_a_note(folder: Path, expected: list[list[int]]) -> None:
    with pytest.raises(ConfigError, match="start='quick' is unknown"):
        LLM(folder, start="quick", **OPTIONS)
    speculative = {"method": "ngram", "num_speculative_tokens": 2}
    with LLM(folder, start="fast", compiler="eager", speculative_config=speculative, **OPTIONS) as llm:
        assert str(llm.start_progress) == "full speed"
        assert any(note.startswith("start='fast' is not available with speculative_config") for note in llm.notes)
        assert answers(llm) == expected


@pytest.mark.slow
def test_eager_pieces_are_at_full_speed_once_graphs_are_captured(folder: Path, expected: list[list[int]]) -> None:
    """There is nothing to compile, and the first token need not wait for the captures."""
    with LLM(folder, start="fast", compiler="eager", **OPTIONS) as llm:
        assert str(llm.start_progress) != "full speed"
        assert answers(llm) == expected
        llm.finish_start()
        assert answers(llm) == expected


def test_closing_during_the_start_leaves_no_process_and_no_half_entry(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PIECEGRAPH_CACHE", "on")
    processes: list[CompileProcess] = []
    start = CompileProcess.start

    def remembered(*arguments: Any) -> CompileProcess:
        processes.append(start(*arguments))
        return processes[-1]

    with patch.object(CompileProcess, "start", remembered):
        llm = LLM(folder, start="fast", compile_workers=2, **OPTIONS)
        assert processes and all(each.process.poll() is None for each in processes)
        assert len(answers(llm)) == 3
        llm.close()
    assert all(each.process.poll() is not None for each in processes)
    store = open_store(CompileConfig(cache_dir=str(tmp_path)))
    assert all(isinstance(store.load(row.key), Loaded) for row in store.list())
    assert not list(store.layout.locks.glob("*"))


@pytest.mark.slow
def test_pieces_of_inductor_give_the_tokens_of_eager_ones_whenever_they_arrive(
    folder: Path, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pieces are in the cache, and the plan is not, so a start takes them one after the other."""
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PIECEGRAPH_CACHE", "on")
    with LLM(folder, start="full", **OPTIONS) as llm:
        key = llm.compiled.report().cache.key
    for seed in range(3):
        draw = random.Random(seed)
        open_store(CompileConfig(cache_dir=str(tmp_path))).delete(key)
        with LLM(folder, start="fast", **OPTIONS) as llm:
            assert llm._loaded is not None and llm._loaded.start is not None
            background = llm._loaded.start._background
            swap, most = background.swap, [0]

            def gated(swap: Any = swap, most: list[int] = most) -> int:
                taken = swap(most=most[0])
                most[0] = 0
                return int(taken)

            monkeypatch.setattr(background, "swap", gated)
            for number, prompt in enumerate(PROMPTS):
                llm.engine.add_request(str(number), prompt["prompt_token_ids"], GREEDY)
            found: dict[str, list[int]] = {}
            while llm.engine.has_unfinished:
                if draw.random() < 0.5 and not background.is_finished:
                    assert background.wait(120)
                    most[0] = 1
                for output in llm.engine.step():
                    found[output.request_id] = list(output.outputs[0].token_ids)
            assert [found[str(number)] for number in range(len(PROMPTS))] == expected
            monkeypatch.setattr(background, "swap", swap)
            llm.finish_start()
            assert answers(llm) == expected
            assert llm.compiled.report().cache.loaded_pieces == 3
    with LLM(folder, start="fast", **OPTIONS) as llm:
        assert llm.compiled.report().cache.state == "hit"
