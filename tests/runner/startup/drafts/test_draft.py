"""A draft model that cannot draft is refused by name before any weights are read; others share the model's cache."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from piecegraph import LLM, SamplingParams
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.errors import CheckpointError, ConfigError, ModelNotFound, PiecegraphError, UnsupportedModel
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.cudagraphs.graph_plan import GraphPlan
from piecegraph.runner.speculative.drafter import Drafter
from piecegraph.runner.startup import load_engine, load_weights
from piecegraph.runner.startup.compiling import compile_model
from piecegraph.runner.startup.compiling.decide import Decided, decide_for
from piecegraph.tools.cli import main
from tests.runner.byte_tokenizer import byte_tokenizer
from tests.runner.speculative.draft_models import drafts_by
from tests.runner.speculative.drafting_llm import SIZES
from tests.runner.test_graphs import load
from tests.runner.tiny_models import FAMILIES, HYBRIDS, make_config, random_model, save


def missing(llama_dir: Path, folder: Path) -> None:
    """Nothing at all."""


def truncated(llama_dir: Path, folder: Path) -> None:
    shutil.copytree(llama_dir, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])


def without_weights(llama_dir: Path, folder: Path) -> None:
    shutil.copytree(llama_dir, folder)
    (folder / "model.safetensors").unlink()


def other_vocabulary(llama_dir: Path, folder: Path) -> None:
    folder.mkdir()
    make_config("LlamaConfig", vocab_size=128).save_pretrained(str(folder))


def short(llama_dir: Path, folder: Path) -> None:
    folder.mkdir()
    make_config("LlamaConfig", vocab_size=261, max_position_embeddings=40).save_pretrained(str(folder))


def stateful(llama_dir: Path, folder: Path) -> None:
    folder.mkdir()
    config = HYBRIDS["lfm2"]()
    config.vocab_size = 261
    save(random_model(config), folder)


def a_head(llama_dir: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text('{"speculators_model_type": "eagle3", "speculators_config": {}}')


def other_tokenizer(llama_dir: Path, folder: Path) -> None:
    shutil.copytree(llama_dir, folder)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(str(folder))


@pytest.mark.parametrize(
    ("make", "error", "message", "code"),
    [
        (missing, ModelNotFound, "no folder", 3),
        (truncated, CheckpointError, "corrupt or truncated", 3),
        (without_weights, CheckpointError, "no weights to read", 3),
        (other_vocabulary, ConfigError, "a vocabulary of 128 tokens and the model one of 261", 3),
        (short, ConfigError, "positions end at 40", 3),
        (stateful, UnsupportedModel, "would need to be taken back", 3),
        (a_head, ConfigError, "is a head of kind 'eagle3' .* give method 'eagle3'", 3),
        (other_tokenizer, ConfigError, "another tokenizer than the model: 'another' is token", 3),
    ],
)
def test_a_draft_that_does_not_fit_is_refused_before_anything_loads(
    llama_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[Path, Path], None],
    error: type[PiecegraphError],
    message: str,
    code: int,
) -> None:
    draft = tmp_path / "draft"
    make(llama_dir, draft)
    monkeypatch.setattr(load_weights, "load_model", pytest.fail)
    monkeypatch.setattr(load_engine, "compile_model", pytest.fail)
    with pytest.raises(error, match=f"the draft model: .*{message}"):
        load(llama_dir, speculative_config=drafts_by(draft), skip_tokenizer_init=False)
    config = f'{{"method": "draft_model", "model": "{draft}", "num_speculative_tokens": 2}}'
    options = ["--device", "cpu", "--compiler", "eager", "--max-model-len", "64", "--speculative", config]
    assert main(["run", str(llama_dir), "Hello", *options]) == code
    out, err = capsys.readouterr()
    assert not out and "the draft model: " in err


@pytest.mark.parametrize("count", ["0", "-1", "65", "true"])
def test_a_number_of_drafts_that_cannot_be_is_a_mistake_of_usage(
    llama_dir: Path, capsys: pytest.CaptureFixture[str], count: str
) -> None:
    config = f'{{"method": "draft_model", "model": "{llama_dir}", "num_speculative_tokens": {count}}}'
    assert main(["run", str(llama_dir), "Hello", "--speculative", config]) in (2, 3)
    assert "num_speculative_tokens" in capsys.readouterr().err


def test_more_drafts_than_a_step_computes_are_refused(llama_dir: Path) -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens=16, and a step computes at most"):
        load(llama_dir, speculative_config={**drafts_by(llama_dir), "num_speculative_tokens": 16})


WINDOWS: dict[str, dict[str, Any]] = {
    "windows alone": {"sliding_window": 8},
    "some windows": {
        "name": "Qwen3Config",
        "head_dim": 8,
        "use_sliding_window": True,
        "sliding_window": 8,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WINDOWS)
def test_models_with_windows_draft_for_themselves(tmp_path: Path, kind: str) -> None:
    """Blocks before the window are freed, while the draft's keys stay."""
    options = {"name": "MistralConfig", **WINDOWS[kind]}
    folder = save(random_model(make_config(options.pop("name"), vocab_size=261, **options)), tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(range(40, 40 + length))} for length in (1, 17, 30)]
    found = []
    for drafts in ({}, {"speculative_config": drafts_by(folder)}):
        with load(folder, **{**SIZES, "num_kv_blocks": 80}, **drafts) as llm:
            found.append([list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)])
            stats, notes = llm.engine.stats, llm.notes
            assert stats.num_free_blocks == stats.num_blocks
    assert found[0] == found[1]
    assert stats.speculation is not None and stats.speculation.acceptance_rate == 1.0
    assert any("in a group of its own" in note for note in notes) is (kind == "windows alone")


