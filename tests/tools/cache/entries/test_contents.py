from __future__ import annotations

import pytest

from piecegraph.cache.store.store import Store
from piecegraph.errors import CacheError
from piecegraph.tools.cache.entries.contents import ContentFile, Kind, content_files, load, safe_path
from tests.tools.cache.models import save, save_kernels, save_model


@pytest.mark.parametrize(
    ("role", "path"),
    [
        ("code", "code"),
        ("library/0", "library/0"),
        ("triton/a b/c.ptx", "triton/a_b/c.ptx"),
        ("../../etc/passwd", "etc/passwd"),
        ("/absolute", "absolute"),
        ("a//./b", "a/b"),
        ("..", "_"),
        ("", "_"),
        ("x" * 500, "x" * 100),
        ("new\nline\\", "new_line_"),
    ],
)
def test_no_role_is_a_path_out_of_its_folder(role: str, path: str) -> None:
    assert safe_path(role) == path


def test_json_is_laid_out_and_what_is_no_text_is_not_text() -> None:
    assert ContentFile("plan.json", Kind.DATA, b'{"a":[1]}').text == '{\n "a": [\n  1\n ]\n}\n'
    assert ContentFile("plan.json", Kind.DATA, b"{").text is None
    assert ContentFile("code.py", Kind.CODE, "ö".encode()).text == "ö"
    assert ContentFile("x", Kind.DATA, b"\xff").text is None
    assert ContentFile("x", Kind.DATA, b"a\x00b").text is None


def test_pieces_lie_in_folders_of_their_own(store: Store) -> None:
    """Blobs that torch unpickles are left out."""
    model = save_model(store)
    paths = [file.path for file in content_files(store, load(store, model.plan.key))]
    assert [path for path in paths if "/" not in path] == ["guards.json", "plan.json", "stitched.py"]
    assert {path.split("/")[0] for path in paths if "/" in path} == {"piece_0", "piece_0_size_8"}
    assert not [path for path in paths if "artifact" in path]


def test_kernels_are_the_files_their_blobs_are_made_of(store: Store) -> None:
    """A blob that is not an archive, perhaps of another version, is shown unchanged."""
    kernels = save_kernels(store, "1", "add")
    files = content_files(store, load(store, kernels.key))
    assert [file.path for file in files] == [
        "kernel/000000000000/add.cubin",
        "kernel/000000000000/add.json",
        "library/launcher/launcher.so",
    ]
    other = save(store, {"kind": "kernels"}, {"triton/0": b"other"}, {}, {})
    assert [(file.path, file.data) for file in content_files(store, load(store, other.key))] == [("triton/0", b"other")]


def test_a_piece_that_cannot_be_loaded_is_an_error_that_names_it(store: Store) -> None:
    model = save_model(store)
    store.delete(model.pieces[0].key)
    with pytest.raises(CacheError, match=f"entry {model.pieces[0].key[:12]} cannot be looked into: it is absent"):
        content_files(store, load(store, model.plan.key))
