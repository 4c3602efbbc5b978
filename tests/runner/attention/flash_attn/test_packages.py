"""What counts as installed, over folders that stand for site-packages. Nothing in them is imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from piecegraph.runner.attention.flash_attn.packages import Family, installed


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that comes first, where the names are not taken yet."""
    for name in ("flash_attn", "flash_attn_2_cuda", "flash_attn_interface", "flash_attn_config", "cutlass"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def put(site: Path, *names: str, text: str = "raise AssertionError('imported')\n") -> None:
    for name in names:
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)


def test_flash_attn_2_is_its_compiled_part_of_a_version_we_call(site: Path) -> None:
    put(site, "flash_attn_2_cuda.py")
    for version, reason in (("2.8.3.post2", None), ("2.7.0", None), ("2.6.3", "2.6.3 is installed; we call 2.7 and")):
        put(
            site,
            "flash_attn-2.dist-info/METADATA",
            text=f"Metadata-Version: 2.1\nName: flash_attn\nVersion: {version}\n",
        )
        found = installed()[Family.FA2]
        assert found is None if reason is None else found is not None and reason in found


@pytest.mark.parametrize("flag", ["PAGEDKV", "VARLEN"])
def test_flash_attn_3_says_how_it_was_built(site: Path, flag: str) -> None:
    put(site, "flash_attn_interface.py")
    assert installed()[Family.FA3] is None
    config = {"build_flags": {f"FLASHATTENTION_DISABLE_{flag}": True}}
    put(site, "flash_attn_config.py", text=f"CONFIG = {config}\n")
    assert f"(FLASHATTENTION_DISABLE_{flag})" in (installed()[Family.FA3] or "")


def test_flash_attn_4_is_told_from_the_draft_in_flash_attn_2(site: Path) -> None:
    put(site, "flash_attn/__init__.py", "flash_attn/cute/interface.py", "cutlass/__init__.py")
    assert "is the draft inside flash-attn 2" in (installed()[Family.FA4] or "")
    put(site, "flash_attn/cute/paged_kv.py")
    assert installed()[Family.FA4] is None


def test_flash_attn_4_needs_its_compiler(site: Path) -> None:
    put(site, "flash_attn/cute/interface.py", "flash_attn/cute/paged_kv.py")
    found = installed()[Family.FA4]
    assert found is not None
    assert "nvidia-cutlass-dsl" in found


def test_what_is_missing_says_what_to_install(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(site)])
    found = dict(installed())
    found.pop(Family.TRITON)  # it may be imported already
    assert all(reason is not None and reason.startswith("not installed: ") for reason in found.values()), found
    assert "pip install flash-attn-4==4.0.0b36" in (found[Family.FA4] or "")
