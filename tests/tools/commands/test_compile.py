"""Tests that a start with weights finds what `piecegraph compile` puts into a cache, to the bit."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph.cache.store.store import Store
from piecegraph.cache.trust.key_files import create_key_pair
from piecegraph.cache.trust.key_pair import PrivateKey
from piecegraph.compiler.common.report import CacheReport, CompileReport, StaticPieceRow
from piecegraph.environment import child_environment
from piecegraph.errors import ConfigError
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.startup.compile_ahead import CompiledAhead
from piecegraph.tools.cache.terminal.place import Place
from piecegraph.tools.cli import main
from piecegraph.tools.command_line.options import COMPILE_FLAGS, LLM_FLAGS
from piecegraph.tools.commands.compile import open_to_fill
from tests.tools.cache.models import save_model

PROGRAM = [sys.executable, "-m", "piecegraph"]
SOMEONE = 60001
"""A user that needs no account."""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become others")


def run(program: list[str], **variables: str) -> str:
    """Run the command and return its stdout; its errors are this test's."""
    environment = child_environment({"PIECEGRAPH_CACHE": "on", "OMP_NUM_THREADS": "1", **variables})
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@dataclass(frozen=True)
class Image:
    """A cache that was filled from a config alone, for others to read, and the model with its weights."""

    model: Path
    device: str
    cache: Path
    key: Path
    record: dict[str, Any]

    @property
    def sizes(self) -> list[int]:
        """The static sizes. On a GPU, tuned pieces differ from compile to compile."""
        return [4] if self.device == "cpu" else []

    def filled(self) -> dict[str, Any]:
        """Return what `piecegraph compile` prints if it is run once more."""
        found: dict[str, Any] = json.loads(run(self.command))
        return found

    @property
    def command(self) -> list[str]:
        options = [
            "--device",
            self.device,
            "--dtype",
            "float32",
            "--compile-sizes",
            "4" if self.device == "cpu" else "0",
            "--max-num-seqs",
            "4",  # as `one_start.py` has it: kernels depend on it
        ]
        where = ["--cache-dir", str(self.cache), "--signing-key", str(self.key)]
        return [*PROGRAM, "compile", str(self.model), *options, *where, "--json", "--quiet"]

    @property
    def options(self) -> dict[str, Any]:
        """The options of the `LLM` for which the cache was filled."""
        return {"device": self.device, "compile_sizes": self.sizes}

    def start(self, cache: Path, *, forbid: bool) -> dict[str, Any]:
        asked = {"model": str(self.model), "forbid": forbid, "options": self.options}
        program = [sys.executable, "-m", "tests.compiler.one_start", json.dumps(asked)]
        public = {"PIECEGRAPH_SIGNING_KEY_FILE": f"{self.key}.pub", "PIECEGRAPH_CACHE_DIR": str(cache)}
        found: dict[str, Any] = json.loads(run(program, **public).splitlines()[-1])
        return found


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def image(request: pytest.FixtureRequest) -> Iterator[Image]:
    """A cache filled before there are weights, by a user with a strict umask, in a folder everybody can read."""
    pytest.importorskip("cryptography")
    from tests.runner.byte_tokenizer import byte_tokenizer
    from tests.runner.tiny_models import llama_config, random_model, save

    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        model, key = Path(folder) / "model", Path(folder) / "image.key"
        llama = random_model(llama_config(vocab_size=261, eos_token_id=1, num_hidden_layers=1))
        llama.config.architectures = [type(llama).__name__]
        llama.config.save_pretrained(str(model))
        assert not list(model.glob("*.safetensors"))
        create_key_pair(key)
        before = os.umask(0o077)
        try:
            image = Image(model, request.param, Path(folder) / "cache", key, {})
            image = dataclasses.replace(image, record=image.filled())
        finally:
            os.umask(before)
        save(llama, model)
        byte_tokenizer().save_pretrained(str(model))
        for path in model.iterdir():
            path.chmod(0o644)
        yield image


@pytest.mark.slow
def test_it_is_what_a_cold_start_would_have_made(image: Image, tmp_path: Path) -> None:
    """Its pieces are found under the same key without Dynamo, Inductor or another process, the same to the bit."""
    warm, cold = image.start(image.cache, forbid=True), image.start(tmp_path / "cache", forbid=False)
    assert warm["cache"]["state"] == "hit"
    assert (cold["cache"]["state"], cold["cache"]["not_stored"]) == ("miss", "")
    assert warm["cache"]["key"] == cold["cache"]["key"] == image.record["key"]
    assert warm["matches"]["merge-projections"] > 0  # weights that a fake one only stood for
    for name in ("result", "matches", "pieces"):
        assert warm[name] == cold[name]


