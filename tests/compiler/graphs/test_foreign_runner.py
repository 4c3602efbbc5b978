"""docs/examples/foreign_runner.py, the promise to runners that are not ours: FULL and PIECEWISE over attention and
metadata piecegraph knows nothing of, bitwise what the pieces give without graphs.

Recorded where there is no GPU; the tests marked `gpu` run the same as CUDA graphs.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import piecegraph as pg
from docs.examples import foreign_runner
from docs.examples.foreign_runner import BLOCK_SIZE, CAPTURE_SIZES, NUM_LAYERS, Request, Runner, Scheduled

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PROMPTS = ([3, 1, 4, 1, 5], [9, 2, 6], [5], [3, 5, 8, 9, 7, 9, 3])


@pytest.fixture(params=DEVICES)
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    runner = Runner(device=request.param, compiler="eager")
    runner.capture()
    yield runner
    runner.close()


def requests() -> list[Request]:
    return [Request(list(prompt)) for prompt in PROMPTS]


def whole(request: Request) -> Scheduled:
    """All of its tokens that are not computed: a prompt, or one token of a decode."""
    return Scheduled(request, len(request.token_ids) - request.num_computed_tokens)


def contents(runner: Runner) -> list[torch.Tensor]:
    return [tensor.clone() for cache in runner.caches.values() for tensor in cache]


def put_back(runner: Runner, saved: list[torch.Tensor]) -> None:
    for tensor, before in zip((t for cache in runner.caches.values() for t in cache), saved, strict=True):
        tensor.copy_(before)


def checked_step(runner: Runner, scheduled: list[Scheduled]) -> pg.BatchDescriptor:
    """A step, after comparing every row and every cached key with the same pieces without graphs."""
    saved = contents(runner)
    logits, tokens, descriptor = runner.execute(scheduled, with_graphs=False)
    expected = [logits.clone(), tokens.clone(), *contents(runner)]
    put_back(runner, saved)
    logits, tokens, replayed = runner.execute(scheduled)
    assert replayed == descriptor
    for found, wanted in zip([logits, tokens, *contents(runner)], expected, strict=True):
        assert torch.equal(found, wanted), (descriptor, scheduled)
    put_back(runner, saved)
    runner.step(scheduled)
    return descriptor


def serve(runner: Runner) -> tuple[list[Request], list[pg.BatchDescriptor]]:
    """Prompts, mixed batches, decodes of changing size and length; one request leaves, another gets its blocks."""
    first, second, third, fourth = everyone = requests()
    seen = [
        checked_step(runner, [whole(first)]),
        checked_step(runner, [Scheduled(fourth, 4)]),  # a prompt in two chunks
        checked_step(runner, [whole(first), whole(second), whole(fourth)]),  # one decodes, two have prompts
    ]
    for _ in range(3):
        seen.append(checked_step(runner, [whole(second), whole(first), whole(fourth)]))
    runner.free_blocks += first.blocks
    seen.append(checked_step(runner, [whole(third), whole(second)]))
    assert set(third.blocks) <= set(first.blocks)
    for _ in range(5):
        seen.append(checked_step(runner, [whole(fourth), whole(third), whole(second)]))
    seen.append(checked_step(runner, [whole(second)]))
    return everyone, seen


def test_every_step_is_bitwise_the_pieces_without_graphs(runner: Runner) -> None:
    """Lengths, block tables and slots change from step to step; the graphs do not."""
    _, seen = serve(runner)
    assert runner.full.kind == runner.piecewise.kind == ("cuda" if runner.input_ids.is_cuda else "recorded")
    assert [(d.num_tokens, d.num_reqs) for d in seen] == [
        (8, None), (4, None), (8, None), (4, 4), (4, 4), (4, 4), (2, 2), *[(4, 4)] * 5, (1, 1)
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_pieces_give_the_same_bits(device: str) -> None:
    runner = Runner(device=device, compiler="inductor")
    runner.capture()
    serve(runner)
    runner.close()


def test_tokens_are_those_of_each_text_computed_at_once(runner: Runner) -> None:
    """No cache and no padding: one pass over the finished text, without graphs, predicts each next token."""
    everyone, _ = serve(runner)
    for request, prompt in zip(everyone, PROMPTS, strict=True):
        text = request.token_ids[: CAPTURE_SIZES[-1]]
        again = Request(text)
        fresh = Runner(device=str(runner.input_ids.device), compiler="eager")
        fresh.full, fresh.piecewise = runner.full, runner.piecewise  # execute reads their sizes
        _, tokens, _ = fresh.execute([Scheduled(again, len(text))], with_graphs=False)
        assert tokens[len(prompt) - 1 : len(text) - 1].tolist() == text[len(prompt) :]


def test_a_replay_is_one_graph_or_pieces_and_launches(runner: Runner) -> None:
    assert {str(runner.full.costs(d)) for d in runner.full.descriptors} == {"{'graph': 1}"}
    for descriptor in runner.piecewise.descriptors:
        assert runner.piecewise.costs(descriptor) == {"graph": NUM_LAYERS + 1, "launch": NUM_LAYERS}


def test_capturing_and_padding_write_no_kv_cache_slots(runner: Runner) -> None:
    """Only slots of the requests' own blocks are written."""
    assert all(not tensor.any() for tensor in contents(runner))
    everyone, _ = serve(runner)
    used = {block for request in everyone for block in request.blocks}
    assert 0 not in used
    for tensor in contents(runner):
        for block, written in enumerate(tensor.unflatten(0, (-1, BLOCK_SIZE)).flatten(1).any(1).tolist()):
            assert written == (block in used), block


def test_nothing_of_our_runner_is_imported() -> None:
    """The example as a user runs it."""
    code = (
        "import runpy, sys\n"
        f"runpy.run_path({str(foreign_runner.__file__)!r}, run_name='__main__')\n"
        "print([name for name in sys.modules if name.startswith(('piecegraph.runner', 'transformers'))])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *_, second, imported = done.stdout.splitlines()
    assert second.startswith("second: [6, 7, 8, ")
    assert imported == "[]"
