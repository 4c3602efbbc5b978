"""Settings around a call that decide what torch computes and that are not arguments of the call.

They are compared at every call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from piecegraph.errors import InputMismatch


@dataclass(frozen=True, slots=True)
class AmbientState:
    """The state of this thread and process, for a model on the given types of devices.

    A trace fixes everything this state decides: the casts of autocast, the dtype of tensors made of plain numbers,
    and the choice of deterministic kernels.
    """

    autocast: tuple[tuple[str, str], ...]  # device type and dtype, where autocast is on
    default_dtype: torch.dtype
    is_deterministic: bool
    is_transformed: bool  # inside vmap, grad or another transform of torch.func

    @classmethod
    def current(cls, device_types: Iterable[str]) -> AmbientState:
        """Return the state of this thread and process. Takes 2 us."""
        casts: tuple[tuple[str, str], ...] = ()
        if torch._C._is_any_autocast_enabled():
            casts = tuple(
                (kind, str(torch.get_autocast_dtype(kind))) for kind in device_types if torch.is_autocast_enabled(kind)
            )
        return cls(
            casts,
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch._C._functorch.maybe_current_level() is not None,
        )

    def check(self, now: AmbientState) -> None:
        """Raise `InputMismatch` where `now` differs from this state, in which a model was compiled."""
        if now == self:
            return
        if now.autocast != self.autocast:
            raise InputMismatch(
                f"the model is called {_casts(now)}; it was compiled {_casts(self)}, which fixed its casts. "
                "Call it as it was compiled, or compile it inside the torch.autocast that calls have."
            )
        if now.default_dtype != self.default_dtype:
            raise InputMismatch(
                f"torch's default dtype is {now.default_dtype}; it was {self.default_dtype} when the model was "
                "compiled. Set it back (torch.set_default_dtype), or compile again."
            )
        if now.is_transformed != self.is_transformed:
            raise InputMismatch(
                "the model is called inside a transform of torch.func, which compiled pieces do not support. Call "
                "the module itself there."
            )
        raise InputMismatch(
            f"torch.are_deterministic_algorithms_enabled() is {now.is_deterministic}; it was {self.is_deterministic} "
            "when the model was compiled, and kernels were chosen by it. Set it before compiling, and leave it."
        )


def _casts(state: AmbientState) -> str:
    if not state.autocast:
        return "without autocast"
    return "under " + ", ".join(f"torch.autocast({kind!r}, {dtype})" for kind, dtype in state.autocast)
