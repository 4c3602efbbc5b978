"""The classes of tensors without memory, which torch defines in a private module. They may be imported from here."""

from __future__ import annotations

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["FakeTensor", "FakeTensorMode"]
