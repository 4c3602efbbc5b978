"""A server in front of several engines, which end with it."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import openai
import pytest

from piecegraph import LLM, SamplingParams
from tests.runner.byte_tokenizer import byte_tokenizer
from tests.runner.data_parallel.test_engine_processes import assert_gone
from tests.runner.tiny_models import llama_config, random_model, save
from tests.tools.serve.serving import HTTP, running_server


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_two_engines_behind_one_server(tmp_path: Path) -> None:
    """Each has two stages. Answers are the offline ones, counters are of all, and a killed rank ends everything."""
    config = llama_config(vocab_size=261, eos_token_id=1, max_position_embeddings=512)
    folder = save(random_model(config), tmp_path)
    byte_tokenizer().save_pretrained(str(folder))
    prompts = [f"the end {number}" for number in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=12)
    with LLM(folder, dtype="float32", compiler="eager", max_num_seqs=4) as llm:
        expected = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
    layout = ["--data-parallel-size", "2", "--pipeline-parallel-size", "2"]
    flags = [*layout, "--device", "cpu", "--served-model-name", "tiny", "--max-num-seqs", "2"]
    with running_server(folder, *flags) as server:
        engines = children_of(server.process.pid)
        ranks = [rank for engine in engines for rank in children_of(engine)]
        assert (len(engines), len(ranks)) == (2, 2)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            streams = [
                client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=12, stream=True)
                for prompt in prompts
            ]
            assert ["".join(chunk.choices[0].text for chunk in stream) for stream in streams] == expected
        metrics = HTTP.get(f"{server.url}/metrics").text
        assert "vllm:generation_tokens_total{" in metrics and "piecegraph:pipeline_bubbles_total{" in metrics
        os.kill(ranks[0], signal.SIGKILL)  # while no request runs, and none comes
        assert server.process.wait(120) == 1
        assert re.search(rf"engine 0 .* failed: .*rank 1 \(process {ranks[0]}\) ended with exit code -9", server.log)
        assert_gone([*engines, *ranks])
