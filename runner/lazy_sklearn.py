"""transformers without scikit-learn, until somebody calls what needs it.

`transformers.generation.candidate_generator`, which every model's class imports, imports scikit-learn where that is
installed, and with it scipy and pandas: more than a second of each start, for a function that only assisted generation
with a threshold of confidence calls.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from typing import Any

MODULE = "transformers.generation.candidate_generator"


def import_without_sklearn() -> None:
    """Import `MODULE`, whose `roc_curve` imports scikit-learn's when it is first called.

    Harmless where there is nothing to gain (scikit-learn is imported already, or not installed), and where transformers
    has changed: then all is imported as it says.
    """
    from transformers import utils

    is_available = getattr(utils, "is_sklearn_available", None)
    if is_available is None or MODULE in sys.modules or "sklearn" in sys.modules or find_spec("sklearn") is None:
        return
    utils.is_sklearn_available = lambda: False
    try:
        module = importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        if error.name != MODULE:
            raise
        return
    finally:
        utils.is_sklearn_available = is_available
    module.is_sklearn_available = is_available  # type: ignore[attr-defined]
    if not hasattr(module, "roc_curve"):
        module.roc_curve = _roc_curve  # type: ignore[attr-defined]


def _roc_curve(*args: Any, **kwargs: Any) -> Any:
    """Scikit-learn's."""
    from sklearn.metrics import roc_curve  # type: ignore[import-not-found]

    return roc_curve(*args, **kwargs)
