"""Host memory that is given back to the operating system while the tensors over it stay, at their addresses."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

import torch

_FAILED = -1


def release(tensors: Iterable[torch.Tensor]) -> int:
    """Give back the memory of CPU tensors, and return how many bytes that were.

    The tensors keep their addresses and lose their values: what is read afterwards is undefined, and what is written is
    kept. Only whole pages inside of a tensor's storage are given back. Views of one storage count once. Memory that
    the operating system does not take back stays as it is.
    """
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    num_bytes = 0
    for address, storage in storages.items():
        assert storage.device.type == "cpu", storage.device
        begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin and _advise_unneeded(begin, end - begin):
            num_bytes += end - begin
    return num_bytes


def _advise_unneeded(address: int, num_bytes: int) -> bool:
    """Return whether the system has taken the pages back; the next access finds new ones, or those of a mapped file."""
    madvise = ctypes.pythonapi["madvise"]  # of the C library, which the interpreter is linked with
    madvise.argtypes, madvise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return bool(madvise(address, num_bytes, mmap.MADV_DONTNEED) != _FAILED)
