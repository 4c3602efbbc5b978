"""The command line as a user runs it: processes of its own on a small random model, nothing replaced."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = [sys.executable, "-m", "piecegraph"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers over bytes, with a tokenizer that has a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = "{% for message in messages %}> {{ message['content'] }}\n{% endfor %}"
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=None,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, "run", *arguments, "--compiler", "eager"],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_an_answer(model: Path) -> None:
    """The prompt goes through the chat template; phases and the summary are on stderr, one object on stdout."""
    done = run(str(model), "-", "--json", "--max-tokens", "5", stdin="Hi")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["prompt_tokens"] == len("> Hi\n")
    assert len(record["token_ids"]) == 5
    assert record["finish_reason"] == "length"
    assert record["report"]["num_unique_pieces"] <= 4
    assert {"import", "load", "trace", "split", "compile", "stitch"} <= set(record["timings"]["phases"])
    assert "pieces: " in done.stderr
    assert "Warning" not in done.stderr
    assert "%|" not in done.stderr  # a library's progress bar


@pytest.mark.slow
def test_a_truncated_checkpoint(model: Path, tmp_path: Path) -> None:
    """Exit code 3 and one line that says what to do."""
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    done = run(str(broken), "Hi", "--quiet")
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "model.safetensors" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_interrupting_a_start(model: Path) -> None:
    """Ctrl-C reaches the whole process group; it ends with 130 and without a traceback."""
    arguments = [*PROGRAM, "run", str(model), "Hi", "--max-tokens", "200"]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        assert child.stderr is not None
        seen = [next(line for line in child.stderr if line.startswith("trace"))]
        time.sleep(0.2)
        os.killpg(child.pid, signal.SIGINT)
        _, rest = child.communicate(timeout=120)
    said = "".join([*seen, rest])
    assert child.returncode == 130, said
    assert said.endswith("interrupted\n")
    assert "Traceback" not in said
