"""Files of a piece: written where nobody else writes, and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from piecegraph.compiler.inductor_files import LoadedPiece, PieceFiles, load_files


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


def test_what_tuning_found_goes_with_its_kernels(tmp_path: Path) -> None:
    """Choices, the kernels chosen, and launchers; not those that were tried."""
    inductor, triton = tmp_path / "inductor", tmp_path / "triton"
    written = {
        inductor / "ab" / "kernel.best_config": b'{"num_warps": 4, "triton_cache_hash": "CHOSEN"}',
        inductor / "ab" / "kernel.py": b"# a wrapper",
        triton / "CHOSEN" / "kernel.cubin": b"chosen",
        triton / "TRIED" / "kernel.cubin": b"tried",
        triton / "LAUNCHER" / "launcher.so": b"launcher",
    }
    for path, data in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    done = LoadedPiece(None, inductor, triton, PieceFiles(artifact=b"artifact", libraries={"0": b"library"}))
    found = done.with_tuning()
    assert set(found.inductor) == {"ab/kernel.best_config"}
    assert found.triton == {"CHOSEN/kernel.cubin": b"chosen", "LAUNCHER/launcher.so": b"launcher"}
    assert (found.artifact, found.libraries) == (b"artifact", {"0": b"library"})
    assert done.code() == "# a wrapper"
