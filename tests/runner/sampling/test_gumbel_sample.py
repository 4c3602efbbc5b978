"""The kernel draws what its reference draws: the reference's draws are tested with the sampler."""

from __future__ import annotations

from typing import TypedDict

import pytest
import torch

from piecegraph.runner.sampling.gumbel_sample import gumbel_sample, gumbel_sample_reference
from tests.compiled_for_gpu import compile_for_gpu
from tests.interpreter import interpreted

NAN, INF = float("nan"), float("inf")


class State(TypedDict):
    temperature: torch.Tensor
    seeds: torch.Tensor


def state(num_rows: int, device: str = "cpu") -> State:
    """Every third row is greedy."""
    temperature = torch.tensor([0.0, 0.7, 1.3]).repeat(num_rows)[:num_rows]
    seeds = torch.arange(num_rows) * (2**40 + 12345) + 2**33
    return {"temperature": temperature.to(device), "seeds": seeds.to(device)}


def awkward_logits() -> torch.Tensor:
    """Rows with ties, infinities and NaNs; 300 tokens are three blocks of 128."""
    logits = torch.randn(9, 300, generator=torch.Generator().manual_seed(0))
    logits[0] = logits[0].round()  # greedy, with ties across blocks
    logits[1, :290] = -INF  # only the last block has tokens
    logits[3, 7] = NAN
    logits[4, ::2] = NAN
    logits[5] = -INF
    logits[6] = NAN
    logits[7] = 0.0
    return logits


def check_kernel(device: str = "cpu") -> None:
    from piecegraph.runner.sampling.kernels.gumbel_sample import gumbel_sample_on_gpu

    made = state(9, device)
    temperature, seeds = made["temperature"], made["seeds"]
    idx_mapping = torch.tensor([3, 1, -1, 0, 2, 4, 6, 8, 7], dtype=torch.int32, device=device)
    positions = torch.arange(9, dtype=torch.int32, device=device) * 2**27
    for dtype in (torch.float32, torch.float16):
        logits = awkward_logits().to(device, dtype)
        expected = torch.full((9,), -7, device=device)
        found = expected.clone()
        arguments = (logits, idx_mapping, temperature, seeds, positions)
        gumbel_sample_reference(*arguments, expected)
        for programs in (9 * 3, 9 * 2, 9):  # of one block each, of two and one, of all three
            found.fill_(-7)
            gumbel_sample_on_gpu(*arguments, found, block=128, programs=programs)
            assert torch.equal(found, expected), (programs, found, expected)
    part = torch.randn(4, 1000, generator=torch.Generator().manual_seed(1)).to(device)[
        1:3, 100:400
    ]  # rows that do not follow each other
    expected, found = (torch.empty(2, dtype=torch.int64, device=device) for _ in range(2))
    gumbel_sample_reference(part, idx_mapping[:2], temperature, seeds, positions[:2], expected)
    gumbel_sample_on_gpu(part, idx_mapping[:2], temperature, seeds, positions[:2], found, block=128)
    assert torch.equal(found, expected)


def test_the_kernel_equals_the_reference() -> None:
    interpreted(check_kernel)


@pytest.mark.gpu
def test_the_kernel_equals_the_reference_on_the_gpu() -> None:
    check_kernel("cuda")


def test_infinities_and_nans_are_not_drawn() -> None:
    """Unless a row has nothing else: then the token is 0, as that of padding."""
    logits = awkward_logits()
    inputs = state(9)
    idx_mapping = torch.tensor([0, 1, -1, 0, 2, 4, 6, 8, 7], dtype=torch.int32)
    drawn = [
        gumbel_sample(
            logits, idx_mapping=idx_mapping, positions=torch.full((9,), position, dtype=torch.int32), **inputs
        ).tolist()
        for position in range(50)
    ]
    for tokens in drawn:
        assert tokens[0] == int(logits[0].argmax())
        assert tokens[1] >= 290
        assert tokens[4] % 2 == 1
        assert [tokens[2], tokens[5], tokens[6]] == [0, 0, 0]
    assert len({tokens[7] for tokens in drawn}) > 30
    assert all(tokens[3] == int(logits[3].nan_to_num(-INF).argmax()) for tokens in drawn)


