"""A generation config names tokens that end a text, beside the tokenizer's, and defaults of sampling."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import GenerationConfig, PreTrainedModel

from piecegraph import LLM, SamplingParams
from piecegraph.errors import RequestError
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.models.generation_defaults import (
    GenerationDefaults,
    default_sampling_params,
    eos_token_ids,
    generation_config_of,
    sampling_defaults,
)
from tests.runner.byte_tokenizer import byte_tokenizer

TOKENIZER_EOS = 1


@pytest.mark.parametrize(
    ("eos", "found"), [(7, (7, TOKENIZER_EOS)), ([7, 1], (7, 1)), ([1, 7], (1, 7)), (1, (1,)), (None, (1,))]
)
def test_the_tokenizers_eos_ends_texts_too(llama: PreTrainedModel, eos: int | list[int] | None, found: object) -> None:
    config = GenerationConfig(eos_token_id=eos)
    assert eos_token_ids(config, llama, byte_tokenizer()) == found


def test_without_a_tokenizer_only_the_configs_eos_end_texts(llama: PreTrainedModel) -> None:
    """The model's config where there is no generation config, or where it names none."""
    assert eos_token_ids(GenerationConfig(eos_token_id=[7, 8]), llama, None) == (7, 8)
    assert eos_token_ids(GenerationConfig(), llama, None) == (1,)
    assert eos_token_ids(None, llama, None) == (1,)


def test_only_sampling_fields_become_defaults() -> None:
    config = GenerationConfig(temperature=0.6, top_k=20, max_new_tokens=7, eos_token_id=3, do_sample=True)
    assert sampling_defaults(config) == {"temperature": 0.6, "top_k": 20, "max_tokens": 7}
    assert sampling_defaults(GenerationConfig()) == sampling_defaults(None) == {}
    assert default_sampling_params({}) == SamplingParams()


def test_a_default_out_of_range_names_the_file() -> None:
    with pytest.raises(RequestError, match=r"generation_config.json: top_p=7; it must be above 0, .* pass sampling_"):
        default_sampling_params({"top_p": 7})


def test_the_files_defaults_can_be_left_or_overridden() -> None:
    """`generation_config="vllm"` leaves them, `override_generation_config` has the last word."""
    given = {"temperature": 0.6, "top_k": 20}
    assert GenerationDefaults().over(given) == given
    assert GenerationDefaults(kind="vllm").over(given) == {}
    override = GenerationDefaults(override={"top_k": 3, "max_new_tokens": 9})
    assert override.over(given) == {"temperature": 0.6, "top_k": 3, "max_tokens": 9}


def test_random_weights_come_with_the_folders_file(llama: PreTrainedModel, tmp_path: Path) -> None:
    """transformers does not read the file for random weights. Without a file the model's config is used."""
    source = ModelSource(model=str(tmp_path), load_format="dummy")
    assert generation_config_of(source, llama) is llama.generation_config
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 9}))
    assert sampling_defaults(generation_config_of(source, llama)) == {"top_k": 9}
    assert generation_config_of(ModelSource(model=str(tmp_path)), llama) is llama.generation_config


def test_a_model_with_a_generation_config_of_its_own(llama_dir: Path, tmp_path: Path) -> None:
    """`sampling_params=None` follows it, in every method; both EOS tokens end a text, and neither before
    `min_tokens`."""
    folder = shutil.copytree(llama_dir, tmp_path / "model")
    defaults = {"eos_token_id": 5, "temperature": 0.0, "max_new_tokens": 6, "top_k": 3}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    with LLM(folder, dtype="float32", compiler="eager", num_kv_blocks=16, max_num_seqs=4) as llm:
        expected = SamplingParams(temperature=0.0, max_tokens=6, top_k=3)
        assert llm.get_default_sampling_params() == expected
        ids = {"prompt_token_ids": [40, 41, 42]}
        (output,) = llm.generate(ids, expected)
        assert [one.outputs for one in llm.generate(ids)] == [output.outputs]
        assert list(llm.stream(ids))[-1].outputs == output.outputs
        assert len(llm.chat([{"role": "user", "content": "x"}])[0].outputs[0].token_ids) <= 6
        for eos in (5, TOKENIZER_EOS):
            forced = SamplingParams(temperature=0.0, max_tokens=6, min_tokens=2, logit_bias={eos: 1000.0})
            (ended,) = llm.generate(ids, forced)
            assert ended.outputs[0].token_ids[2:] == [eos]
            assert not {5, TOKENIZER_EOS}.intersection(ended.outputs[0].token_ids[:2])
            assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", None)
