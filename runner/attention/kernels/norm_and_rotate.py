"""The norm and rotary embedding of queries and keys on a CPU, by our C++ kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from piecegraph.passes.kernels.common.cpp_kernel import FLOAT, INT, NUMBER, POINTER, CppKernel
from piecegraph.runner.attention.interface.rotary import Rotary
from piecegraph.runner.attention.kernels import decode_attention

KERNEL = CppKernel(
    decode_attention.KERNEL.source,
    "piecegraph_norm_and_rotate",
    [
        *(INT, POINTER, NUMBER, NUMBER, NUMBER, POINTER, NUMBER, NUMBER, NUMBER, POINTER),  # query, key, and key_out
        *(POINTER, POINTER, NUMBER, NUMBER, NUMBER, INT),  # the tables
        *(POINTER, POINTER, INT, INT, FLOAT, FLOAT),  # the norm
        *(NUMBER, NUMBER, INT),
    ],
)

MAX_KEY_DIM = 1024
"""The most numbers of a head: a thread keeps one on its stack."""


class BoundRotation(NamedTuple):
    """The kernel's arguments for some tensors, and the rotated key, which it writes."""

    arguments: tuple[Any, ...]
    key: torch.Tensor

    def run(self) -> None:
        """Norm and rotate the query in its place, and the key into `key`."""
        KERNEL.run(*self.arguments)


def bind_rotation(query: torch.Tensor, key: torch.Tensor, rotary: Rotary) -> BoundRotation | None:
    """Return the kernel's arguments for `query` and `key`, `[num_tokens, heads, key_dim]`, or None.

    It is None where the kernel is not loaded, or does not read such tensors. Query and key have the same one of
    `decode_attention.DTYPES`; the two tables, and the two weights of the norm, have one of them each. Numbers are
    computed in float32 and rounded once, by the rules of `Rotary`. The caller keeps the given tensors alive.
    """
    dtype, (num_tokens, _, key_dim) = query.dtype, query.shape
    if KERNEL.call is None or dtype not in decode_attention.DTYPES or key.dtype is not dtype or key_dim > MAX_KEY_DIM:
        return None
    if key.shape[::2] != (num_tokens, key_dim) or not (_has_heads_apart(query) and _has_heads_apart(key)):
        return None
    cos, sin = rotary.cos, rotary.sin
    if not _are_alike(cos, sin) or cos.shape[1] != sin.shape[1] or cos.shape[1] > key_dim or cos.shape[1] % 2:
        return None
    if min(len(cos), len(sin)) < num_tokens or not (cos.stride(1) == sin.stride(1) == 1):
        return None
    weights = [each for each in (rotary.q_norm_weight, rotary.k_norm_weight) if each is not None]
    if weights and not (_are_alike(*weights) and all(each.shape == (key_dim,) for each in weights)):
        return None
    if any(not each.is_contiguous() for each in weights):
        return None
    rotated = key.new_empty(key.shape)
    arguments = (
        dtype is torch.bfloat16, query.data_ptr(), query.stride(0), query.stride(1), query.shape[1], key.data_ptr(),
        key.stride(0), key.stride(1), key.shape[1], rotated.data_ptr(), cos.data_ptr(), sin.data_ptr(), cos.stride(0),
        sin.stride(0), rotary.dim, cos.dtype is torch.bfloat16, _address(rotary.q_norm_weight),
        _address(rotary.k_norm_weight), bool(weights) and weights[0].dtype is torch.bfloat16,
        rotary.norm_eps is not None, rotary.norm_eps or 0.0, rotary.norm_offset, num_tokens, key_dim,
        torch.get_num_threads(),
    )  # fmt: skip
    return BoundRotation(arguments, rotated)


def _has_heads_apart(rows: torch.Tensor) -> bool:
    """Return whether each head of each row of a tensor on a CPU lies in memory of its own."""
    places = zip(rows.shape[:2], rows.stride()[:2], strict=True)
    is_apart = all(size <= 1 or stride >= rows.shape[2] for size, stride in places)
    return rows.device.type == "cpu" and rows.stride(2) == 1 and is_apart and not rows.is_neg()


def _are_alike(*tensors: torch.Tensor) -> bool:
    """Return whether all have one dtype, which the kernel reads, and lie in memory as they are."""
    (dtype, *others) = {each.dtype for each in tensors}
    return not others and dtype in decode_attention.DTYPES and not any(each.is_neg() for each in tensors)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