def test_the_tokens_are_written_into_out() -> None:
    logits, out = torch.randn(2, 30), torch.empty(2, dtype=torch.int64)
    at = torch.tensor([0, 3], dtype=torch.int32)  # both greedy
    assert gumbel_sample(logits, idx_mapping=at, positions=at, out=out, **state(4)) is out
    assert out.tolist() == logits.argmax(-1).tolist()


VOCAB = 151_936


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_large_batch_on_the_gpu(dtype: torch.dtype) -> None:
    """Greedy rows are argmax exactly; others are the reference's, but for near ties, which logarithms may decide."""
    logits = (3 * torch.randn(256, VOCAB, device="cuda")).to(dtype)
    inputs = state(256, "cuda")
    temperature, seeds = inputs["temperature"], inputs["seeds"]
    idx_mapping = torch.randperm(256, device="cuda").int()
    idx_mapping[100] = -1
    positions = torch.randint(0, 2**20, (256,), device="cuda", dtype=torch.int32)
    found = gumbel_sample(logits, idx_mapping=idx_mapping, positions=positions, **inputs)
    is_greedy = (temperature[idx_mapping.long()] == 0) & (idx_mapping >= 0)
    assert torch.equal(found[is_greedy], logits.argmax(-1)[is_greedy])
    assert found[100] == 0
    expected = torch.empty_like(found)
    for rows in torch.arange(256, device="cuda").split(32):  # the reference's noise takes memory
        part = torch.empty(len(rows), dtype=torch.int64, device="cuda")
        gumbel_sample_reference(logits[rows], idx_mapping[rows], temperature, seeds, positions[rows], part)
        expected[rows] = part
    assert (found == expected).sum() >= 250


@pytest.mark.gpu
def test_a_graph_draws_for_whoever_is_in_its_buffers() -> None:
    """Captured once, with temperatures, seeds, positions and rows that change between replays."""
    logits = torch.randn(8, 5000, device="cuda", dtype=torch.bfloat16)
    inputs = state(8, "cuda")
    idx_mapping, positions = (torch.zeros(8, dtype=torch.int32, device="cuda") for _ in range(2))
    out = torch.empty(8, dtype=torch.int64, device="cuda")
    gumbel_sample(logits, idx_mapping=idx_mapping, positions=positions, out=out, **inputs)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gumbel_sample(logits, idx_mapping=idx_mapping, positions=positions, out=out, **inputs)
    for step in range(3):
        idx_mapping.copy_(torch.randperm(8))
        idx_mapping[step] = -1
        positions.fill_(step)
        inputs["temperature"].copy_(torch.rand(8).round())
        logits.normal_()
        graph.replay()
        again = gumbel_sample(logits, idx_mapping=idx_mapping, positions=positions, **inputs)
        assert torch.equal(out, again)
        assert out[step] == 0


def test_the_kernels_compile_for_a_gpu() -> None:
    """In the form that overlaps with the preceding kernel."""
    from piecegraph.runner.sampling.kernels.gumbel_sample import best_of_blocks_kernel, best_of_rows_kernel

    logits, scores = torch.empty(0, dtype=torch.bfloat16), torch.empty(0)
    ints, longs = torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int64)
    blocks = {
        "best": scores, "tokens": ints, "logits": logits, "logits_stride": 151936, "idx_mapping": ints,
        "temperatures": scores, "seeds": longs, "positions": ints, "vocab_size": 151936,
        "num_blocks": 19, "BLOCK": 2048, "OVERLAP": True,
    }  # fmt: skip
    rows = {
        "out": longs, "best": scores, "tokens": ints, "idx_mapping": ints,
        "num_programs": 4, "positions": ints, "token_ids": ints, "prefill_lens": ints, "num_computed_tokens": ints,
        "token_ids_stride": 40960, "max_model_len": 40960, "PADDED": 128, "OVERLAP": True,
    }  # fmt: skip
    nothing = dict.fromkeys(("token_ids", "prefill_lens", "num_computed_tokens"))
    kernels = (
        (best_of_blocks_kernel, blocks, 4),
        (best_of_rows_kernel, rows, 1),
        (best_of_rows_kernel, {**rows, **nothing}, 1),
    )
    for kernel, arguments, num_warps in kernels:
        ptx = compile_for_gpu(kernel, arguments, {"num_warps": num_warps, "launch_pdl": True})
        assert ptx.index("griddepcontrol.wait") < ptx.index("ld.global")
