"""The runner over graphs: every mode gives the same tokens, a replay is bitwise what the pieces give, and
padding touches nothing. Here by graphs that are recorded; the `gpu` tests run the same with CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from piecegraph import LLM, SamplingParams
from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.errors import CaptureError, ConfigError
from piecegraph.runner.cudagraphs.dispatcher import Dispatched
from piecegraph.runner.engine.model_runner import ModelRunner
from piecegraph.runner.step.batch import Batch
from tests.runner.margin_rule import assert_same_tokens

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
SIZES = [1, 2, 4, 8, 16]
PROMPTS = [[5, 6, 7], [9, 10, 11, 12, 13, 14, 15], [20], [31, 32, 33, 34, 35]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def load(folder: Path, **options: Any) -> LLM:
    kind = "cuda" if options.get("device") == "cuda" else "recorded"
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "compiler": "eager",
        "attention_backend": "triton",
        "graph_kind": kind,
        "cudagraph_capture_sizes": SIZES,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "num_kv_blocks": 32,
        "skip_tokenizer_init": True,
    }
    return LLM(folder, **{**defaults, **options})


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def graphed(request: pytest.FixtureRequest, llama_dir: Path) -> Iterator[LLM]:
    with load(llama_dir, device=request.param) as llm:
        yield llm


def generate(llm: LLM, at_most: CUDAGraphMode, num_rounds: int = 1) -> list[list[int]]:
    """Return greedy tokens of `num_rounds` times `PROMPTS`, with no mode above `at_most`."""
    runner = llm.runner
    execute = runner.execute_model
    try:
        runner.execute_model = lambda step: execute(step, at_most=at_most)  # type: ignore[method-assign, assignment, misc]
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS * num_rounds]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    finally:
        runner.execute_model = execute  # type: ignore[method-assign]
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_every_mode_gives_the_same_tokens(graphed: LLM, llama: PreTrainedModel) -> None:
    """FULL, PIECEWISE and NONE, and each really ran."""
    counters = graphed.runner.counters
    before = counters.by_mode()
    tokens = {mode: generate(graphed, mode) for mode in (FULL, PIECEWISE, NONE)}
    ran = {mode: count - before.get(mode, 0) for mode, count in counters.by_mode().items()}
    assert all(ran[mode] > 0 for mode in (FULL, PIECEWISE, NONE)), ran
    assert tokens[FULL] == tokens[PIECEWISE] == tokens[NONE]
    for prompt, ours in zip(PROMPTS, tokens[FULL], strict=True):
        assert_same_tokens(llama, prompt, ours)


def decoding(llm: LLM, num_reqs: int) -> tuple[ModelRunner, Batch]:
    """`num_reqs` requests whose prompts are computed, about to decode."""
    engine = llm.engine
    for i in range(num_reqs):
        engine.add_request(f"r{i}", PROMPTS[i % len(PROMPTS)], GREEDY)
    while any(not request.output_token_ids for request in engine.requests.values()):
        engine.step()
    engine.step()
    ids = tuple(f"r{i}" for i in range(num_reqs))
    states = llm.runner.step.states
    for request_id in ids:  # the last token once more: it has a block
        states.num_computed_tokens[states.row(request_id)] -= 1
    return llm.runner, Batch(request_ids=ids, query_lens=(1,) * num_reqs, num_decode_reqs=num_reqs)


def snapshot(runner: ModelRunner) -> list[torch.Tensor]:
    """The requests' states."""
    return [runner.step.states.token_ids.clone(), runner.step.states.num_computed_tokens.clone()]


def restore(runner: ModelRunner, saved: list[torch.Tensor]) -> None:
    runner.step.states.token_ids.copy_(saved[0])
    runner.step.states.num_computed_tokens.copy_(saved[1])


def caches(runner: ModelRunner) -> list[torch.Tensor]:
    """Return copies as bytes, because memory that was never written may hold NaN."""
    return [tensor.clone() for tensor in _cache_tensors(runner)]


@torch.no_grad()
def without_graphs(runner: ModelRunner, batch: Batch, descriptor: BatchDescriptor) -> torch.Tensor:
    """Logits by the same pieces at the same padded shape."""
    step = runner.step
    step.buffers.fill([step.states.row(request_id) for request_id in batch.request_ids], batch.query_lens)
    num_reqs = descriptor.num_reqs or step.num_logits(descriptor.num_tokens)
    step.prepare(descriptor.num_tokens, num_reqs)
    common = step.buffers.metadata(
        num_tokens=descriptor.num_tokens,
        num_reqs=num_reqs if descriptor.num_reqs else batch.num_reqs,
        max_query_len=1,
        num_decode_reqs=num_reqs if descriptor.num_reqs else batch.num_reqs,
    )
    return step.run_uncaptured(step.metadata_builder.build(common), num_reqs)