@pytest.mark.slow
def test_it_is_told_what_was_made_and_for_which_machine(image: Image) -> None:
    record = image.record
    assert (record["state"], record["title"].split()[0]) == ("compiled", "LlamaForCausalLM")
    assert record["num_unique_pieces"] == len(
        [row for row in record["entries"] if row["name"] != "plan" and row["size"] is None]
    )
    assert {row["size"] for row in record["entries"]} == {None, *image.options["compile_sizes"]}
    assert sum(row["bytes"] for row in record["entries"]) >= record["bytes"] > 0
    assert record["machine"]["device"] == image.device
    assert record["build"]["torch"]["version"] == torch.__version__
    assert record["settings"]["num_threads"] == 1
    assert (record["signing_key"], record["notes"]) == (str(image.key), [])


@pytest.mark.slow
def test_a_cached_model_is_not_compiled_again(image: Image) -> None:
    again = image.filled()
    assert again == {**image.record, "state": "already compiled"}


@pytest.mark.slow
@as_root
def test_another_user_starts_from_it_with_the_public_key(image: Image) -> None:
    """The user, who has no account, writes nothing to the cache and compiles nothing."""
    asked = {"model": str(image.model), "options": image.options, "root": str(image.cache), "user": SOMEONE}
    variables = {"PIECEGRAPH_SIGNING_KEY_FILE": f"{image.key}.pub", "PIECEGRAPH_CACHE_DIR": str(image.cache)}
    program = [sys.executable, "-m", "tests.tools.starts_of_two_users", json.dumps(asked)]
    found = json.loads(run(program, **variables).splitlines()[-1])
    if found["theirs"] and "cannot_read" in found["theirs"]:
        pytest.skip(f"another user cannot start this interpreter: {found['theirs']['cannot_read']}")
    assert found["theirs"] is not None, "their start failed"
    assert (found["ours"]["user"], found["theirs"]["user"]) == (0, SOMEONE)
    assert found["ours"]["cache"]["state"] == found["theirs"]["cache"]["state"] == "hit"
    assert found["ours"]["result"] == found["theirs"]["result"]
    assert found["is_unchanged"]


@dataclass
class Compiling:
    """A stand-in for compiling that records its arguments and what is then in the cache."""

    capsys: pytest.CaptureFixture[str]
    asked: list[tuple[EngineConfig, Store, bool]]
    err: str = ""
    was_cached: bool = False
    static: tuple[StaticPieceRow, ...] = ()

    def __call__(self, config: EngineConfig, store: Store, *, anew: bool, on_phase: Any) -> CompiledAhead:
        self.asked.append((config, store, anew))
        model = save_model(
            store,
            build={"torch": {"version": "2.13.0"}, "triton": "3.9.0", "transformers": "5.17.0", "python": "CPython 3"},
            settings={"num_threads": 2},
        )
        report = CompileReport(
            compiler="inductor",
            num_pieces=3,
            num_unique_pieces=1,
            num_split_ops=2,
            trace_seconds=0.0,
            split_seconds=0.0,
            compile_seconds=0.0,
            stitch_seconds=0.0,
            static_compile_seconds=0.0,
            static_tune_seconds=0.0,
            pieces=(),
            unique_pieces=(),
            static_pieces=self.static,
            cache=CacheReport(state="hit" if self.was_cached else "miss", loaded_pieces=2 if self.was_cached else 1),
        )
        return CompiledAhead(key=model.plan.key, was_cached=self.was_cached, report=report, notes=("a note",))

    def run(self, *args: str, code: int = 0) -> str:
        self.capsys.readouterr()
        assert main(["compile", *args]) == code
        out, self.err = self.capsys.readouterr()
        return out


@pytest.fixture
def compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Compiling:
    made = Compiling(capsys, [])
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr("piecegraph.runner.startup.compile_ahead.compile_ahead", made)
    monkeypatch.setattr("piecegraph.tools.command_line.quiet.quiet_libraries", lambda: None)
    return made


