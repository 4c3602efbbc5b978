"""Folders that others could have had a hand in are refused, each with what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from piecegraph.cache.trust.folder_trust import Access, check_folder
from piecegraph.errors import UntrustedCache


@pytest.mark.parametrize("mode", [0o770, 0o720, 0o702, 0o777, 0o1777])
def test_a_folder_others_write_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    for has_signing_key in (False, True):
        with pytest.raises(UntrustedCache, match=f"chmod go-w {tmp_path}"):
            check_folder(tmp_path, has_signing_key=has_signing_key)
    tmp_path.chmod(0o755)
    assert check_folder(tmp_path, has_signing_key=False) is Access.READ_WRITE


def test_a_link_to_a_folder_is_refused_and_says_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(UntrustedCache, match=f"PIECEGRAPH_CACHE_DIR to where it leads: {tmp_path / 'real'}"):
        check_folder(tmp_path / "link", has_signing_key=True)


def test_another_users_folder_needs_a_signing_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(UntrustedCache, match="chown -R"):
        check_folder(tmp_path, has_signing_key=False)
    assert check_folder(tmp_path, has_signing_key=True) is Access.READ_ONLY
