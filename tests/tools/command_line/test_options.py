from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re

import click
import pytest

from piecegraph.config import CompileConfig
from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.tools.command_line.options import (
    COMPILE_FLAGS,
    LLM_FLAGS,
    NEIGHBOURS,
    PASS_NAMES,
    SAMPLING_FLAGS,
    Flag,
    with_flags_repeated,
)
from piecegraph.tools.commands.run import command


@pytest.mark.parametrize("flag", SAMPLING_FLAGS, ids=lambda flag: flag.name)
def test_a_sampling_flag_is_a_field_of_sampling_params(flag: Flag) -> None:
    """The flag has the field's name and default."""
    fields = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    assert flag.name in fields
    assert fields[flag.name] == flag.default


@pytest.mark.skipif(importlib.util.find_spec("piecegraph.runner.llm") is None, reason="the runner has no LLM yet")
@pytest.mark.parametrize("flag", LLM_FLAGS, ids=lambda flag: flag.name)
def test_a_model_flag_is_an_argument_of_llm(flag: Flag) -> None:
    """The flag has the argument's name and default."""
    from piecegraph.runner.llm import LLM

    parameters = inspect.signature(LLM).parameters
    assert flag.name in parameters
    assert parameters[flag.name].default == flag.default


@pytest.mark.parametrize("flag", COMPILE_FLAGS, ids=lambda flag: flag.name)
def test_a_compile_flag_is_a_field_of_compile_config(flag: Flag) -> None:
    """The flag has the field's name and default."""
    fields = {field.name: field.default for field in dataclasses.fields(CompileConfig)}
    assert flag.name in fields
    assert fields[flag.name] == flag.default


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("merge-projections", ("merge-projections",)),
        ("-merge-projections", ("-merge-projections",)),
        ("none", ()),
        (["merge-projections"], ("merge-projections",)),
        ([], ()),
    ],
)
def test_passes_from_text_or_from_a_files_list(given: object, expected: tuple[str, ...]) -> None:
    assert PASS_NAMES.convert(given, None, None) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("merge-projection", "Did you mean 'merge-projections'?"),
        ("none,merge-projections", "there is no pass 'none'"),
        ("-tail", "pass 'tail' is named 'select-rows-early' now"),
        ("merge-projections,-merge-projections", "both names passes and drops some"),
    ],
)
def test_passes_there_are_none_of_are_refused(given: str, message: str) -> None:
    with pytest.raises(click.BadParameter, match=re.escape(message)):
        PASS_NAMES.convert(given, None, None)


def test_a_neighbours_spelling_leads_to_an_option_we_have() -> None:
    ours = {spelling for param in command.params for spelling in (*param.opts, *param.secondary_opts)}
    for theirs, meant in NEIGHBOURS.items():
        assert theirs not in ours, f"{theirs} is an option of ours"
        assert meant in ours or meant.startswith("the argument")


OF_THE_LIBRARY = {"extra_args", "flat_logprobs", "output_kind", "structured_outputs"}
"""Objects and forms of outputs, which a command line neither gives nor shows."""


def test_every_field_of_sampling_params_is_a_flag() -> None:
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert {flag.name for flag in SAMPLING_FLAGS} == fields - OF_THE_LIBRARY


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (
            ["m", "--size", "1", "8", "--mode", "full", "none"],
            ["m", "--size", "1", "--size", "8", "--mode", "full", "--mode", "none"],
        ),
        (["--size", "1", "8", "m"], ["--size", "1", "--size", "8", "m"]),
        (["--size", "1", "--size", "8", "m"], ["--size", "1", "--size", "8", "m"]),
        (["--one", "1", "8", "--size=3", "4"], ["--one", "1", "8", "--size=3", "4"]),
        (["--size"], ["--size"]),
        (["--size", "none", "8"], ["--size", "none", "--size", "8"]),
        (["--text", "a", "b", "--text", "c"], ["--text", "a", "b", "--text", "c"]),  # b may be an argument
        (["--size", "1", "-1"], ["--size", "1", "-1"]),
    ],
)
def test_one_flag_takes_several_values(written: list[str], read: list[str]) -> None:
    """A flag takes as many words as can be values; click refuses a wrong first one."""
    params = [
        click.Option(["--size"], type=click.IntRange(min=1), multiple=True),
        click.Option(["--mode"], type=click.Choice(["full", "none"]), multiple=True),
        click.Option(["--one"], type=int),
        click.Option(["--text"], multiple=True),
    ]
    assert with_flags_repeated(params, written) == read
