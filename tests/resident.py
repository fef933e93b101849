"""How much memory is really there behind a tensor: what the kernel says, page by page."""

from __future__ import annotations

import ctypes
import mmap

from torch import Tensor

_libc = ctypes.CDLL(None, use_errno=True)


def resident_nbytes(tensor: Tensor) -> int:
    """Bytes of the pages of ``tensor``'s storage that exist in memory."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return 0
    start = storage.data_ptr() & -mmap.PAGESIZE
    nbytes = storage.data_ptr() + storage.nbytes() - start
    pages = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
    if _libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), pages):
        raise OSError(ctypes.get_errno(), "mincore failed")
    return sum(page & 1 for page in pages) * mmap.PAGESIZE
