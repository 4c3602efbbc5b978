"""The choice of a compile's cache, and problems of the cache, which never reach the caller as errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from piecegraph.cache.store.entry import Entry
from piecegraph.cache.store.store import NotSaved, Saved
from piecegraph.cache.trust.folder_trust import Access
from piecegraph.compiler.store.compile_cache import CompileCache
from piecegraph.errors import ConfigError
from tests.compiler.store.small_models import Small, call_by_name, compiled, config


@pytest.mark.parametrize(
    ("variable", "option", "keeps", "reason"),
    [
        ("on", True, True, ""),
        (None, True, True, ""),
        ("pieces", True, "pieces", "PIECEGRAPH_CACHE=pieces"),
        ("off", True, False, "PIECEGRAPH_CACHE=off"),
        ("on", "pieces", "pieces", "cache='pieces'"),
        ("on", False, False, "cache=False"),
        ("pieces", False, False, "cache=False"),
        ("off", "pieces", False, "PIECEGRAPH_CACHE=off"),
    ],
)
def test_the_environment_can_only_restrict_the_cache(
    variable: str | None, option: Any, keeps: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIECEGRAPH_CACHE", raising=False)
    if variable is not None:
        monkeypatch.setenv("PIECEGRAPH_CACHE", variable)
    cache = CompileCache.open(config(cache=option, cache_dir=str(tmp_path / "cache")))
    assert (cache.mode, cache.reason) == (keeps, reason)
    assert cache.stores_plans is (keeps is True)
    assert (cache.store is None) is (keeps is False)
    assert not (tmp_path / "cache").exists()


def test_an_unknown_cache_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEGRAPH_CACHE", "of")
    with pytest.raises(ConfigError, match="PIECEGRAPH_CACHE='of'; it is one of off, pieces, on. Did you mean 'off'?"):
        CompileCache.open(config())
    with pytest.raises(ConfigError, match="cache='no'; it is True, False or 'pieces'"):
        config(cache="no")


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"compiler": "eager"}, "eager pieces are not stored"), ({"dump_dir": "x"}, "dump_dir shows a compile")],
)
def test_some_compiles_have_no_cache(whole_cache: Path, options: dict[str, Any], reason: str) -> None:
    cache = CompileCache.open(config(**options))
    assert (cache.store, cache.reason) == (None, reason)


def test_a_folder_others_may_write_to_is_a_warning(whole_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole_cache.mkdir()
    whole_cache.chmod(0o777)
    cache = CompileCache.open(config())
    assert cache.store is None
    assert "chmod" in cache.reason
    assert "nothing is loaded from the cache or kept in it" in caplog.text


def test_a_missing_signing_key_is_a_warning(whole_cache: Path, tmp_path: Path) -> None:
    cache = CompileCache.open(config(signing_key_file=str(tmp_path / "none")))
    assert cache.store is None
    assert "signing key file" in cache.reason


def test_the_environment_names_a_signing_key_unless_the_config_does(
    whole_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIECEGRAPH_SIGNING_KEY_FILE", str(tmp_path / "none"))
    assert str(tmp_path / "none") in CompileCache.open(config()).reason
    assert str(tmp_path / "other") in CompileCache.open(config(signing_key_file=str(tmp_path / "other"))).reason


def test_a_compile_that_loads_nothing_replaces_the_entries(whole_cache: Path) -> None:
    found = CompileCache.open(config())
    blobs = {"plan": b"{}"}
    entry = Entry.of({"kind": "plan"}, blobs, created=0.0)
    found.save(entry, blobs)
    anew = CompileCache(found.store, True, reads=False)
    assert anew.load(entry.key) is None
    assert anew.misses == {entry.key: "loading is turned off"}
    assert isinstance(anew.save(replace(entry, created=1.0), blobs), Saved)
    loaded = found.load(entry.key)
    assert loaded is not None
    assert loaded.entry.created == 1.0


def test_saved_entries_are_loaded_and_misses_have_a_reason(whole_cache: Path) -> None:
    cache = CompileCache.open(config())
    blobs = {"plan": b"{}"}
    entry = Entry.of({"kind": "plan"}, blobs, created=0.0)
    assert cache.load(entry.key) is None
    assert cache.misses == {entry.key: "absent"}
    with cache.flight(entry.key) as flight:
        assert flight.held
        assert isinstance(cache.save(entry, blobs), Saved)
    loaded = cache.load(entry.key)
    assert loaded is not None
    assert loaded.blobs == blobs
    assert not cache.misses
    cache.reject(entry.key, "it was no good")
    assert cache.misses == {entry.key: "it was no good"}


def kept(cache: CompileCache) -> set[str]:
    assert cache.store is not None
    return {row.key for row in cache.store.list()}


@pytest.mark.parametrize("keeps", [True, "pieces"])
def test_the_least_recently_used_entry_is_removed_after_a_compile(
    keeps: bool | str, whole_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without anybody's asking, and not while there is room."""
    caplog.set_level("INFO", "piecegraph")
    cache = CompileCache.open(config())
    assert cache.store is not None
    cache.store.clock = lambda: 1e9
    blobs = {"plan": bytes(1 << 20)}
    old = Entry.of({"kind": "plan"}, blobs, created=0.0)
    cache.save(old, blobs)
    compiled(Small(), cache=keeps)
    assert old.key in kept(cache)
    monkeypatch.setenv("PIECEGRAPH_CACHE_MAX_SIZE", "1M")
    compiled(Small(num_layers=3), cache=keeps)
    assert old.key not in kept(cache)
    assert kept(cache)
    assert "removed the 1 least recently used entries of the cache" in caplog.text


def test_the_size_limit_holds_under_torch_compile(whole_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(CompileCache, "enforce_max_size", lambda self: called.append("enforce_max_size"))
    call_by_name(Small())
    assert called == ["enforce_max_size"]


def test_a_size_limit_that_cannot_be_enforced_is_a_warning(
    whole_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("piecegraph.compiler.store.compile_cache.collect_if_over", broken)
    CompileCache.open(config()).enforce_max_size()
    assert "the size limit of the cache is not enforced: [Errno 5] Input/output error" in caplog.text
    caplog.clear()
    CompileCache(None, False).enforce_max_size()
    theirs = CompileCache.open(config())
    assert theirs.store is not None
    theirs.store.access = Access.READ_ONLY
    theirs.enforce_max_size()
    assert not caplog.text


def test_an_invalid_size_limit_is_refused(whole_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEGRAPH_CACHE_MAX_SIZE", "lots")
    with pytest.raises(ConfigError, match="PIECEGRAPH_CACHE_MAX_SIZE='lots' is not a size"):
        CompileCache.open(config())


def test_without_a_store_nothing_is_saved(whole_cache: Path) -> None:
    cache = CompileCache.open(config(cache=False))
    entry = Entry.of({"kind": "plan"}, {}, created=0.0)
    assert cache.load(entry.key) is None
    assert cache.save(entry, {}) == NotSaved("cache=False")
    with cache.flight(entry.key) as flight:
        assert not flight.held


def test_a_disk_that_cannot_be_written_raises_nothing(whole_cache: Path) -> None:
    whole_cache.parent.joinpath("file").write_text("")
    cache = CompileCache.open(config(cache_dir=str(whole_cache.parent / "file" / "cache")))
    entry = Entry.of({"kind": "plan"}, {}, created=0.0)
    with cache.flight(entry.key) as flight:
        assert not flight.held
        assert isinstance(cache.save(entry, {}), NotSaved)
