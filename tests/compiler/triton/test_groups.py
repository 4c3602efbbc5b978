"""What of Triton's lists of files travels."""

from __future__ import annotations

import json
from pathlib import Path

from piecegraph.compiler.triton.groups import with_absolute_paths, with_relative_paths

LIST = "ONE/__grp__kernel.json"


def test_a_list_travels_with_names_and_is_read_with_paths() -> None:
    written = json.dumps({"child_paths": {"kernel.ptx": "/a/ONE/kernel.ptx"}, "more": 1}).encode()
    kept = with_relative_paths(LIST, written)
    assert json.loads(kept) == {"child_paths": {"kernel.ptx": "kernel.ptx"}, "more": 1}
    assert json.loads(with_absolute_paths(LIST, kept, Path("/b/ONE"))) == {
        "child_paths": {"kernel.ptx": "/b/ONE/kernel.ptx"},
        "more": 1,
    }


def test_other_files_and_lists_of_another_form_stay_as_they_are() -> None:
    for name, data in (("ONE/kernel.json", b"{}"), (LIST, b"\xff"), (LIST, b"[]"), (LIST, b"{}")):
        assert with_relative_paths(name, data) == with_absolute_paths(name, data, Path("/b")) == data


def test_a_path_that_leads_elsewhere_leads_into_the_folder() -> None:
    data = json.dumps({"child_paths": {"kernel.ptx": "../../outside/kernel.ptx"}}).encode()
    assert json.loads(with_absolute_paths(LIST, data, Path("/b")))["child_paths"] == {"kernel.ptx": "/b/kernel.ptx"}
