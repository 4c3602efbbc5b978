"""The passes for quantised linears match in traced models of the formats that round inputs, and change no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from piecegraph import LLM, SamplingParams
from piecegraph.compiler.building import cold_start
from piecegraph.compiler.tracing.trace import trace
from tests.runner.pipeline_parallel.stages_in_threads import llm_of_threads
from tests.runner.quantization.checkpoints.test_stored import MAX_DIFFERENCE
from tests.runner.quantization.checkpoints.written import FORMATS, write_checkpoint
from tests.runner.quantization.test_llm_quantised import PROMPTS, largest_difference, load

pytestmark = pytest.mark.usefixtures("without_cpp_kernels")

BEFORE = ("merge-projections", "fuse-add-rms-norm", "fuse-act-mul")
QUANTISED = ("fuse-norm-quant", "fuse-act-quant")
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)


def answers(llm: LLM) -> list[Any]:
    """Tokens, and log probabilities to the last bit."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def matches(llm: LLM) -> dict[str, int]:
    return {row.name: row.matches for row in llm.compiled.report().passes}


@pytest.mark.parametrize("name", ["W8A8", pytest.param("FP8_BLOCK", marks=pytest.mark.slow)])
def test_roundings_become_part_of_norms_and_activations(name: str, tmp_path: Path) -> None:
    """Two norms a layer, and one activation: the first layer's last linear is not quantised."""
    config, write, inputs = FORMATS[name]
    reference = write_checkpoint(tmp_path, config, write, inputs, intermediate_size=48)
    found, counts = [], []
    for passes in ((), BEFORE, BEFORE + QUANTISED):
        options = {"passes": passes, "expect": dict.fromkeys(set(passes) & {"fuse-norm-quant"}, "all")}
        with load(tmp_path, quantization=None, dtype="float32", compiler="eager", compilation_config=options) as llm:
            found.append(answers(llm))
            counts.append(matches(llm))
            if passes:
                assert largest_difference(reference, llm) < MAX_DIFFERENCE[inputs]
    assert found[2] == found[1]
    assert [tokens for tokens, _ in found[1]] == [tokens for tokens, _ in found[0]]
    assert counts[2] == {"merge-projections": 4, "fuse-add-rms-norm": 5, "fuse-act-mul": 2, "fuse-norm-quant": 4,
                         "fuse-act-quant": 1}  # fmt: skip


@pytest.mark.slow
def test_so_do_sums_over_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the four sums behind attention and MLPs is part of the norm behind it, and of its rounding.

    Ranks do not share the traces of other tests: in some runs the sources of their graphs then differed.
    """
    monkeypatch.setattr(cold_start, "trace", trace)
    config, write, inputs = FORMATS["FP8_BLOCK"]
    write_checkpoint(tmp_path, config, write, inputs, hidden_size=64, intermediate_size=96)
    found, counts = [], []
    for passes in (BEFORE, (*BEFORE, *QUANTISED, "fuse-all-reduce")):
        with llm_of_threads(tmp_path, tensor_parallel_size=2, compilation_config={"passes": passes}) as llm:
            found.append(answers(llm))
            counts.append(matches(llm))
    assert found[1] == found[0]
    assert counts[1] == {**counts[0], "fuse-norm-quant": 4, "fuse-act-quant": 1,
                         "fuse-all-reduce": 4}  # fmt: skip
