from __future__ import annotations

import pytest

from piecegraph.cache.store.store import Store
from piecegraph.errors import UsageError
from piecegraph.tools.cache.entries.key_prefix import find_key, find_keys, keys_of
from tests.tools.cache.models import save_piece

KEYS = ["ab" + "0" * 62, "ab1" + "0" * 61, "cd" + "0" * 62]


def test_the_first_digits_are_enough() -> None:
    assert find_key("cd", KEYS) == KEYS[2]
    assert find_key("AB1", KEYS) == KEYS[1]
    assert find_key(KEYS[0], KEYS) == KEYS[0]


def test_an_ambiguous_prefix_lists_what_it_could_be() -> None:
    with pytest.raises(UsageError) as error:
        find_key("ab", KEYS)
    assert str(error.value) == "2 entries begin with 'ab': ab0000000000, ab1000000000. Give more digits."


def test_of_many_matches_the_first_are_listed() -> None:
    with pytest.raises(UsageError, match="^40 entries begin with 'a': .* and 32 more"):
        find_key("a", [f"a{index:063x}" for index in range(40)])


def test_an_unknown_prefix_names_the_nearest() -> None:
    with pytest.raises(UsageError) as error:
        find_key("ab2", KEYS)
    assert "no key begins with 'ab2'. Did you mean ab1000000000?" in str(error.value)
    assert "`piecegraph cache ls` lists the 3 there are." in str(error.value)


@pytest.mark.parametrize("prefix", ["", "llama"])
def test_what_is_no_key_is_refused(prefix: str) -> None:
    with pytest.raises(UsageError, match="no key begins with"):
        find_key(prefix, KEYS)


def test_an_empty_cache_has_no_entry(store: Store) -> None:
    assert keys_of(store) == []
    with pytest.raises(UsageError, match="there is no entry 'ab': the cache is empty"):
        find_keys(["ab"], store)


def test_keys_are_found_without_reading_entries(store: Store) -> None:
    """Other files in the folder are not entries; each key comes once, in the order asked for."""
    first, second = save_piece(store, "one").key, save_piece(store, "two").key
    (store.layout.entries / "notes.json").write_text("{}")
    (store.layout.entries / f"{'f' * 64}.tmp").write_text("{}")
    assert keys_of(store) == sorted([first, second])
    assert find_keys([second, first[:20], second[:30]], store) == [second, first]