@pytest.mark.parametrize("mode", [FULL, PIECEWISE], ids=["FULL", "PIECEWISE"])
@torch.no_grad()
def test_a_replay_is_bitwise_the_pieces_for_every_size(graphed: LLM, mode: CUDAGraphMode) -> None:
    """Rung L1 of the exactness ladder, with as many requests as fit and with padding."""
    for num_reqs in (1, 3, 6):
        runner, batch = decoding(graphed, num_reqs)
        saved = snapshot(runner)
        for descriptor in runner.graphs.descriptors(mode):
            if descriptor.num_tokens < num_reqs:
                continue
            expected = without_graphs(runner, batch, descriptor)[:num_reqs].clone()
            restore(runner, saved)
            found = runner.run(batch, Dispatched(mode, descriptor, None)).logits[:num_reqs].clone()
            restore(runner, saved)
            assert torch.equal(found, expected), (num_reqs, descriptor)
        for i in range(num_reqs):
            graphed.engine.abort(f"r{i}")


@torch.no_grad()
def test_poisoned_buffers_change_nothing(graphed: LLM) -> None:
    """Rule 7 of DESIGN section 4: whatever the fixed buffers and unused cache hold, real rows' logits, tokens
    and cached keys are the same to the bit, and padding wrote nothing."""
    num_reqs = 3
    runner, batch = decoding(graphed, num_reqs)
    saved, kept = snapshot(runner), caches(runner)
    for mode in (FULL, PIECEWISE):
        for descriptor in runner.graphs.descriptors(mode):
            if descriptor.num_tokens < num_reqs:
                continue
            results = []
            for is_poisoned in (False, True):
                restore(runner, saved)
                for now, before in zip(_cache_tensors(runner), kept, strict=True):
                    now.copy_(before)
                if is_poisoned:
                    runner.step.buffers.poison()
                output = runner.run(batch, Dispatched(mode, descriptor, None))
                results.append([output.logits[:num_reqs].clone(), *snapshot(runner), *caches(runner)])
            for clean, poisoned in zip(*results, strict=True):
                assert torch.equal(clean, poisoned), descriptor
            buffers = runner.step.buffers
            assert (buffers.slot_mapping[:, num_reqs : descriptor.num_tokens] == -1).all()
            assert (buffers.block_table[:, num_reqs:] == 0x7F7F7F7F).all()
    restore(runner, saved)
    for i in range(num_reqs):
        graphed.engine.abort(f"r{i}")


def _cache_tensors(runner: ModelRunner) -> list[torch.Tensor]:
    return [tensor.view(torch.uint8) for cache in runner.step.kv_caches.values() for tensor in (cache.key, cache.value)]


@torch.no_grad()
def test_one_bucket_serves_batches_of_every_kind(graphed: LLM) -> None:
    """Decodes alone, with a prompt's chunk beside them, and chunks alone: in turns through the same PIECEWISE
    graph, whose attention is launched anew, or changed, for each. Bitwise the pieces at the same padded shape."""
    runner, decode = decoding(graphed, 3)
    saved = snapshot(runner)
    ids = decode.request_ids
    kinds = [
        (Batch(request_ids=ids, query_lens=(1, 1, 1), num_decode_reqs=3), ()),
        (Batch(request_ids=ids, query_lens=(1, 1, 2), num_decode_reqs=2), (2,)),
        (Batch(request_ids=ids[1:], query_lens=(2, 2), num_decode_reqs=0), (1, 2)),
        (Batch(request_ids=ids[:1], query_lens=(1,), num_decode_reqs=1), ()),
        (Batch(request_ids=ids, query_lens=(1, 2, 2), num_decode_reqs=1), (1, 2)),
    ]
    descriptor = next(d for d in runner.graphs.descriptors(PIECEWISE) if d.num_tokens >= 5)
    step = runner.step
    for batch, chunks in [*kinds, *reversed(kinds)]:
        logits = []
        for is_graph in (False, True):
            restore(runner, saved)
            for number in chunks:  # the token before once more
                step.states.num_computed_tokens[step.states.row(ids[number])] -= 1
            if is_graph:
                output = runner.run(batch, Dispatched(PIECEWISE, descriptor, None))
                logits.append(output.logits[: batch.num_reqs].clone())
            else:
                step.buffers.fill([step.states.row(request_id) for request_id in batch.request_ids], batch.query_lens)
                num_logits = step.num_logits(descriptor.num_tokens)
                step.prepare(descriptor.num_tokens, num_logits)
                common = step.buffers.metadata(
                    num_tokens=descriptor.num_tokens,
                    num_reqs=batch.num_reqs,
                    max_query_len=batch.max_query_len,
                    num_decode_reqs=batch.num_decode_reqs,
                )
                made = step.run_uncaptured(step.metadata_builder.build(common), num_logits)
                logits.append(made[: batch.num_reqs].clone())
        assert torch.equal(*logits), batch
    restore(runner, saved)
    for request_id in ids:
        graphed.engine.abort(request_id)


def test_nothing_is_captured_once_ready(graphed: LLM) -> None:
    assert graphed.runner.graphs.ready
    with pytest.raises(CaptureError, match="graphs are captured once, at start"):
        graphed.runner.graphs.capture(full=(), piecewise=())


