"""The classes of registered ops, which torch defines in a private module only. They may be imported from here."""

from __future__ import annotations

from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

__all__ = ["HigherOrderOperator", "OpOverload", "OpOverloadPacket"]
