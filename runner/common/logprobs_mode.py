"""`LogprobsMode`, which selects the values that are returned as log probabilities of output tokens."""

from __future__ import annotations

from enum import Enum

from piecegraph.errors import ConfigError, did_you_mean


class LogprobsMode(Enum):
    """The values returned as log probabilities of output tokens, named as in vLLM.

    Prompt tokens always have `RAW_LOGPROBS`.
    """

    RAW_LOGPROBS = "raw_logprobs"
    """Log probabilities of the model's own logits, before any sampling option is applied."""
    RAW_LOGITS = "raw_logits"
    """The model's own logits."""
    PROCESSED_LOGPROBS = "processed_logprobs"
    """Log probabilities of the distribution that tokens are sampled from, after all options (temperature, top_k, …)."""
    PROCESSED_LOGITS = "processed_logits"
    """The logits after all options."""

    @property
    def is_processed(self) -> bool:
        """Return whether the values are taken after the sampling options are applied."""
        return self in (LogprobsMode.PROCESSED_LOGPROBS, LogprobsMode.PROCESSED_LOGITS)

    @property
    def is_normalized(self) -> bool:
        """Return whether the values are log probabilities; otherwise they are logits."""
        return self in (LogprobsMode.RAW_LOGPROBS, LogprobsMode.PROCESSED_LOGPROBS)

    @classmethod
    def parse(cls, value: object) -> LogprobsMode:
        """Return the mode with that value; a mode is returned unchanged. Raises `ConfigError`."""
        if isinstance(value, cls):
            return value
        names = [mode.value for mode in cls]
        if value not in names:
            raise ConfigError(f"logprobs_mode={value!r} is unknown.{did_you_mean(str(value), names)}")
        return cls(value)
