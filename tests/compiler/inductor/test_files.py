"""Files of a piece: written where nobody else writes, and nowhere else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from piecegraph.compiler.inductor.files import LoadedPiece, PieceFiles, load_files


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "a/../../outside", ""])
def test_a_path_that_leads_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leads out of the folder"):
        load_files(PieceFiles(artifact=b"", triton={name: b"x"}), tmp_path / "triton")
    assert not list(tmp_path.rglob("outside"))


def test_bytes_that_are_no_artifact_are_an_error_and_nothing_more(tmp_path: Path) -> None:
    with pytest.raises((RuntimeError, AssertionError)):
        load_files(PieceFiles(artifact=b"nothing that torch wrote"), tmp_path)


def test_a_file_of_another_piece_is_not_written_over(tmp_path: Path) -> None:
    """It may be loaded: writing to a mapped library ends the process. The same bytes stay, others get a new file."""
    first, second = tmp_path / "launcher.so", tmp_path / "utils.so"
    for path in (first, second):
        path.write_bytes(b"loaded")
    files = PieceFiles(artifact=b"none of torch's", triton={"launcher.so": b"loaded", "utils.so": b"newer"})
    with first.open("rb") as is_first, second.open("rb") as is_second:
        with pytest.raises((RuntimeError, AssertionError)):
            load_files(files, tmp_path)
        assert (is_first.read(), is_second.read()) == (b"loaded", b"loaded")
        assert first.stat().st_ino == os.fstat(is_first.fileno()).st_ino
    assert second.read_bytes() == b"newer"


def module_with_kernels(path: Path, **cache_hashes: str) -> ModuleType:
    """As Inductor loads one: kernels that have run, with one launcher left."""
    module = ModuleType("generated")
    module.__file__ = str(path)
    for name, cache_hash in cache_hashes.items():
        kernel = CachingAutotuner.__new__(CachingAutotuner)
        kernel.launchers = [SimpleNamespace(cache_hash=cache_hash)]
        vars(module)[name] = kernel
    return module


def test_what_tuning_found_goes_with_the_kernels_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices, the kernels of this piece, and launchers; not those that were tried, nor those of other pieces."""
    inductor, triton = tmp_path / "inductor", tmp_path / "triton"
    written = {
        inductor / "ab" / "kernel.best_config": b'{"num_warps": 4}',
        inductor / "ab" / "kernel.py": b"# a wrapper",
        triton / "ONE" / "kernel.cubin": b"one",
        triton / "TWO" / "kernel.cubin": b"two",
        triton / "TRIED" / "kernel.cubin": b"tried",
        triton / "ELSEWHERE" / "kernel.cubin": b"of another piece",
        triton / "LAUNCHER" / "launcher.so": b"launcher",
    }
    for path, data in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    modules = [
        module_with_kernels(inductor / "ab" / "kernel.py", triton_poi_fused_0="ONE", triton_red_fused_1="TWO"),
        module_with_kernels(tmp_path / "elsewhere.py", triton_poi_fused_0="ELSEWHERE"),
    ]
    monkeypatch.setattr(PyCodeCache, "modules", modules)
    done = LoadedPiece(None, inductor, triton, PieceFiles(artifact=b"artifact", libraries={"0": b"library"}))
    found = done.with_tuning()
    assert set(found.inductor) == {"ab/kernel.best_config"}
    assert found.triton == {
        "ONE/kernel.cubin": b"one",
        "TWO/kernel.cubin": b"two",
        "LAUNCHER/launcher.so": b"launcher",
    }
    assert (found.artifact, found.libraries) == (b"artifact", {"0": b"library"})
    assert done.code() == "# a wrapper"


def test_a_kernel_that_was_kept_is_found_where_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton finds a kernel by a list of whole paths; what is kept has names alone, made paths again when loaded."""
    from triton.runtime.cache import FileCacheManager

    def triton_cache(folder: Path) -> FileCacheManager:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
        return FileCacheManager("ONE")

    inductor, tuned, later = tmp_path / "inductor", tmp_path / "tuned", tmp_path / "later"
    inductor.mkdir()
    cache = triton_cache(tuned)
    path = cache.put(b"binary", "triton_poi_fused_0.cubin")
    cache.put_group("triton_poi_fused_0.json", {"triton_poi_fused_0.cubin": path})
    modules = [module_with_kernels(inductor / "kernel.py", triton_poi_fused_0="ONE")]
    monkeypatch.setattr(PyCodeCache, "modules", modules)
    kept = LoadedPiece(None, inductor, tuned, PieceFiles(artifact=b"")).with_tuning().triton
    assert set(kept) == {"ONE/triton_poi_fused_0.cubin", "ONE/__grp__triton_poi_fused_0.json"}
    assert not any(str(tmp_path).encode() in data for data in kept.values())
    shutil.rmtree(tuned)
    with pytest.raises((RuntimeError, AssertionError)):
        load_files(PieceFiles(artifact=b"none of torch's", triton=kept), later)
    found = triton_cache(later).get_group("triton_poi_fused_0.json")
    assert found == {"triton_poi_fused_0.cubin": str(later / "ONE" / "triton_poi_fused_0.cubin")}
    assert Path(found["triton_poi_fused_0.cubin"]).read_bytes() == b"binary"
