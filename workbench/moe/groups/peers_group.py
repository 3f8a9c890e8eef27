"""What a peer group is: who the ranks are, whose memory they see, and where they meet.

`virtual`: all ranks in this process. `shared`: one process per rank on one machine, every arena
mapped by every rank, gloo for control. `nvlink`: one GPU per rank in torch's symmetric memory.
`collective`: no peer's memory is seen, only collectives (for `alltoall` across machines).

Legend: P ranks of the group, V ranks that this process hosts, B bytes of an arena.
"""

import mmap
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from workbench.runtime import Runtime

Splits = Sequence[int]


class PeerGroup(Protocol):
    """What a context needs of its peers. All methods but `close` and `abort` are collective."""

    kind: str
    size: int
    hosted: tuple[int, ...]
    """Ranks whose phases run in this process."""
    sees_peers: bool
    """Whether a rank can read and write its peers' arenas."""
    device: torch.device
    """Where arenas lie."""
    runtime: Runtime
    """The kind of that device."""
    arena_in_allocator: bool
    """Whether the allocator's figures count the arena."""

    def allocate(self, nbytes: int) -> tuple[Tensor, Tensor]:
        """Arenas uint8 [P, B] (only this rank's row, so [1, B], where peers are not seen, or
        by address alone) and the base address of each, int64 [P or 1]. Zeroed."""

    def barrier(self, where: str) -> None:
        """Returns when every rank has come; PeerError names those that have not."""

    def align(self) -> None:
        """Queues a barrier on the device, where there is one, and goes on: what is queued next
        starts on all ranks together."""

    def settle(self, where: str) -> None:
        """Returns when all that was queued on the device is done; local. PeerError where it waits
        for a peer that does not come."""

    def all_gather(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """For each hosted rank (own [*s], all [P, *s]): all[p] = own of rank p."""

    def all_to_all(self, parts: Sequence[tuple[Tensor, Splits, Tensor, Splits]]) -> None:
        """For each hosted rank (send, rows to each rank, receive, rows from each rank)."""

    def gather_objects(self, value: Any) -> list[Any]:
        """`value` of each process."""

    def abort(self, reason: str) -> None:
        """Leaves the group for good, so that peers that wait find out at once."""

    def close(self) -> None:
        """Frees what the group allocated; not collective."""


def tensor_of(memory: mmap.mmap, ranks: int) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8).view(ranks, -1)


def mapped(make: Callable[[], Any]) -> tuple[Any, str | None]:
    """What `make` maps, or why it cannot."""
    try:
        return make(), None
    except (OSError, MemoryError, OverflowError, torch.OutOfMemoryError) as error:
        return None, f"{type(error).__name__}: {error}"


def refuse_missing(problems: Sequence[str | None], nbytes: int) -> None:
    """MemoryError where some rank could not map its memory; the same on all."""
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise MemoryError(f"rank {rank}: arena of {nbytes:,} bytes cannot be had: {problem}")


def bases_of(arenas_PB: Tensor) -> Tensor:
    ranks = torch.arange(arenas_PB.shape[0], device=arenas_PB.device)
    return ranks * arenas_PB.stride(0) + arenas_PB.data_ptr()
