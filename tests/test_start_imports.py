"""What a start from the cache imports: no package that torch, transformers and Inductor's loader do not, and nothing of
ours that is for compiling, converting or explaining. Each import is paid at every start of every user."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from piecegraph import environment
from tests.runner.tiny_models import llama_config, random_model, save

START = """
import json, sys
from piecegraph import LLM, SamplingParams
before = "torch" in sys.modules
phases = []
with LLM(
    sys.argv[1], device="cpu", skip_tokenizer_init=True, num_kv_blocks=8, max_num_seqs=1,
    on_phase=lambda phase: phases.append(phase.name) if phase.seconds is not None else None,
) as llm:
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    next(iter(llm.stream({"prompt_token_ids": [5, 6, 7]}, params)))
    print(json.dumps([llm.compiled.report().cache.state, before, phases, sorted(sys.modules)]))
"""

WITHOUT_US = """
import json, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
AutoModelForCausalLM.from_pretrained(sys.argv[1], config=AutoConfig.from_pretrained(sys.argv[1]))
from torch._functorch._aot_autograd import autograd_cache
from torch._inductor import async_compile, compile_fx, select_algorithm
print(json.dumps(sorted(sys.modules)))
"""

OURS = {"piecegraph", "platformdirs"}
"""Packages that only we bring; `platformdirs` finds the user's cache."""

NOT_FOR_A_START = {
    "piecegraph.compiler.workers.child",
    "piecegraph.compiler.workers.pool",
    "piecegraph.compiler.building.inductor_pieces",
    "piecegraph.runner.startup.compile_ahead",
    "piecegraph.runner.inspect.explanation",
    "piecegraph.runner.inspect.selfcheck",
    "piecegraph.tools",
}


def packages(modules: list[str]) -> set[str]:
    """Top-level ones that do not come with Python and have a name of their own, as no generated module has."""
    tops = {module.partition(".")[0] for module in modules}
    return {top for top in tops - sys.stdlib_module_names if not top.startswith(("_", "piecegraph_"))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(llama_config(vocab_size=64, num_hidden_layers=1)), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def started(folder: Path) -> list[Any]:
    """Cache state, whether importing `LLM` imported torch, phases, and modules: of the second start, unless the tests'
    cache has the model from an earlier run."""
    first: list[Any] = in_process(START, folder)
    return first if first[0] == "hit" else list(in_process(START, folder))


def in_process(code: str, folder: Path) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env=environment.child_environment({environment.CACHE: "on"}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_it_is_a_start_from_the_cache(started: list[Any]) -> None:
    assert started[0] == "hit"


@pytest.mark.slow
def test_importing_llm_imports_no_torch(started: list[Any]) -> None:
    """Making an `LLM` does."""
    assert started[1] is False


@pytest.mark.slow
def test_it_imports_no_package_that_others_do_not(started: list[Any], folder: Path) -> None:
    others = in_process(WITHOUT_US, folder)
    assert packages(started[3]) - packages(others) <= OURS


@pytest.mark.slow
def test_it_imports_nothing_of_ours_that_is_not_for_it(started: list[Any]) -> None:
    assert not NOT_FOR_A_START & set(started[3])
