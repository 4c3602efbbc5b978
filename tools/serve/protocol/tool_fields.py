"""The fields of a body that say what form its answer has: `response_format`, `tools` and `tool_choice`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class JsonSchemaFormat(BaseModel):
    """The schema of `response_format`."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """The form of the answer's text."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    @model_validator(mode="after")
    def _has_only_fields_of_its_type(self) -> ResponseFormat:
        allowed = {"json_schema": ("json_schema",), "structural_tag": ("structures", "triggers")}.get(self.type, ())
        for name in ("json_schema", "structures", "triggers"):
            if getattr(self, name) is not None and name not in allowed:
                raise ValueError(f"response_format of type {self.type} takes no {name}; leave it out.")
        return self

    def structured_outputs(self) -> dict[str, Any] | None:
        """Return the form as fields of `StructuredOutputsParams`; None: any text. Raises `ValueError`."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"json_object": True}
        if self.type == "structural_tag":
            return {"structural_tag": {"structures": self.structures, "triggers": self.triggers}}
        if self.json_schema is None:
            raise ValueError("response_format of type json_schema needs a json_schema.")
        return {"json": self.json_schema.schema_}


class Function(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A tool; functions are the only kind."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: Function


class NamedFunction(BaseModel):
    """The name of the function to call."""

    model_config = ConfigDict(extra="forbid")

    name: str


class NamedTool(BaseModel):
    """The tool to call."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"] = "function"
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def functions(tools: list[Tool], choice: ToolChoice) -> list[Mapping[str, Any]]:
    """Return the functions that `choice` allows. Raises `ValueError` if it names none of `tools`."""
    found = [tool.function.model_dump(exclude_unset=True) for tool in tools]
    if isinstance(choice, str):
        return list(found)
    named = [function for function in found if function["name"] == choice.function.name]
    if not named:
        raise ValueError(f"tool_choice names the function {choice.function.name!r}, which is not among the tools.")
    return list(named)
