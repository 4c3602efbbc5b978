from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from piecegraph.errors import ConfigError
from piecegraph.tools.cli import main
from piecegraph.tools.run_command import LLM_DEFAULTS
from piecegraph.tools.settings import read_config

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
