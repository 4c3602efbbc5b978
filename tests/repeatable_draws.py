"""Hypothesis draws the same values for a test in every run, whichever other tests run in the process.

By itself it draws at random outside CI, with a limit of time for each example, and everywhere it prefers the constants
that it finds in the local modules loaded so far: in a suite of several processes those differ from run to run, and
assertions on how much a schedule showed fail by chance. Finding them also takes reading every loaded source.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

PROFILE = "repeatable"


def install() -> None:
    """Make `PROFILE` the default, and leave out the constants. `--hypothesis-profile=default` draws at random."""
    settings.register_profile(
        PROFILE, derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile(PROFILE)
    providers._get_local_constants = Constants
