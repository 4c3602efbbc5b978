"""How a batch runs: without graphs, piece by piece, or as one graph."""

from __future__ import annotations

import enum

from piecegraph.errors import ConfigError, did_you_mean


class CUDAGraphMode(enum.Enum):
    """NONE, PIECEWISE and FULL are what a batch runs under. The other two are configured only: they
    give one mode to uniform-decode batches (`decode_mode`) and another to the rest (`mixed_mode`)."""

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"

    __hash__ = object.__hash__  # Enum's own is Python, and every step looks modes up

    @classmethod
    def parse(cls, name: str | CUDAGraphMode) -> CUDAGraphMode:
        """The mode of that name, in any case. Raises `ConfigError`."""
        if isinstance(name, CUDAGraphMode):
            return name
        mode = cls.__members__.get(str(name).upper())
        if mode is None:
            raise ConfigError(f"cudagraph_mode={name!r} is unknown.{did_you_mean(str(name).upper(), cls.__members__)}")
        return mode

    @property
    def decode_mode(self) -> CUDAGraphMode:
        """What uniform-decode batches run under."""
        combined = (CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE)
        return CUDAGraphMode.FULL if self in combined else self

    @property
    def mixed_mode(self) -> CUDAGraphMode:
        """What every other batch runs under."""
        if self is CUDAGraphMode.FULL_DECODE_ONLY:
            return CUDAGraphMode.NONE
        return CUDAGraphMode.PIECEWISE if self is CUDAGraphMode.FULL_AND_PIECEWISE else self

    @property
    def is_runtime(self) -> bool:
        """A single batch can run under it."""
        return self in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)
