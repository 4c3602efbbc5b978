"""Processors follow a batch whose rows change as little as can be, and know every token that was drawn."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from piecegraph import LLM, AdapterLogitsProcessor, BatchUpdate, LogitsProcessor, MoveDirectionality
from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.sampling.batch_sampler import Sampler
from piecegraph.runner.sampling.processor_batch import ProcessedRequest, next_order


def processed(row: int) -> ProcessedRequest:
    return ProcessedRequest(row=row, params=SamplingParams(), prompt_token_ids=[row], output_token_ids=[])


class Mirror(AdapterLogitsProcessor):
    """Keeps what an adapter keeps, and nothing else."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        return lambda prompt, output, logits: logits + prompt[0]


@given(st.lists(st.sets(st.integers(0, 5)), max_size=12))
def test_updates_lead_to_the_batch(steps: list[set[int]]) -> None:
    """Followed in the order removed, added, moved, whatever comes and goes; without a change there is none."""
    requests = [processed(row) for row in range(6)]
    mirror, order = Mirror(None, torch.device("cpu"), False), []  # type: ignore[arg-type, var-annotated]
    for step in steps:
        before = order
        order, update = next_order(order, [requests[row] for row in sorted(step)])
        assert {one.row for one in order} == step
        assert (update is None) == (before == order)
        mirror.update_state(update)
        if update is not None:
            assert update.batch_size == len(order)
            stayed = [one for one in before if one in order]
            assert len(update.moved) <= len(before) - len(stayed)
        logits = mirror.apply(torch.zeros(len(order), 1))
        assert logits.flatten().tolist() == [float(one.row) for one in order]


class Recorder(LogitsProcessor):
    """Forbids the token of `extra_args["forbidden"]`, and writes down what it is told."""

    is_invariant = False

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.told = vllm_config
        self.rows: dict[int, tuple[int | None, list[int]]] = {}
        self.outputs: list[list[list[int]]] = []

    def is_argmax_invariant(self) -> bool:
        return self.is_invariant

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is not None:
            for row in batch_update.removed:
                self.rows.pop(row, None)
            for row, params, _, output in batch_update.added:
                self.rows[row] = ((params.extra_args or {}).get("forbidden"), output)
            for source, target, direction in batch_update.moved:
                assert direction is MoveDirectionality.UNIDIRECTIONAL
                self.rows[target] = self.rows.pop(source)
            assert sorted(self.rows) == list(range(batch_update.batch_size))
        self.outputs.append([list(self.rows[row][1]) for row in sorted(self.rows)])

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        assert logits.dtype is torch.float32 and len(logits) == len(self.rows)
        for row, (forbidden, _) in self.rows.items():
            if forbidden is not None:
                logits[row, forbidden] = -torch.inf
        return logits


class Invariant(Recorder):
    is_invariant = True


def sample(sampler: Sampler, rows: list[int], logits: torch.Tensor, tokens: torch.Tensor, positions: list[int]) -> Any:
    mapping = torch.tensor(rows, dtype=torch.int32)
    at = torch.tensor(positions, dtype=torch.int32)
    drawn = sampler.sample(logits, rows=rows, idx_mapping=mapping, positions=at, token_ids=tokens).token_ids
    for row, position, token in zip(rows, positions, drawn.tolist(), strict=True):
        if row >= 0:
            tokens[row, position] = token
    return drawn.tolist()


def test_processors_know_each_token_and_change_their_own_rows() -> None:
    """Rows that do not sample are not in the batch. A greedy request passes an invariant processor by, and one that
    draws does not."""
    sampler = Sampler(max_num_reqs=4, max_model_len=16, vocab_size=8, device="cpu")
    recorder, invariant = (kind(None, torch.device("cpu"), False) for kind in (Recorder, Invariant))
    sampler.use_logits_processors([invariant, recorder])
    tokens = torch.zeros(4, 16, dtype=torch.int32)
    plain = {"seed": 1, "prompt_len": 2, "stop_token_ids": (), "bad_words": (), "token_ids": [5, 5]}
    forbids = SamplingParams(temperature=0.0, extra_args={"forbidden": 7})
    draws = SamplingParams(temperature=0.01, extra_args={"forbidden": 7})
    sampler.add_request(2, forbids, **plain)  # type: ignore[arg-type]
    sampler.add_request(0, SamplingParams(temperature=0.0), **{**plain, "token_ids": [5, 5, 6]})  # type: ignore[arg-type]
    sampler.add_request(3, draws, **plain)  # type: ignore[arg-type]
    sampler.apply_staged_writes()
    logits = torch.arange(8.0).repeat(4, 1)
    assert not sampler.is_plain([2])
    assert sample(sampler, [2, -1, 0], logits[:3], tokens, [2, 0, 3])[::2] == [6, 7]
    assert sample(sampler, [0, 2, 3], logits[:3], tokens, [4, 3, 2]) == [7, 6, 6]
    assert torch.equal(logits, torch.arange(8.0).repeat(4, 1))
    sampler.remove_request(2)
    assert sample(sampler, [3, 0], logits[:2], tokens, [3, 5]) == [6, 7]
    expected = [[[], [6]], [[6], [6, 7], []], [[6], [6, 7, 7]]]
    assert recorder.outputs == invariant.outputs == expected


