"""The modes in which a batch runs: without graphs, with graphs of pieces, or as one graph."""

from __future__ import annotations

import enum

from piecegraph.errors import ConfigError, did_you_mean


class CUDAGraphMode(enum.Enum):
    """The CUDA graph mode of a batch (NONE, PIECEWISE or FULL), or of a configuration.

    The other two members are for configurations: they stand for one mode for uniform-decode batches (`decode_mode`) and
    another one for all other batches (`mixed_mode`).
    """

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"

    __hash__ = object.__hash__  # Enum's own is Python, and every step looks modes up

    @classmethod
    def parse(cls, name: str | CUDAGraphMode) -> CUDAGraphMode:
        """Return the mode called `name`, in upper or lower case. Raises `ConfigError` for an unknown name."""
        if isinstance(name, CUDAGraphMode):
            return name
        mode = cls.__members__.get(str(name).upper())
        if mode is None:
            raise ConfigError(f"cudagraph_mode={name!r} is unknown.{did_you_mean(str(name).upper(), cls.__members__)}")
        return mode

    @property
    def decode_mode(self) -> CUDAGraphMode:
        """The mode of uniform-decode batches."""
        combined = (CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE)
        return CUDAGraphMode.FULL if self in combined else self

    @property
    def mixed_mode(self) -> CUDAGraphMode:
        """The mode of all batches other than uniform decodes."""
        if self is CUDAGraphMode.FULL_DECODE_ONLY:
            return CUDAGraphMode.NONE
        return CUDAGraphMode.PIECEWISE if self is CUDAGraphMode.FULL_AND_PIECEWISE else self
