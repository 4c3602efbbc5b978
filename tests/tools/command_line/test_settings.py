from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from piecegraph import environment
from piecegraph.errors import ConfigError
from piecegraph.tools.cli import main
from piecegraph.tools.command_line.settings import known_variables, read_config
from piecegraph.tools.commands.run import LLM_DEFAULTS

Fake = Any  # the class FakeLLM of conftest.py


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.toml", 'model = "org/model"\nmax-tokens = 5\nenforce_eager = true\n'),
        ("c.yaml", "model: org/model\nmax_tokens: 5\nenforce-eager: true\n"),
    ],
)
def test_a_config_file_sets_what_is_not_given(name: str, text: str, tmp_path: Path, fake_llm: Fake) -> None:
    """A file names options and arguments, with either spelling; the prompt comes as the second argument."""
    (tmp_path / name).write_text(text)
    assert main(["run", "org/model", "Where?", "--config", str(tmp_path / name), "--quiet"]) == 0
    (llm,) = fake_llm.made
    assert llm.asked[0][1].max_tokens == 5
    assert llm.arguments == {**LLM_DEFAULTS, "enforce_eager": True}


def test_the_line_beats_the_environment_and_that_the_file(
    tmp_path: Path, fake_llm: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.toml"
    file.write_text("max_tokens = 5\ntop_k = 5\nseed = 5\n")
    monkeypatch.setenv("PIECEGRAPH_MAX_TOKENS", "6")
    monkeypatch.setenv("PIECEGRAPH_TOP_K", "6")
    assert main(["run", "Where?", "--config", str(file), "--quiet", "--max-tokens", "7"]) == 0
    sampling = fake_llm.made[0].asked[0][1]
    assert (sampling.max_tokens, sampling.top_k, sampling.seed) == (7, 6, 5)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.toml", "max_token = 5", "sets 'max_token', which piecegraph run does not take. Did you mean 'max_tokens'?"),
        ("c.toml", 'max_tokens = "many"', "sets max_tokens to 'many'"),
        ("c.toml", "max_tokens = ", "cannot be read"),
        ("c.yaml", "a: [", "cannot be read"),
        ("c.yaml", "- 1", "holds a list; a mapping"),
        ("c.ini", "", "neither .toml, .yaml nor .yml"),
        ("c.toml", "a = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("c.yaml", "a: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("c.yaml", "max_tokens: [1, 2]", "sets max_tokens to a value of type list"),
        ("c.yaml", "model: [a, b]", "sets model to a value of type list: it must be text"),
        ("c.yaml", "model: {a: b}", "sets model to a value of type dict: it must be text"),
    ],
)
def test_a_bad_config_file_is_refused(
    name: str, text: str, message: str, tmp_path: Path, fake_llm: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    assert main(["run", "Where?", "--config", str(tmp_path / name)]) == 3
    assert message in capsys.readouterr().err
    assert fake_llm.made == []


def test_a_missing_config_file_is_a_usage_error(fake_llm: Fake) -> None:
    assert main(["run", "Where?", "--config", "missing.toml"]) == 2


def test_an_unknown_variable_is_refused_with_the_nearest(
    fake_llm: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIECEGRAPH_MAX_TOKNS", "5")
    assert main(["run", "Where?"]) == 3
    assert "PIECEGRAPH_MAX_TOKNS, which nothing reads. Did you mean 'PIECEGRAPH_MAX_TOKENS'?" in capsys.readouterr().err


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("")
    assert read_config(tmp_path / "c.yaml") == {}
    with pytest.raises(ConfigError):
        read_config(tmp_path / "missing.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_tokens: 1979-05-27", "a value of type date: it must be a whole number."),
        ("max_tokens: true", "sets max_tokens to a value of type bool: it must be a whole number."),
        ("max_tokens: 3.7", "sets max_tokens to a value of type float: it must be a whole number."),
        ("temperature: [1]", "a value of type list: it must be a number."),
    ],
)
def test_values_of_another_kind_are_refused_in_plain_words(
    text: str, message: str, tmp_path: Path, fake_llm: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text(text)
    assert main(["run", "Where?", "--config", str(tmp_path / "c.yaml"), "--quiet"]) == 3
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("PIECEGRAPH_", "1", "a prefix without the name of a setting"), ("PIECEGRAPH_CACHE_DIR", "", "is empty")],
)
def test_an_empty_name_and_an_empty_cache_folder_are_refused(
    name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    assert main(["cache", "ls"]) == 3
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", [["cache", "ls"], ["compile", "m"]])
def test_an_empty_cache_dir_is_refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--cache-dir", ""]) == 2
    assert "it is empty; name a folder" in capsys.readouterr().err


def test_every_variable_of_ours_is_known() -> None:
    """Each name that `environment` gives to what it reads."""
    named = [value for name, value in vars(environment).items() if name.isupper() and isinstance(value, str)]
    ours = {name for name in named if name.startswith(environment.PREFIX) and name != environment.PREFIX}
    assert len(ours) > 5
    assert ours <= set(known_variables())
