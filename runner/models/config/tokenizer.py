"""The tokenizer of a model, read through transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from piecegraph.errors import ModelError
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.models.checkpoint.files import first_line
from piecegraph.runner.models.common.quiet_transformers import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(source: ModelSource, tokenizer: str | None = None) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer, or the one at `tokenizer`. Raises `ModelError` if there is none."""
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    options = source.options if tokenizer is None else {"trust_remote_code": source.trust_remote_code}
    with quiet_transformers():
        try:
            loaded = AutoTokenizer.from_pretrained(tokenizer or source.location, **options)
        except Exception as error:  # whatever transformers raises for a broken or missing tokenizer
            raise ModelError(
                f"no usable tokenizer at {tokenizer or source.model!r} ({first_line(error)}). "
                "Name one with tokenizer=..., or pass token ids with skip_tokenizer_init=True."
            ) from error
    assert isinstance(loaded, PreTrainedTokenizerBase), type(loaded)
    return loaded