def test_the_table_goes_to_stdout_and_phases_to_stderr(compiling: Compiling, tmp_path: Path) -> None:
    lines = compiling.run("a/model", "--device", "cpu").splitlines()
    assert lines[0] == "tiny 134.5M bfloat16: compiled, 3 pieces, 1 unique"
    assert [line.split()[0] for line in lines[1:5]] == ["entry", "plan", "piece_0", "piece_0_size_8"]
    assert lines[5].endswith(f"in {tmp_path / 'cache'} (set by PIECEGRAPH_CACHE_DIR)")
    assert lines[6:] == [
        "for      cpu, x86_64 AVX2 (flags ffffffffffffffff)",
        "         torch 2.13.0, triton 3.9.0, transformers 5.17.0, CPython 3; 2 threads",
        "notes    a note",
        "         pieces that were there already: 1",
    ]
    assert compiling.err.startswith("import")
    compiling.run("a/model", "--device", "cpu", "--quiet")
    assert compiling.err == ""


def test_a_cached_model_is_reported_as_cached(compiling: Compiling) -> None:
    compiling.was_cached = True
    assert compiling.run("a/model").startswith("tiny 134.5M bfloat16: already compiled")
    record = json.loads(compiling.run("a/model", "--json"))
    assert (record["state"], record["notes"]) == ("already compiled", ["a note"])
    compiling.run("a/model", "--force")
    assert [anew for _, _, anew in compiling.asked] == [False, False, True]


def test_a_size_without_a_static_piece_is_reported(compiling: Compiling) -> None:
    row = StaticPieceRow(
        unique=0, size=8, key="", is_used=False, kernels=None, compile_seconds=0, tune_seconds=0, note="too large"
    )
    compiling.static = (row, dataclasses.replace(row, size=4, is_used=True))
    notes = json.loads(compiling.run("a/model", "--json"))["notes"]
    assert notes[2:] == ["size 8: piece_0 runs the dynamic piece: too large"]


def test_flags_are_those_of_a_start(compiling: Compiling) -> None:
    """It takes every flag that `run` has, with the same meaning."""
    from piecegraph.tools.commands.compile import command

    taken = {param.name for param in command.params}
    assert {flag.name for flag in (*LLM_FLAGS, *COMPILE_FLAGS)} <= taken
    sizes = ("--compile-sizes", "1,2", "--max-model-len", "64")
    compiling.run("a/model", "--dtype", "bfloat16", *sizes, "--passes", "none", "--load-format", "dummy")
    ((config, _, _),) = compiling.asked
    assert (config.source.model, config.source.load_format) == ("a/model", "dummy")
    assert (config.dtype, config.compile_sizes, config.max_model_len) == ("bfloat16", (1, 2), 64)
    assert config.compile.passes == ()


def test_with_a_signing_key_it_is_for_others(compiling: Compiling, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    key = tmp_path / "image.key"
    create_key_pair(key)
    assert f"signed   with {key}; readable by other users" in compiling.run("a/model", "--signing-key", str(key))
    ((_, store, _),) = compiling.asked
    assert isinstance(store.signer, PrivateKey)
    assert {path.stat().st_mode & 0o044 for path in (tmp_path / "cache").rglob("*")} == {0o044}
    assert not (tmp_path / "data").exists()  # a key of one's own is not needed


def test_without_one_it_is_ones_own(compiling: Compiling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds also where a key to read with is set."""
    pytest.importorskip("cryptography")
    public = create_key_pair(tmp_path / "image.key")
    monkeypatch.setenv("PIECEGRAPH_SIGNING_KEY_FILE", str(public))
    assert "signed" not in compiling.run("a/model")
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "cache" / "v1").rglob("*")} == {0}


def test_a_public_key_cannot_sign(compiling: Compiling, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    public = create_key_pair(tmp_path / "image.key")
    assert compiling.run("a/model", "--signing-key", str(public), code=3) == ""
    assert f"--signing-key {public} is a public key, which verifies and cannot sign" in compiling.err
    assert not compiling.asked
    with pytest.raises(ConfigError, match="is a public key"):
        open_to_fill(Place(tmp_path / "cache", "a test", public, publish=True))


@pytest.mark.parametrize("what", ["a missing key", "no key"])
def test_a_key_that_is_none(what: str, compiling: Compiling, tmp_path: Path) -> None:
    key = tmp_path / "image.key"
    if what == "no key":
        key.write_text("hello")
    compiling.run("a/model", "--signing-key", str(key), code=2 if what == "a missing key" else 1)
    assert not compiling.asked


def test_a_gpu_that_is_not_here(compiling: Compiling, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the same where passes are dropped from those that pay on that GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for more in ((), ("--passes", "-fuse-moe")):
        assert compiling.run("a/model", "--device", "cuda", *more, code=5) == ""
        assert "generated, and measured, on that GPU" in compiling.err


def test_a_folder_that_others_write_is_refused(compiling: Compiling, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    assert compiling.run("a/model", code=1) == ""
    assert "chmod" in compiling.err
