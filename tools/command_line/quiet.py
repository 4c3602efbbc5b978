"""Silence for libraries that print on stderr. Only the command line asks for it, in its own process."""

from __future__ import annotations

import logging
import warnings

from piecegraph.progress import OnPhase, Phase


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


def quiet_once_imported(on_phase: OnPhase) -> OnPhase:
    """Return an `on_phase` that silences these libraries as soon as `LLM` reports that it has imported them."""

    def silence(phase: Phase) -> None:
        if phase.name == "import" and phase.seconds is not None:
            quiet_libraries()
        on_phase(phase)

    return silence
