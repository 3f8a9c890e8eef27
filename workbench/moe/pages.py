"""Large CPU tensors on huge pages, and a lender that takes them back when nobody holds them.

A fresh 64 MiB tensor costs some 16,000 page faults, as much time as the products that fill it; on
2 MiB pages it costs 32, and one that is used again none.
"""

import mmap
import weakref

import torch
from torch import Tensor


def huge_pages(nbytes: int) -> mmap.mmap:
    """Private zeroed memory, on huge pages where the system has them."""
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise_huge(memory)
    return memory


def advise_huge(memory: mmap.mmap) -> None:
    """Asks for huge pages under a mapping; where the kernel has none, it is left as it is."""
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return


class Lender:
    """Lends uninitialised tensors like another; memory comes back when its last tensor is gone.

    It keeps what has come back, per size, for the next loan, so it holds at most what was once on
    loan at a time.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}

    def empty_like(self, model: Tensor) -> Tensor:
        if model.device.type != "cpu":
            return torch.empty_like(model)
        nbytes = model.numel() * model.element_size()
        free = self._free.setdefault(nbytes, [])
        memory = free.pop() if free else huge_pages(nbytes)
        loan = memoryview(memory)
        weakref.finalize(loan, free.append, memory)
        # The tensor's storage holds `loan`, and so does every view that is made of it.
        flat = torch.frombuffer(loan, dtype=model.dtype, count=model.numel())
        return flat.view(model.shape)

    def clear(self) -> None:
        """Lets go of what is not on loan; what is, goes when it comes back."""
        self._free = {}
