"""A fresh process with a warm cache: the same bits, without Dynamo, Inductor, a compiler or any other process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from piecegraph.cache.store.store import Store
from piecegraph.environment import child_environment

Start = dict[str, Any]


def one_start(root: Path, model: str, *, forbid: bool = False, **options: Any) -> Start:
    """What tests/compiler/one_start.py prints; its errors are this test's."""
    asked = json.dumps({"model": model, "forbid": forbid, "options": options})
    environment = child_environment(
        {"PIECEGRAPH_CACHE": "on", "PIECEGRAPH_CACHE_DIR": str(root), "OMP_NUM_THREADS": "1"}
    )
    done = subprocess.run(
        [sys.executable, "-m", "tests.compiler.one_start", asked],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: Start = json.loads(done.stdout.splitlines()[-1])
    return found


def same(cold: Start, warm: Start) -> None:
    """A miss, then a hit that gives the same."""
    assert (cold["cache"]["state"], cold["cache"]["not_stored"]) == ("miss", "")
    assert warm["cache"]["state"] == "hit"
    for name in ("result", "matches", "pieces"):
        assert cold[name] == warm[name]
    assert cold["changed_environment"] == warm["changed_environment"] == []


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("start") / "cache"


@pytest.fixture(scope="module")
def cold(root: Path) -> Start:
    return one_start(root, "decoder", compile_sizes=[4])


@pytest.mark.slow
def test_a_warm_start_is_bitwise_the_compile(root: Path, cold: Start, tmp_path: Path) -> None:
    """C++ kernels, static pieces and all; the cache is a copy that lies elsewhere."""
    elsewhere = tmp_path / "moved" / "cache"
    shutil.copytree(root, elsewhere)
    same(cold, one_start(elsewhere, "decoder", forbid=True, compile_sizes=[4]))


@pytest.mark.slow
def test_a_damaged_library_is_built_again(root: Path, cold: Start, tmp_path: Path) -> None:
    """It is never loaded; the next start is warm again."""
    copy = tmp_path / "cache"
    shutil.copytree(root, copy)
    layout = Store.open(copy).layout
    entries = [row.file.entry for row in Store.open(copy).list()]
    library = next(
        ref for entry in entries if entry for role, ref in entry.blobs.items() if role.startswith("library/")
    )
    path = layout.blob(library.digest)
    path.write_bytes(b"\x7fELF" + path.read_bytes()[4:-8] + b"damaged!")
    mended = one_start(copy, "decoder", compile_sizes=[4])
    assert mended["cache"]["state"] == "miss"
    assert "blob corrupt" in mended["cache"]["reason"]
    assert mended["cache"]["loaded_pieces"] == cold["cache"]["loaded_pieces"] + len(cold["pieces"]) * 2 - 1
    assert mended["result"] == cold["result"]
    same({**cold, "cache": {**cold["cache"]}}, one_start(copy, "decoder", forbid=True, compile_sizes=[4]))


@pytest.mark.slow
def test_an_llm_answers_the_same_from_a_warm_cache(llama_folder: Path, tmp_path: Path) -> None:
    """The report lists the passes of the compile."""
    cold = one_start(tmp_path / "cache", str(llama_folder))
    warm = one_start(tmp_path / "cache", str(llama_folder), forbid=True)
    same(cold, warm)
    assert cold["matches"]["merge-projections"] > 0


@pytest.mark.gpu
def test_a_warm_start_on_a_gpu_compiles_no_kernel_of_ours(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention, preparation, the sampler and ops of passes are loaded, and Triton's own cache has none of them."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    cold, warm = (one_start(tmp_path / "cache", str(llama_folder), device="cuda") for _ in range(2))
    assert (cold["cache"]["state"], warm["cache"]["state"]) == ("miss", "hit")
    assert cold["result"] == warm["result"]
    assert cold["cache"]["compiled_kernels"] > 0
    assert warm["cache"]["compiled_kernels"] == 0
    assert warm["cache"]["loaded_kernels"] > 0
    ours = (
        "_prepare_inputs", "best_of_rows_kernel", "decode_kernel", "_act_mul", "rms_norm_kernel", "matvec_kernel",
        "rotary_tables_kernel",
    )  # fmt: skip
    assert not [path for path in (tmp_path / "triton").rglob("*.cubin") if path.stem in ours]


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.runner.byte_tokenizer import byte_tokenizer
    from tests.runner.tiny_models import llama_config, random_model, save

    folder = save(random_model(llama_config(vocab_size=261, eos_token_id=1)), tmp_path_factory.mktemp("llama"))
    byte_tokenizer().save_pretrained(str(folder))
    return folder
