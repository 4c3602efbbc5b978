"""Many small files as one blob, and nothing that leads out of a folder."""

from __future__ import annotations

import io
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.compiler.triton.kernel_pack import KernelFiles, pack, unpack

FILES = KernelFiles({"a1": {"add.json": b"{}", "add.cubin": b"\x00code"}, "b2": {"mul.json": b""}}, {"c3/x.so": b"so"})


def test_what_is_packed_comes_back() -> None:
    assert unpack(pack(FILES)) == FILES
    assert unpack(pack(KernelFiles())) == KernelFiles()


def test_equal_files_make_equal_bytes() -> None:
    backwards = KernelFiles({key: FILES.kernels[key] for key in reversed(list(FILES.kernels))}, FILES.libraries)
    assert pack(backwards) == pack(FILES)


def test_files_are_joined_and_told_apart() -> None:
    more = KernelFiles({"a1": {"add.json": b"new"}, "d4": {}}, {})
    joined = FILES | more
    assert set(joined.kernels) == {"a1", "b2", "d4"}
    assert joined.kernels["a1"] == {"add.json": b"new"}
    assert joined.without(FILES) == KernelFiles({"d4": {}}, {})
    assert not FILES.without(joined)


@pytest.mark.parametrize(
    "name",
    ["kernel/../x.json", "/kernel/a/x", "kernel/a", "kernel/a/b/c", "other/a/x", "kernel/a/..", "kernel//x", "../a/x"],
)
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr(name, b"data")
    with pytest.raises(ValueError, match="is not a file of a kernel"):
        unpack(target.getvalue())


def test_what_claims_to_be_compressed_is_refused() -> None:
    """One bit away from what `pack` writes."""
    data = bytearray(pack(FILES))
    at = data.index(b"PK\x01\x02") + 10  # the method, in the directory
    assert data[at] == zipfile.ZIP_STORED
    data[at] = zipfile.ZIP_DEFLATED
    with pytest.raises(ValueError, match="decompressing"):
        unpack(bytes(data))


@given(st.binary(max_size=64), st.integers(0, len(pack(FILES)) - 1))
def test_other_bytes_are_a_value_error_or_files(noise: bytes, at: int) -> None:
    whole = pack(FILES)
    for data in (noise, whole[:at], whole[:at] + noise + whole[at + len(noise) :]):
        try:
            found = unpack(data)
        except ValueError:
            continue
        assert isinstance(found, KernelFiles)
