"""One thread at a time makes a model: transformers changes the default dtype of the process meanwhile."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_MAKING = threading.RLock()


def in_one_thread_at_a_time(make: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return `make`, of which, and of all other such functions, one thread at a time runs one."""

    @functools.wraps(make)
    def alone(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with _MAKING:
            return make(*args, **kwargs)

    return alone