@pytest.mark.parametrize("options", [{}, {"cudagraph_mode": "PIECEWISE"}, {"max_num_seqs": 3}], ids=str)
def test_what_is_planned_is_captured(llama_dir: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """Of the model and of its draft, and nothing else, so that what is explained is what runs."""
    plans: dict[bool, GraphPlan] = {}

    def noting(calls: Any, loaded: Any, config: EngineConfig, *others: Any) -> Decided:
        found = decide_for(calls, loaded, config, *others)
        plans[config.is_draft] = found.plan
        return found

    monkeypatch.setattr(compile_model, "decide_for", noting)
    with load(llama_dir, speculative_config=drafts_by(llama_dir), **{**SIZES, **options}) as llm:
        graphs, drafter = llm.runner.graphs, getattr(llm.runner, "drafter", None)
        assert isinstance(drafter, Drafter)
        model, draft = plans[False], plans[True]
        for mode, planned in ((CUDAGraphMode.FULL, model.full), (CUDAGraphMode.PIECEWISE, model.piecewise)):
            assert set(graphs.descriptors(mode)) == set(planned)
        assert set(drafter.descriptors) == set(draft.full) and not draft.piecewise and not drafter.failed
    assert bool(draft.full) is ("cudagraph_mode" not in options)


def test_another_family_drafts(llama_dir: Path, tmp_path: Path) -> None:
    """With other heads, learned positions and biases: nothing but the vocabulary is common."""
    config = FAMILIES["opt"]()
    config.vocab_size = 261
    draft = save(random_model(config), tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    found = []
    for drafts in ({}, {"speculative_config": drafts_by(draft)}):
        with load(llama_dir, **SIZES, **drafts) as llm:
            (one,) = llm.generate([{"prompt_token_ids": [40, 41, 42]}], params, use_tqdm=False)
            found.append(list(one.outputs[0].token_ids))
    assert found[0] == found[1]


def test_the_model_and_its_draft_are_closed(llama_dir: Path) -> None:
    llm = LLM(
        llama_dir,
        device="cpu",
        compiler="eager",
        skip_tokenizer_init=True,
        num_kv_blocks=16,
        max_num_seqs=2,
        max_model_len=32,
        speculative_config=drafts_by(llama_dir),
    )
    llm.close()
    llm.close()
