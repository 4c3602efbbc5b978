"""Five hundred published schemas: most are compiled, and outputs of a model follow each of those.

`published_schemas.jsonl` has the 500 schemas of at most 1,500 characters whose names have the smallest SHA-256, of
JSONSchemaBench (Geng et al., 2025; MIT license), the set that llguidance publishes its results for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from piecegraph import LLM, SamplingParams, StructuredOutputsParams
from piecegraph.errors import RequestError
from tests.runner.byte_tokenizer import byte_tokenizer
from tests.runner.tiny_models import llama_config, random_model, save

SCHEMAS: dict[str, Any] = {
    record["name"]: record["schema"]
    for record in map(
        json.loads, (Path(__file__).parent / "published_schemas.jsonl").read_text(encoding="utf-8").splitlines()
    )
}
NUM_SHARDS = 2
NUM_OUTPUTS = 3

ENDS = {byte_tokenizer()(text).input_ids[0]: bias for text, bias in (('"', 10.0), ("]", 5.0), ("}", 5.0))} | {1: 8.0}
"""A bias for what ends strings, lists, objects and the output, or a random model writes on for thousands of tokens."""

NOT_FINISHED = {
    "Github_easy---o12619": "a text has to have a date somewhere, which a random model does not come to write",
    "Github_easy---o12622": "a list has at least 600 objects",
    "Github_medium---o14405": "a text has to have a date somewhere",
}
"""Schemas whose outputs a random model does not finish within 4,000 tokens."""

KEYWORDS = (
    "oneOf", '"not"', '"contains"', "dependencies", "dependentSchemas", "Unknown format", "min/maxProperties",
    "uniqueItems", "propertyNames", '"if"', "lookarounds", "not disjoint",
    "stack level",
)  # fmt: skip
"""What a refusal may name: features that llguidance does not have."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = save(
        random_model(llama_config(vocab_size=261, eos_token_id=1, max_position_embeddings=4096)),
        tmp_path_factory.mktemp("llama"),
    )
    byte_tokenizer().save_pretrained(str(folder))
    with LLM(folder, max_model_len=4096, max_num_seqs=64, num_kv_blocks=20_000, compiler="eager") as made:
        yield made


def form(schema: Any) -> dict[str, Any]:
    """Return the form of an output: without whitespace, of which a random model writes as much as it may."""
    return {"json": schema, "disable_any_whitespace": True}


def refusal(llm: LLM, schema: Any) -> str | None:
    """Return why the engine refuses a schema, or None."""
    try:
        llm.engine.grammars.compile(StructuredOutputsParams(**form(schema))).result()
    except RequestError as error:
        return str(error)
    return None


@pytest.mark.slow
def test_nine_of_ten_published_schemas_are_compiled(llm: LLM) -> None:
    """The others are refused, and the feature is named."""
    assert len(SCHEMAS) == 500
    refusals = [reason for schema in SCHEMAS.values() if (reason := refusal(llm, schema)) is not None]
    assert [reason for reason in refusals if not any(word in reason for word in KEYWORDS)] == []
    assert 0 < len(refusals) <= 50


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Possible set difference:FutureWarning")  # a pattern of theirs, in jsonschema
@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_outputs_follow_published_schemas(llm: LLM, shard: int) -> None:
    """Three finished outputs of each, in batches of many grammars, checked by another package."""
    names = [name for name in list(SCHEMAS)[shard::NUM_SHARDS] if name not in NOT_FINISHED]
    mine = {name: SCHEMAS[name] for name in names if refusal(llm, SCHEMAS[name]) is None}
    params = [
        SamplingParams(n=NUM_OUTPUTS, seed=7, max_tokens=4000, logit_bias=ENDS, structured_outputs=form(schema))
        for schema in mine.values()
    ]
    answers = llm.generate([[5, 6, 7]] * len(mine), params, use_tqdm=False)
    for (name, schema), answer in zip(mine.items(), answers, strict=True):
        assert len(answer.outputs) == NUM_OUTPUTS
        for output in answer.outputs:
            assert output.finish_reason == "stop", (name, output.finish_reason, output.text[:200])
            jsonschema.validate(json.loads(output.text), schema)
