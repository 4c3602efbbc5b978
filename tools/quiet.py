"""Silence for libraries that talk on stderr. Only the command line asks for it, in its own process."""

from __future__ import annotations

import logging
import warnings


def quiet_libraries() -> None:
    """Turn off progress bars, advice and warnings of torch, transformers and the hub client."""
    import transformers
    from huggingface_hub.utils import disable_progress_bars

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    disable_progress_bars()
    for name in ("torch", "huggingface_hub", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
