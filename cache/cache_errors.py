"""What the store refuses out loud: folders and archives that are not to be trusted, and keys that cannot be made.

Bad bytes inside a trusted folder are none of these: they are a `Miss`, and the caller compiles.
"""

from __future__ import annotations

from piecegraph.errors import ConfigError, PiecegraphError


class CacheError(PiecegraphError):
    """Base of what `cache/` raises for reasons outside the process; the compiler goes on uncached."""


class UntrustedCache(CacheError):
    """A folder or a key file that others could have written. The message has the command that mends it."""


class ArchiveRefused(CacheError):
    """An archive that is damaged, unsigned, or says what no archive of ours says."""


class KeyFactorError(ConfigError):
    """A factor that has no canonical form; the message names its path."""
