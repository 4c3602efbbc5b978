from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from piecegraph.errors import CheckpointError, CompileError, PiecegraphError, RequestError, VerificationError
from piecegraph.runner.common.outputs import CompletionOutput, RequestOutput
from piecegraph.tools.cli import main
from piecegraph.tools.commands.run import LLM_DEFAULTS, Answer, looks_like_model, split_arguments

Fake = Any  # the class FakeLLM of conftest.py


def test_text_goes_to_stdout_and_everything_else_to_stderr(fake_llm: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    """stdout holds the answer alone; phases, pieces, seconds and speed are on stderr."""
    assert main(["run", "Where?"]) == 0
    out, err = capsys.readouterr()
    assert out == "Paris is nice.\n"
    assert err.startswith("import (torch, transformers)\n")
    assert "compile 1 of 3\n" in err
    assert "pieces: 61 -> 3 unique\n" in err
    assert re.search(r"seconds: import \d+\.\d\d, load 0\.50, compile 4\.25, first token \d", err)
    assert re.search(r"answer: 3 tokens, ended by stop, .* tokens/s, first token after", err)
    assert "note: a note" in err


def test_the_answer_streams(fake_llm: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step's new text is written and flushed when it comes."""
    written: list[str] = []

    class Spy(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stdout", Spy())
    assert main(["run", "Where?"]) == 0
    assert written == ["Paris", " is", " nice.", "\n"]


def test_several_answers_follow_each_other(
    fake_llm: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first answer streams; the others follow, each after an empty line."""
    answers = [
        CompletionOutput(index=index, text=text, token_ids=[7], finish_reason="length")
        for index, text in enumerate(("one", "two"))
    ]
    output = RequestOutput(request_id="0", prompt=None, prompt_token_ids=[7], finished=True, outputs=answers)
    monkeypatch.setattr(fake_llm, "stream", lambda *arguments: iter([output]))
    assert main(["run", "Where?", "--n", "2", "--temperature", "1"]) == 0
    out, err = capsys.readouterr()
    assert out == "one\n\ntwo\n"
    assert "answer: 2 tokens" in err
    assert "tokens/s" not in err  # all tokens came at once


def test_the_rate_is_of_the_tokens_after_the_first_output() -> None:
    """The first output may have several: one of each answer, or drafts that were accepted."""
    completions = [CompletionOutput(index=index, text="", token_ids=[7, 8, 9]) for index in range(2)]
    output = RequestOutput(request_id="0", prompt=None, prompt_token_ids=[7], finished=True, outputs=completions)
    answer = Answer(output=output, first_token_seconds=1.0, num_first_tokens=2, seconds=3.0)
    assert (answer.num_tokens, answer.tokens_per_second) == (6, 2.0)


def test_json_is_one_object(fake_llm: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--json", "Where?"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["model"] == "SmolLM2-135M-Instruct"
    assert record["text"] == "Paris is nice."
    assert record["token_ids"] == [0, 1, 2]
    assert record["finish_reason"] == "stop"
    assert record["prompt_tokens"] == 2
    assert [completion["index"] for completion in record["outputs"]] == [0]
    assert record["prompt_logprobs"] is None
    assert record["report"]["num_unique_pieces"] == 3
    assert record["timings"]["phases"]["compile"] == 4.25
    assert record["timings"]["tokens_per_second"] > 0
    assert record["notes"] == ["a note"]


def test_quiet_prints_the_answer_only(fake_llm: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--quiet", "Where?"]) == 0
    assert capsys.readouterr() == ("Paris is nice.\n", "")


def test_the_model_is_closed(fake_llm: Fake) -> None:
    main(["run", "--quiet", "Where?"])
    assert [llm.closed for llm in fake_llm.made] == [True]


def test_flags_reach_the_model_and_sampling(fake_llm: Fake) -> None:
    """Given flags are passed on; for others the defaults of `LLM` hold, and for sampling those of `run`."""
    flags = ["--max-tokens", "9", "--top-k", "4", "--seed", "3", "--dtype", "float32", "--enforce-eager"]
    assert main(["run", "org/model", "Where?", *flags]) == 0
    (llm,) = fake_llm.made
    assert llm.model == "org/model"
    assert llm.arguments == {**LLM_DEFAULTS, "dtype": "float32", "enforce_eager": True, "seed": 3}
    ((_, sampling),) = llm.asked
    assert (sampling.max_tokens, sampling.top_k, sampling.seed, sampling.temperature) == (9, 4, 3, 0.0)


SAMPLING = {
    "n": 2,
    "stop": ["a b", ","],
    "stop_token_ids": [0, 7],
    "bad_words": ["x y"],
    "allowed_token_ids": [4],
    "logit_bias": {4: 1.5, 5: -100.0},
    "skip_special_tokens": False,
    "ignore_eos": True,
    "logprobs": -1,
    "temperature": 0.5,
}


def test_flags_of_lists_and_switches(fake_llm: Fake) -> None:
    flags = ["--n", "2", "--stop", "a b", "--stop", ",", "--stop-token-ids", "0,7", "--bad-words", "x y"]
    flags += ["--allowed-token-ids", "4", "--logit-bias", "4:1.5,5:-100", "--no-skip-special-tokens", "--ignore-eos"]
    assert main(["run", "Where?", "--logprobs", "-1", "--temperature", "0.5", *flags]) == 0
    (llm,) = fake_llm.made
    ((_, sampling),) = llm.asked
    assert {name: getattr(sampling, name) for name in SAMPLING} == SAMPLING
    assert llm.arguments == {"runner": "generate", "max_num_seqs": 2}  # both answers at once


def test_lists_and_switches_in_a_config_file(fake_llm: Fake, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({**SAMPLING, "bad_words": "x y"}), encoding="utf-8")  # one text is a list of one
    assert main(["run", "Where?", "--config", str(file)]) == 0
    ((_, sampling),) = fake_llm.made[0].asked
    assert {name: getattr(sampling, name) for name in SAMPLING} == SAMPLING


def test_a_text_in_the_environment_is_one_text(fake_llm: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is not split into words."""
    monkeypatch.setenv("PIECEGRAPH_STOP", "a b")
    monkeypatch.setenv("PIECEGRAPH_LOGIT_BIAS", "4:1.5,5:-100")
    monkeypatch.setenv("PIECEGRAPH_DETOKENIZE", "true")
    assert main(["run", "Where?"]) == 0
    ((_, sampling),) = fake_llm.made[0].asked
    assert (sampling.stop, sampling.logit_bias) == (["a b"], {4: 1.5, 5: -100.0})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--logit-bias", "4"], "token:number pairs"),
        (["--stop-token-ids", "x"], "numbers with commas"),
        (["--top-p", "2"], "top_p=2.0; it must be above 0, at most 1"),
        (["--n", "2"], "n=2; it must be 1 when temperature is 0"),
    ],
)
def test_a_bad_sampling_value_is_refused_before_the_model_loads(
    fake_llm: Fake, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["run", "Where?", *flags]) in (2, 3)
    assert message in " ".join(capsys.readouterr().err.split())
    assert fake_llm.made == []


def test_the_chat_template_is_used_if_there_is_one(fake_llm: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    main(["run", "--quiet", "Where?"])
    main(["run", "--quiet", "--no-chat", "Where?"])
    monkeypatch.setattr(fake_llm.tokenizer, "chat_template", None)
    main(["run", "--quiet", "Where?"])
    assert [llm.asked[0][0] for llm in fake_llm.made] == [
        {"prompt_token_ids": [len("<user>Where?")]},
        "Where?",
        "Where?",
    ]


def test_chat_without_a_template_is_refused(
    fake_llm: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fake_llm.tokenizer, "chat_template", None)
    assert main(["run", "--chat", "Where?"]) == 3
    assert "no chat template" in capsys.readouterr().err
    assert fake_llm.made[0].closed


@pytest.mark.parametrize(
    ("argument", "is_model"),
    [
        ("org/model", True),
        ("weights.gguf", True),
        ("./missing", True),
        ("What is 1/2?", False),
        ("Hello", False),
        ("", False),
        ("-", False),
    ],
)
def test_a_lone_argument_is_a_model_if_it_looks_like_one(argument: str, is_model: bool) -> None:
    assert looks_like_model(argument) is is_model


def test_a_lone_argument_is_a_model_if_it_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert split_arguments("mine", None) == ("mine", None)
    assert split_arguments("yours", None) == (None, "yours")
    assert split_arguments("yours", "Where?") == ("yours", "Where?")


@pytest.mark.parametrize("arguments", [["-"], ["org/model", "-"], [], ["org/model"]])
def test_the_prompt_can_be_piped_in(arguments: list[str], fake_llm: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Two\nlines\n"))
    assert main(["run", "--quiet", "--no-chat", *arguments]) == 0
    assert fake_llm.made[0].asked[0][0] == "Two\nlines"


def test_no_prompt_is_a_usage_error_with_an_example(
    fake_llm: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["run"]) == 2
    assert 'piecegraph run "What is the capital of France?"' in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[""], ["-"]])
def test_an_empty_prompt_is_refused_before_anything_loads(
    arguments: list[str], fake_llm: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["run", *arguments]) == 3
    assert capsys.readouterr().err.startswith("error: the prompt is empty")
    assert fake_llm.made == []


def test_a_bad_sampling_value_is_refused_before_anything_loads(
    fake_llm: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "Where?", "--max-tokens", "-3"]) == 3
    assert capsys.readouterr().err.startswith("error: max_tokens=-3;")
    assert fake_llm.made == []


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (CheckpointError("model.safetensors is truncated. Download it again."), 3, "error: model.safetensors is"),
        (CompileError("no C++ compiler"), 5, "error: no C++ compiler"),
        (VerificationError("differs"), 6, "error: differs"),
        (PiecegraphError("failed"), 1, "error: failed"),
        (RequestError("too long"), 3, "error: too long"),
        (MemoryError(), 4, "error: out of memory"),
        (ZeroDivisionError("by zero"), 1, "error: ZeroDivisionError: by zero (unexpected; run again with --debug"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_a_failure_is_one_line_and_an_exit_code(
    error: BaseException,
    code: int,
    line: str,
    fake_llm: Fake,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No traceback is shown, whatever phase the failure comes in."""
    monkeypatch.setattr("signal.signal", lambda *args: None)
    for phase in ("raises", "raises_in_stream"):
        with monkeypatch.context() as patch:
            patch.setattr(fake_llm, phase, error)
            assert main(["run", "Where?"]) == code
        err = capsys.readouterr().err
        assert err.splitlines()[-1].startswith(line)
        assert "Traceback" not in err


def test_debug_shows_the_traceback(
    fake_llm: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fake_llm, "raises", CheckpointError("truncated"))
    assert main(["run", "Where?", "--debug"]) == 3
    assert "Traceback" in capsys.readouterr().err


def test_input_that_is_not_utf8_is_refused_in_one_line(
    fake_llm: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), encoding="utf-8"))
    assert main(["run", "-"]) == 3
    assert capsys.readouterr().err == (
        "error: standard input is not valid UTF-8: byte 0xff at offset 2 (invalid start byte). "
        "Convert it, for instance with iconv.\n"
    )
    assert main(["run", b"ab\xff".decode(errors="surrogateescape")]) == 3
    assert capsys.readouterr().err == (
        "error: the prompt is not valid Unicode: character 2 is '\\udcff', half of a surrogate pair. "
        "Give text in UTF-8.\n"
    )
    assert fake_llm.made == []


def test_an_adapter_brings_room_for_its_rank(
    fake_llm: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[Any] = []
    stream = fake_llm.stream

    def with_adapter(self: Any, *arguments: Any, lora_request: Any) -> Any:
        given.append(lora_request)
        return stream(self, *arguments)

    monkeypatch.setattr(fake_llm, "stream", with_adapter)
    written = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "rank_pattern": {"q_proj": 24}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(written), encoding="utf-8")
    assert main(["run", "Where?", "--lora", str(tmp_path)]) == 0
    assert (given[0].lora_name, given[0].lora_path) == (tmp_path.name, str(tmp_path))
    assert fake_llm.made[-1].arguments["enable_lora"] and fake_llm.made[-1].arguments["max_lora_rank"] == 24
    assert main(["run", "Where?", "--lora", str(tmp_path / "none")]) == 3
    assert "is not a folder" in capsys.readouterr().err
