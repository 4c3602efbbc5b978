"""The largest step, run to be measured, leaves no trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph import LLM, SamplingParams
from piecegraph.runner.sampling.batch_sampler import Sampler, SamplerOutput
from piecegraph.runner.startup.compiling.profile import SAMPLED_LOGPROBS, measure_step, run_largest_step
from tests.runner.tiny_models import llama_config, random_model, save

NUM_TOKENS = 200


def test_the_largest_step_runs_every_part(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model runs on all tokens, and as many requests as a step can have are sampled with every costly option."""
    step, sizes, sampled = llm.runner.step, [], []

    def forward(input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        sizes.append((len(input_ids), len(rows), int(positions.max())))
        return step.forward(input_ids, positions, rows)

    def sample(self: Sampler, logits: torch.Tensor, *, rows: Sequence[int], **options: Any) -> SamplerOutput:
        names = {type(option).__name__ for option in self._options if option.is_used(rows)}
        sampled.append((len(logits), names))
        output = original(self, logits, rows=rows, **options)
        assert output.logprobs is not None and output.logprobs.token_ids.shape == (len(logits), 1 + SAMPLED_LOGPROBS)
        return output

    original = Sampler.sample
    monkeypatch.setattr(Sampler, "sample", sample)
    with torch.no_grad():
        run_largest_step(
            replace(step, forward=forward),
            num_tokens=NUM_TOKENS,
            max_model_len=llm.max_model_len,
            needs_host_batch=llm.runner._needs_host_batch,
        )
    assert sizes == [(NUM_TOKENS, 8, llm.max_model_len - 1)]
    assert sampled == [(8, {"Penalties", "Truncation"})]


def test_the_largest_step_leaves_no_trace(llm: LLM) -> None:
    step = llm.runner.step
    watched = {name: tensor for name, tensor in step.fixed_tensors() if name.startswith(("requests' ", "key", "value"))}
    watched = {name: tensor for name, tensor in watched.items() if "temperature" not in name and "seeds" not in name}
    assert len(watched) >= 6
    expected = llm.generate("hello", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    before = {name: tensor.clone() for name, tensor in watched.items()}
    with torch.no_grad():
        run_largest_step(
            step, num_tokens=NUM_TOKENS, max_model_len=llm.max_model_len, needs_host_batch=llm.runner._needs_host_batch
        )
    for name, tensor in watched.items():
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name
    assert step.sampler.is_plain(range(8))
    again = llm.generate("hello", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert [one.outputs[0].token_ids for one in again] == [one.outputs[0].token_ids for one in expected]


@pytest.mark.gpu
def test_a_larger_step_takes_more(tmp_path: Path) -> None:
    """At least the float32 rows that the sampler works in, and the same when measured again. They are more than what
    torch's allocator may have free in pieces that are in use."""
    folder = save(random_model(llama_config(vocab_size=65536)), tmp_path)
    options: dict[str, Any] = {"num_kv_blocks": 300, "max_num_seqs": 64, "max_num_batched_tokens": 512}
    with LLM(folder, skip_tokenizer_init=True, enforce_eager=True, **options) as llm:
        sizes: dict[str, Any] = {"max_model_len": llm.max_model_len, "needs_host_batch": llm.runner._needs_host_batch}
        large = measure_step(llm.runner.step, num_tokens=512, **sizes)
        again = measure_step(llm.runner.step, num_tokens=512, **sizes)
        assert again == large
        assert large >= measure_step(llm.runner.step, num_tokens=8, **sizes)
        assert large >= 64 * llm.engine.vocab_size * 4
