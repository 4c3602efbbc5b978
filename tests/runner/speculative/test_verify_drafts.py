"""The kernels of a verification write what their torch references write, over random batches."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from piecegraph.runner.speculative.common.draft_source import DraftModel, DraftSource, PromptLookup
from piecegraph.runner.speculative.common.verified_rows import NUM_COUNTS, VerifiedRows
from piecegraph.runner.speculative.verification import lay_out_rows_reference
from piecegraph.runner.speculative.verify_drafts import verify_drafts_reference
from tests.interpreter import interpreted

MAX_LEN = 24
NUM_ROWS = 7
MAX_REQS = 6
VOCAB_SIZE = 3  # few, so that drafts are accepted and texts repeat


class RandomBatch:
    """A batch of up to `MAX_REQS` requests: some verify drafts, some compute part of a prompt, some are padding."""

    def __init__(self, seed: int, max_drafts: int, device: str) -> None:
        random = Random(seed)
        self.max_drafts, self.device = max_drafts, device
        self.num_reqs = random.randint(1, MAX_REQS)
        rows = random.sample(range(NUM_ROWS), MAX_REQS)
        num_real = random.randint(1, self.num_reqs)
        idx_mapping, starts, positions, input_ids = [-1] * MAX_REQS, [0], list[int](), list[int]()
        seq_lens, computed, prefill = [0] * MAX_REQS, [0] * NUM_ROWS, [1] * NUM_ROWS
        proposed = [random.randint(0, max_drafts) for _ in range(NUM_ROWS)]
        token_ids = [[random.randrange(VOCAB_SIZE) for _ in range(MAX_LEN)] for _ in range(NUM_ROWS)]
        for request in range(num_real):
            row = idx_mapping[request] = rows[request]
            done = computed[row] = random.randint(0, MAX_LEN - 1)
            is_verified = done > 0 and random.random() < 0.7
            most = 1 + max_drafts if is_verified else 5
            query_len = random.randint(1, min(most, MAX_LEN - done))
            prefill[row] = random.randint(1, done) if is_verified else done + random.randint(1, query_len + 2)
            positions += range(done, done + query_len)
            input_ids += token_ids[row][done : done + query_len]
            seq_lens[request] = done + query_len
            starts.append(starts[-1] + query_len)
        starts += [starts[-1]] * (MAX_REQS + 1 - len(starts))
        num_padding = random.randint(0, 3)

        def made(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        self.prefill_lens, self.num_proposed = made(prefill, torch.int32), made(proposed, torch.int32)
        self.states: Any = SimpleNamespace(
            token_ids=made(token_ids, torch.int32), num_computed_tokens=made(computed, torch.int32)
        )
        self.buffers: Any = SimpleNamespace(
            idx_mapping=made(idx_mapping, torch.int32),
            query_start_loc=made(starts, torch.int32),
            seq_lens=made(seq_lens, torch.int32),
            positions=made([*positions, *[0] * num_padding], torch.int64),
            input_ids=made([*input_ids, *[0] * num_padding], torch.int64),
        )
        self.num_real = num_real
        num_logits = MAX_REQS * (1 + max_drafts)
        self.drawn = made([random.randrange(VOCAB_SIZE) for _ in range(num_logits)], torch.int64)
        self.num_slots = made([random.randint(1, MAX_LEN + 2) for _ in range(NUM_ROWS)], torch.int32)
        self.draft_rows = made([5] * MAX_REQS, torch.int32)
        self.rows = VerifiedRows(
            first_rows=made([0] + [99] * MAX_REQS, torch.int64),
            logits_indices=made([99] * num_logits, torch.int64),
            idx_mapping=made([99] * num_logits, torch.int32),
            positions=made([99] * num_logits, torch.int32),
            num_drafts=made([99] * MAX_REQS, torch.int64),
        )

    def source(self, is_lookup: bool) -> DraftSource:
        """Where the next drafts come from."""
        return PromptLookup(1 + self.max_drafts % 2, 3) if is_lookup else DraftModel(self.num_slots, self.draft_rows)

    def run(self, lay_out: Any, verify: Any, is_lookup: bool) -> dict[str, torch.Tensor]:
        """Everything that a verification writes, by name; of the result and the rows, what real requests have."""
        lay_out(
            self.rows,
            idx_mapping=self.buffers.idx_mapping,
            query_start_loc=self.buffers.query_start_loc,
            positions=self.buffers.positions,
            prefill_lens=self.prefill_lens,
            num_computed_tokens=self.states.num_computed_tokens,
            num_proposed=self.num_proposed,
        )
        rows = {f"rows {name}": value.clone() for name, value in self.rows._asdict().items()}
        result = verify(
            self.drawn,
            self.rows,
            buffers=self.buffers,
            states=self.states,
            prefill_lens=self.prefill_lens,
            num_proposed=self.num_proposed,
            num_reqs=self.num_reqs,
            max_drafts=self.max_drafts,
            source=self.source(is_lookup),
        )
        assert result.shape == (self.num_reqs * (1 + self.max_drafts + NUM_COUNTS),)
        return rows | {
            "result": result.view(self.num_reqs, -1)[: self.num_real],
            "token_ids": self.states.token_ids,
            "num_computed_tokens": self.states.num_computed_tokens,
            "num_proposed": self.num_proposed,
            "draft_rows": self.draft_rows,
        }


def check_kernels(device: str = "cpu") -> None:
    from piecegraph.runner.speculative.kernels.verify import lay_out_rows_on_gpu, verify_drafts_on_gpu

    num_accepted = num_drafted = 0
    for seed in range(90):
        max_drafts, is_lookup = (1, 2, 4)[seed % 3], seed % 2 == 0
        expected = RandomBatch(seed, max_drafts, device).run(lay_out_rows_reference, verify_drafts_reference, is_lookup)
        found = RandomBatch(seed, max_drafts, device).run(lay_out_rows_on_gpu, verify_drafts_on_gpu, is_lookup)
        for name, value in expected.items():
            assert torch.equal(found[name], value), (seed, name, found[name], value)
        num_accepted += int((expected["result"][:, max_drafts + 1] > 1).sum())
        num_drafted += int((expected["result"][:, max_drafts + 3] > 0).sum())
    assert num_accepted > 10 and num_drafted > 30, "the batches accept and draft"


def check_a_long_text(device: str = "cpu") -> None:
    """A match further back than one tile of the kernel, and the earliest of two."""
    from piecegraph.runner.speculative.kernels.verify import BLOCK, lay_out_rows_on_gpu, verify_drafts_on_gpu

    length = 2 * BLOCK + 100
    token_ids = torch.arange(length + 8, dtype=torch.int32, device=device).unsqueeze(0)
    token_ids[0, length - 3 :] = torch.tensor([7, 8, 9, 0, 0, 0, 0, 0, 0, 0, 0], dtype=torch.int32, device=device)
    token_ids[0, BLOCK + 300 : BLOCK + 303] = torch.tensor([7, 8, 9], dtype=torch.int32, device=device)
    batch = RandomBatch(0, 2, device)
    batch.num_reqs = 1
    batch.states.token_ids = token_ids
    one = {"dtype": torch.int32, "device": device}
    batch.states.num_computed_tokens = torch.tensor([length - 2], **cast(Any, one))
    batch.prefill_lens, batch.num_proposed = torch.tensor([5], **cast(Any, one)), torch.tensor([0], **cast(Any, one))
    batch.buffers.idx_mapping[:] = -1
    batch.buffers.idx_mapping[0] = 0
    batch.buffers.query_start_loc[1:] = 1
    batch.buffers.seq_lens[0] = length - 1
    batch.drawn[0] = 9
    batch.num_real = 1
    found = batch.run(lay_out_rows_on_gpu, verify_drafts_on_gpu, True)
    assert found["result"][0].tolist() == [9, 0, 0, 1, 0, 2, length - 1]
    assert found["token_ids"][0, length - 1 : length + 2].tolist() == [9, 10, 11], "the earliest of the longest"


def test_the_kernels_equal_the_references() -> None:
    interpreted(check_kernels)


def test_a_match_is_found_further_back_than_a_tile() -> None:
    interpreted(check_a_long_text)


@pytest.mark.gpu
def test_the_kernels_equal_the_references_on_the_gpu() -> None:
    check_kernels("cuda")
    check_a_long_text("cuda")
