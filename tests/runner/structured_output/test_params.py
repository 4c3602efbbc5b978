from __future__ import annotations

from typing import Any

import pytest

from piecegraph.errors import RequestError
from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.structured_output.params import StructuredOutputsParams, as_structured_outputs


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "nothing is given; give exactly one of json, regex"),
        ({"json": {}, "regex": "a"}, "json and regex are given"),
        ({"json_object": False}, "nothing is given"),
        ({"regex": 7}, r"regex=7; it must be a string"),
        ({"json": 7}, "json=7; it must be a JSON schema"),
        ({"choice": []}, r"choice=\[\]; it must be strings"),
        ({"choice": "yes"}, "choice='yes'; it must be strings"),
        ({"choice": ["a", ""]}, "none of them empty"),
        ({"structural_tag": 7}, "structural_tag=7; it must be a dictionary"),
        ({"json": {}, "disable_any_whitespace": "no"}, "it must be true or false"),
    ],
)
def test_bad_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        StructuredOutputsParams(**fields)


def test_a_mapping_stands_for_the_parameters() -> None:
    """A server's body is one; an unknown name is refused with the nearest."""
    params = SamplingParams(structured_outputs={"regex": "a+"})
    assert params.structured_outputs == StructuredOutputsParams(regex="a+")
    assert params.clone() == params
    assert as_structured_outputs({"choice": ["a"]}).choice == ["a"]
    with pytest.raises(RequestError, match="'jsn', which it does not take. Did you mean 'json'"):
        SamplingParams(structured_outputs={"jsn": {}})
    with pytest.raises(RequestError, match="it must be StructuredOutputsParams"):
        SamplingParams(structured_outputs="json")  # type: ignore[arg-type]


def test_a_schema_is_the_callers_no_more() -> None:
    schema: dict[str, Any] = {"type": "object"}
    params = StructuredOutputsParams(json=schema)
    digest = params.digest()
    schema["type"] = "array"
    assert params.json_schema == {"type": "object"}
    assert params.digest() == digest


def test_digests_tell_parameters_apart() -> None:
    """Of all fields; equal parameters share one."""
    made: list[dict[str, Any]] = [
        {"json": {"type": "object"}},
        {"json": {"type": "array"}},
        {"json": {"type": "object"}, "disable_any_whitespace": True},
        {"json_object": True},
        {"regex": "a"},
        {"grammar": "a"},
        {"choice": ["a"]},
        {"choice": ["a", "b"]},
    ]
    digests = [StructuredOutputsParams(**fields).digest() for fields in made]
    assert len(set(digests)) == len(made)
    assert digests == [StructuredOutputsParams(**fields).digest() for fields in made]
