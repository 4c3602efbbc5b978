"""A look-up of keys by their first digits."""

from __future__ import annotations

from collections.abc import Sequence

from piecegraph.cache.disk.files import scan_folder
from piecegraph.cache.disk.layout import is_digest
from piecegraph.cache.store.store import Store
from piecegraph.errors import UsageError

SHOWN = 12
"""The number of digits of a key in tables. With 1,000 entries two share them once in 100 million caches."""


def keys_of(store: Store) -> list[str]:
    """Return the keys of all entries, sorted, without opening one. Raises OSError."""
    names = (item.name for item in scan_folder(store.layout.entries))
    keys = (name.removesuffix(".json") for name in names if name.endswith(".json"))
    return sorted(key for key in keys if is_digest(key))


def find_key(prefix: str, keys: Sequence[str]) -> str:
    """Return the key that begins with `prefix`.

    Raises `UsageError`, which names the matching keys if there are several, or the nearest if there is none.
    """
    text = prefix.lower()
    found = [key for key in keys if key.startswith(text)] if text else []
    if len(found) == 1:
        return found[0]
    if found:
        shown = ", ".join(key[: max(SHOWN, len(text) + 4)] for key in found[:8])
        more = f" and {len(found) - 8} more" if len(found) > 8 else ""
        raise UsageError(f"{len(found)} entries begin with {prefix!r}: {shown}{more}. Give more digits.")
    if not keys:
        raise UsageError(f"there is no entry {prefix!r}: the cache is empty.")
    import difflib  # 2 ms that a listing does not need

    heads = {key[: max(1, len(text))]: key for key in keys}
    near = difflib.get_close_matches(text, heads, n=1)
    hint = f" Did you mean {heads[near[0]][: max(SHOWN, len(text))]}?" if near else ""
    raise UsageError(f"no key begins with {prefix!r}.{hint} `piecegraph cache ls` lists the {len(keys)} there are.")


def find_keys(prefixes: Sequence[str], store: Store) -> list[str]:
    """Return the keys that begin with each of `prefixes`, each once, in order. Raises `UsageError`, OSError."""
    keys = keys_of(store)
    return list(dict.fromkeys(find_key(prefix, keys) for prefix in prefixes))