def test_random_rows_beside_greedy_ones(graphed: LLM, llama: PreTrainedModel) -> None:
    """A sampler outside the graph replaces the token the graph recorded, for its rows only."""
    params = [GREEDY, SamplingParams(temperature=0.8, seed=3, max_tokens=8, ignore_eos=True), GREEDY]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:3]]
    together = [o.outputs[0].token_ids for o in graphed.generate(prompts, params, use_tqdm=False)]
    alone = [o.outputs[0].token_ids for o in graphed.generate(prompts[1:2], params[1:2], use_tqdm=False)]
    assert list(together[1]) == list(alone[0])
    for i in (0, 2):
        assert_same_tokens(llama, PROMPTS[i], together[i])


def test_above_the_largest_size_runs_without_graphs_and_says_so(llama_dir: Path) -> None:
    with load(llama_dir, cudagraph_capture_sizes=[1, 2]) as llm:
        generate(llm, FULL)
        reasons = [row.reason for row in llm.runner.counters.rows() if row.mode is NONE]
        assert reasons and all(reason and "above the largest captured size 2" in reason for reason in reasons)


def test_a_bucket_that_cannot_be_captured_becomes_none(llama_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its capture fails; the process serves on, and the reason is counted. Strict refuses to start."""
    from piecegraph.runner.cudagraphs.manager import CudaGraphManager

    inputs = CudaGraphManager._piecewise_inputs

    def fail_at_8(self: CudaGraphManager, descriptor: BatchDescriptor) -> Any:
        if descriptor.num_tokens == 8:
            raise torch.OutOfMemoryError("no memory left")
        return inputs(self, descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaGraphManager, "_piecewise_inputs", fail_at_8)
        with load(llama_dir, cudagraph_mode="PIECEWISE") as llm:
            assert sorted(d.num_tokens for d in llm.runner.graphs.descriptors(PIECEWISE)) == [1, 2, 4, 16]
            generate(llm, FULL)
        assert "runs without graphs: its capture failed" in caplog.text
        with pytest.raises(Exception, match="no memory left"):
            load(llama_dir, cudagraph_mode="PIECEWISE", strict=True)


def test_strict_refuses_a_mode_the_backend_cannot_do(llama_dir: Path) -> None:
    """sdpa plans its calls on the host: never inside a full graph."""
    with pytest.raises(ConfigError, match="sdpa"):
        load(llama_dir, attention_backend="sdpa", strict=True)
    with load(llama_dir, attention_backend="sdpa") as llm:
        assert any("sdpa" in note and note.startswith("cudagraph_mode") for note in llm.notes)
        assert llm.runner.graphs.descriptors(FULL) == ()
        tokens = generate(llm, FULL)
        assert set(llm.runner.counters.by_mode()) == {PIECEWISE}
        assert tokens == generate(llm, NONE)


def test_full_for_mixed_batches_too(llama_dir: Path, llama: PreTrainedModel) -> None:
    with load(llama_dir, cudagraph_mode="FULL") as llm:
        for prompt, ours in zip(PROMPTS, generate(llm, FULL), strict=True):
            assert_same_tokens(llama, prompt, ours)
        assert set(llm.runner.counters.by_mode()) == {FULL}


def test_close_frees_the_graphs(llama_dir: Path) -> None:
    llm = load(llama_dir)
    graphs = llm.runner.graphs
    llm.close()
    assert graphs.descriptors(FULL) == () and not graphs.ready


@pytest.mark.parametrize("mode", [FULL, PIECEWISE], ids=["FULL", "PIECEWISE"])
def test_memory_that_moved_is_named_before_it_is_read(llama_dir: Path, mode: CUDAGraphMode) -> None:
    """Rule 6 of DESIGN section 4, in the runner: parameters, cache, states and buffers."""
    with load(llama_dir, cudagraph_mode=mode.value) as llm:
        graphs = llm.runner.graphs.graphs[mode]
        descriptor = graphs.descriptors[-1]
        watched = {place.name: place.tensor for place in graphs[descriptor].addresses}
        cache = next(name for name in watched if name.startswith("key cache of "))
        weight = next(name for name in watched if "lm_head" in name)
        for name in (cache, weight, "requests' token_ids", "input buffer seq_lens"):
            assert name in watched
        tensor = watched[cache]
        kept, tensor.data = tensor.data, tensor.data.clone()
        with pytest.raises(CaptureError, match="key cache of .* moved after the graph was captured"):
            graphs.replay(descriptor)
        tensor.data = kept


def test_a_size_no_batch_can_fill_is_captured_all_the_same(llama_dir: Path) -> None:
    """A request has at most 32 tokens, so the rest of a bucket of 64 is padding."""
    sizes = {"cudagraph_capture_sizes": [1, 64], "max_num_seqs": 1, "max_num_batched_tokens": 64, "max_model_len": 32}
    with load(llama_dir, **sizes) as llm:
        assert llm.runner.graphs.failed() == {}
        assert [d.num_tokens for d in llm.runner.graphs.descriptors(PIECEWISE)] == [64, 1]


def test_a_note_says_that_static_sizes_have_no_effect(llama_dir: Path) -> None:
    with load(llama_dir, compile_sizes=[1], cudagraph_mode="NONE") as llm:
        assert "compile_sizes: eager pieces are not compiled, so no size is static" in llm.notes