def test_an_invariant_processor_alone_leaves_greedy_requests_as_they_are() -> None:
    """It sees logits divided by the temperature, and what it does not change keeps its bits."""
    seen = []

    class Looks(Invariant):
        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            seen.append(logits.clone())
            return logits.index_fill(1, torch.tensor([7]), -torch.inf)

    sampler = Sampler(max_num_reqs=4, max_model_len=16, vocab_size=8, device="cpu")
    sampler.use_logits_processors([Looks(None, torch.device("cpu"), False)])
    options = {"seed": 1, "prompt_len": 1, "stop_token_ids": (), "bad_words": (), "token_ids": [5]}
    sampler.add_request(0, SamplingParams(temperature=0.0), **options)  # type: ignore[arg-type]
    sampler.add_request(1, SamplingParams(temperature=0.3), **options)  # type: ignore[arg-type]
    sampler.apply_staged_writes()
    logits = torch.arange(8.0).repeat(2, 1) * 30
    tokens = torch.zeros(4, 16, dtype=torch.int32)
    assert sample(sampler, [0, 1], logits, tokens, [1, 1]) == [7, 6]
    assert torch.equal(seen[0], torch.stack([logits[0], logits[1] / torch.tensor(0.3)]))


def test_processors_of_an_llm_are_chosen_per_request(llama_dir: Any) -> None:
    """Chosen per request by `extra_args`, in a batch whose requests come and go, with prompts in chunks; parameters
    are checked by `validate_params`."""
    import pytest

    from piecegraph.errors import ConfigError, RequestError

    made: list[Only] = []

    class Only(AdapterLogitsProcessor):
        """Allows the token of `extra_args["only"]`, and after it the one after that, and so on."""

        def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
            super().__init__(vllm_config, device, is_pin_memory)
            assert vllm_config.model_config.get_vocab_size() == 261
            assert vllm_config.scheduler_config.max_num_seqs == 3
            made.append(self)

        @classmethod
        def validate_params(cls, sampling_params: SamplingParams) -> None:
            if not isinstance((sampling_params.extra_args or {}).get("only", 0), int):
                raise ValueError("only has to be a token")

        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: SamplingParams) -> Any:
            only = (params.extra_args or {}).get("only")
            if only is None:
                return None

            def process(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
                masked = torch.full_like(logits, -torch.inf)
                masked[only + len(output)] = 0.0
                return masked

            return process

    options: dict[str, Any] = {"dtype": "float32", "compiler": "eager", "max_num_seqs": 3, "num_kv_blocks": 32}
    prompts: Any = [[40 + i] * (3 + 9 * (i % 2)) for i in range(7)]
    lengths = [3, 9, 5, 1, 8, 2, 6]
    params = [
        SamplingParams(
            temperature=0.5 * (i % 2), max_tokens=n, ignore_eos=True, extra_args={"only": 20 * i} if i % 3 else None
        )
        for i, n in enumerate(lengths)
    ]
    with LLM(llama_dir, logits_processors=[Only], max_num_batched_tokens=8, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for i, (output, n) in enumerate(zip(outputs, lengths, strict=True)):
            if i % 3:
                assert output.outputs[0].token_ids == list(range(20 * i, 20 * i + n))
        unprocessed = [output.outputs[0].token_ids for i, output in enumerate(outputs) if i % 6 == 0]
        with pytest.raises(RequestError, match="Only refuses the sampling parameters: only has to be a token"):
            llm.generate(prompts[0], SamplingParams(extra_args={"only": "x"}), use_tqdm=False)
        assert len(made) == 1 and not made[0].req_info.get(7)
    with LLM(llama_dir, **options) as llm:
        plain = llm.generate(prompts[::6], params[::6], use_tqdm=False)
        assert [output.outputs[0].token_ids for output in plain] == unprocessed
    wrong: list[Any] = [[int], ["no.such:Thing"], ["os:path"], "os:path", [lambda logits: logits]]
    for bad in wrong:
        with pytest.raises(ConfigError, match="logits_processors"):
            LLM(llama_dir, logits_processors=bad, **options)
    with pytest.raises(ConfigError, match="async_scheduling=True launches a step before"):
        LLM(llama_dir, logits_processors=[Only], async_scheduling=True, **options)
