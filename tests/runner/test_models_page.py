"""docs/models.md lists every architecture of transformers, and what it says is so.

What runs gives the tokens of transformers: prompts in chunks, preempted, and with a prefix that is cached; CI asks
every second architecture, `make test-slow TEST_ROUNDS=2` all. Its mechanisms are those of the model that ran;
`explain`, which traces once more over meta tensors, is asked about one model of each set of mechanisms, and about all
that do not run.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import transformers

from piecegraph import LLM, SamplingParams
from piecegraph.errors import OutOfMemory, UnsupportedModel
from piecegraph.runner.attention.interface.layer import attention_layers
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.models.config.load_config import load_config
from piecegraph.runner.startup.compiling import decide
from tests.rounds import ROUNDS
from tests.runner.architectures import architectures, class_name, save_tiny, tiny_config, tiny_model
from tests.runner.margin_rule import assert_same_tokens
from tests.runner.models_page import ANSWERS, PAGE, REFUSED, RUNS, mechanisms, page_of, plain, row_of, rows_of
from tests.runner.test_hybrid_models import PROMPTS

ROWS = rows_of(PAGE.read_text(encoding="utf-8"))
RUNNING = [row.model_type for row in ROWS.values() if row.answer == RUNS]
ASKED = RUNNING if ROUNDS > 1 else RUNNING[::2]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
NEEDED = 125
"""The fewest architectures that may run."""
MAX_MODEL_LEN, BLOCK_SIZE = 40, 4
FORGETS = re.compile("sliding|chunked|linear|state|convolution")
"""Mechanisms of layers that do not keep all tokens, so that the blocks of a request are counted otherwise."""


of_this_transformers = pytest.mark.skipif(
    f"transformers {transformers.__version__} " not in PAGE.read_text(encoding="utf-8"),
    reason="the page is of another version of transformers",
)


@of_this_transformers
def test_the_page_lists_every_architecture() -> None:
    assert list(ROWS) == list(architectures()), "out of date: run python -m tests.runner.models_page"
    assert all(row.class_name == class_name(row.model_type) for row in ROWS.values())
    assert PAGE.read_text(encoding="utf-8") == page_of(ROWS)


def test_enough_run_and_each_refusal_has_a_reason() -> None:
    """A reason is about a mechanism of a layer or module, not the name of a model, and says what would be needed."""
    assert sum(row.answer == RUNS for row in ROWS.values()) >= NEEDED
    for row in ROWS.values():
        assert row.answer in ANSWERS
        assert len(row.mechanisms.split()) > (0 if row.answer == RUNS else 6), row
        if row.answer == REFUSED:  # in which layer, and what it would need to run
            assert re.search(r"\w\.\d+\b|\w+ \(\w+\)|each layer", row.mechanisms), row
            assert re.search(r"would need|needs", row.mechanisms), row


@of_this_transformers
def test_configs_are_refused_as_the_page_says(tmp_path: Path) -> None:
    """Those that are refused by their config alone."""
    refused = 0
    for row in ROWS.values():
        if row.answer == REFUSED and " has layers of type " in row.mechanisms:
            tiny_config(row.model_type).save_pretrained(str(tmp_path / row.model_type))
            with pytest.raises(UnsupportedModel) as caught:
                load_config(ModelSource(model=str(tmp_path / row.model_type)))
            assert plain(caught.value) == row.mechanisms
            refused += 1
    assert refused > 0


def load(folder: Path, **options: Any) -> LLM:
    """Blocks of 4 tokens, chunks of 5."""
    return LLM(
        folder,
        dtype="float32",
        device="cpu",
        compiler="eager",
        compile_workers=0,
        skip_tokenizer_init=True,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=5,
        max_num_seqs=4,
        **options,
    )


def load_with_few_blocks(folder: Path, mechanisms: str) -> LLM:
    """With half as many blocks again as a request of full length needs, so that requests preempt each other."""
    if FORGETS.search(mechanisms):
        with pytest.raises(OutOfMemory) as caught:
            load(folder, num_kv_blocks=1)
        found = re.search(r"that takes (\d+) blocks", str(caught.value))
        assert found is not None, caught.value
        needed = int(found[1])
    else:
        needed = MAX_MODEL_LEN // BLOCK_SIZE
    return load(folder, num_kv_blocks=max(needed * 3 // 2, needed + 3))


@pytest.fixture
def traces_aside() -> Iterator[None]:
    """Collections of garbage do not walk over the traces of the models before, which are kept."""
    yield
    gc.collect()
    gc.freeze()


@pytest.mark.slow
@pytest.mark.usefixtures("traces_aside")
@pytest.mark.parametrize("name", ASKED)
def test_what_runs_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    """The second time, prefixes are cached. All blocks are free in the end."""
    model, answers = tiny_model(name), []
    with (
        patch.object(decide, "attention_layers", wraps=attention_layers) as found,
        load_with_few_blocks(save_tiny(name, model, tmp_path), ROWS[name].mechanisms) as llm,
    ):
        for _ in range(2):
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
        stats = llm.engine.stats
        assert stats.num_preemptions > 0 and stats.num_prefix_hits > 0
        assert stats.num_free_blocks == stats.num_blocks
        calls = found.call_args.args[0]
        assert mechanisms(attention_layers(calls), [call.op for call in calls], llm.notes) == ROWS[name].mechanisms
    for tokens in answers:
        for prompt, ours in zip(PROMPTS, tokens, strict=True):
            assert_same_tokens(model, prompt, ours)


@pytest.mark.slow
@pytest.mark.parametrize("name", list({row.mechanisms: name for name, row in reversed(ROWS.items())}.values()))
def test_explain_says_what_the_page_says(name: str) -> None:
    """Of those that run, the first model of each set of mechanisms; of those that do not, the first of each reason."""
    assert row_of(name) == ROWS[name]
