"""Peer groups: who the ranks are, whose memory they see, and where they meet.

`virtual`: all ranks in this process. `shared`: one process per rank on one machine, every arena
mapped by every rank, gloo for control. `nvlink`: one GPU per rank in torch's symmetric memory.
`collective`: no peer's memory is seen, only collectives (for `alltoall` across machines).

Legend: P ranks of the group, V ranks that this process hosts, B bytes of an arena.
"""

import datetime
import mmap
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from workbench.errors import InputError
from workbench.moe.failures import ClosedError, PeerError
from workbench.moe.pages import advise_huge, huge_pages

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

    def allocate(self, nbytes: int) -> tuple[Tensor, Tensor]:
        """Arenas uint8 [P, B] (only this rank's row, so [1, B], where peers are not seen, or
        by address alone) and the base address of each, int64 [P or 1]. Zeroed."""

    def barrier(self, where: str) -> None:
        """Returns when every rank has come; PeerError names those that have not."""

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


class VirtualGroup:
    """All `size` ranks in this process, stepped from barrier to barrier; on one CPU or GPU."""

    kind, sees_peers = "virtual", True

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        if size < 1:
            raise InputError(f"size={size} must be at least 1")
        self.size = size
        self.hosted = tuple(range(size))

    def allocate(self, nbytes: int) -> tuple[Tensor, Tensor]:
        if self.device.type == "cpu":
            memory, problem = _map(lambda: huge_pages(self.size * nbytes))
            _had([problem], self.size * nbytes)
            arenas_PB = _tensor(memory, self.size)
        else:
            arenas_PB = torch.zeros(self.size, nbytes, dtype=torch.uint8, device=self.device)
        return arenas_PB, _bases(arenas_PB)

    def barrier(self, where: str) -> None:
        """Nothing to do: a phase has run on every rank before the next one starts."""

    def all_gather(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for _, everyone in pairs:
            for p, (own, _) in enumerate(pairs):
                everyone[p].copy_(own)

    def all_to_all(self, parts: Sequence[tuple[Tensor, Splits, Tensor, Splits]]) -> None:
        sent = [send[: sum(splits)].split(list(splits)) for send, splits, _, _ in parts]
        for rank, (_, _, receive, splits) in enumerate(parts):
            if sum(splits):
                torch.cat([rows[rank] for rows in sent], out=receive[: sum(splits)])

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def abort(self, reason: str) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """The arenas go with their context."""


class CollectiveGroup:
    """One process per rank of a torch.distributed group; peers' memory is not seen.

    Makes its own gloo group from the ranks of `process_group` (default: all). Collective over all
    processes of the job, also where their groups differ.
    """

    kind, sees_peers, device = "collective", False, torch.device("cpu")

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, *, timeout_s: float = 60.0
    ) -> None:
        if not dist.is_initialized():
            raise InputError(
                f"group={self.kind!r} needs torch.distributed: start the ranks with torchrun and"
                " call torch.distributed.init_process_group('gloo')"
            )
        self.timeout_s = timeout_s
        self._ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        self.size = len(self._ranks)
        self.hosted = (self._ranks.index(dist.get_rank()),)
        self._closed: str | None = None
        self._control: dist.ProcessGroup | None = None
        # Every process takes part in the making of every group: torch then gives it a name that
        # was never used, while groups made among their ranks alone reuse the name of one that is
        # gone, and meet its addresses in the store.
        wanted: list[list[int]] = [[]] * dist.get_world_size()
        dist.all_gather_object(wanted, self._ranks)
        for ranks in sorted({tuple(ranks) for ranks in wanted}):
            made = dist.new_group(
                list(ranks), backend="gloo", timeout=datetime.timedelta(seconds=timeout_s)
            )
            if list(ranks) == self._ranks:
                self._control = made

    @property
    def rank(self) -> int:
        return self.hosted[0]

    def allocate(self, nbytes: int) -> tuple[Tensor, Tensor]:
        memory, problem = _map(lambda: huge_pages(nbytes))
        _had(self.gather_objects(problem), nbytes)
        arenas_1B = _tensor(memory, 1)
        return arenas_1B, _bases(arenas_1B)

    def barrier(self, where: str) -> None:
        with self._meeting(where) as control:
            dist.barrier(group=control)

    def all_gather(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        ((own, everyone),) = pairs
        with self._meeting("all_gather") as control:
            dist.all_gather_single(everyone.view(-1), own.reshape(-1), group=control)

    def all_to_all(self, parts: Sequence[tuple[Tensor, Splits, Tensor, Splits]]) -> None:
        ((send, sends, receive, receives),) = parts
        with self._meeting("all_to_all") as control:
            dist.all_to_all_single(
                receive[: sum(receives)],
                send[: sum(sends)],
                list(receives),
                list(sends),
                group=control,
            )

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        with self._meeting("gather_objects") as control:
            dist.all_gather_object(values, value, group=control)
        return values

    def abort(self, reason: str) -> None:
        """Closes the connections, which peers in a barrier see at once."""
        if self._closed is None:
            self._closed = reason
            control, self._control = self._control, None
            if control is not None:
                dist.destroy_process_group(control)

    def close(self) -> None:
        self.abort("it was closed")

    def _meeting(self, where: str) -> "_Meeting":
        if self._control is None:
            raise ClosedError(f"group is closed: {self._closed}")
        return _Meeting(self, where)

    def missing(self) -> str:
        """Who has not come to the meeting, as text; what the group cannot know it does not say."""
        return "a peer died, failed or was late"


class _Meeting:
    """Turns whatever a collective raises into a PeerError, and closes the group."""

    def __init__(self, group: CollectiveGroup, where: str) -> None:
        self.group, self.where = group, where

    def __enter__(self) -> dist.ProcessGroup:
        assert self.group._control is not None
        return self.group._control

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return
        text = (
            f"rank {self.group.rank}: {self.group.missing()} at {self.where}"
            f" (timeout_s={self.group.timeout_s:g}); the group is closed"
        )
        self.group.abort(text)
        if isinstance(error, Exception):
            raise PeerError(text) from error


class SharedGroup(CollectiveGroup):
    """One process per rank on one machine; every arena is mapped by every rank.

    The memory has no name in a file system: rank 0 makes it and the others open it through rank
    0's descriptor, so nothing can be left behind, whoever dies and when.
    """

    kind, sees_peers = "shared", True

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, *, timeout_s: float = 60.0
    ) -> None:
        super().__init__(process_group, timeout_s=timeout_s)
        self._arrivals_P = torch.zeros(0, dtype=torch.int64)
        self._pids: list[int] = []
        hosts = self.gather_objects((os.uname().nodename, os.getpid()))
        self._pids = [pid for _, pid in hosts]
        if len({host for host, _ in hosts}) > 1:
            raise InputError(
                f"group='shared' spans hosts {sorted({host for host, _ in hosts})}, must be on one;"
                " use 'collective' with pipeline='alltoall'"
            )
        self._arrivals_P = self.allocate(8)[0].view(torch.int64)[:, 0]

    def allocate(self, nbytes: int) -> tuple[Tensor, Tensor]:
        total = self.size * nbytes
        file = None
        if self.rank == 0:
            file = os.memfd_create("moe-workbench", os.MFD_CLOEXEC)
            # Reserved now: a page that cannot be had later would be a SIGBUS.
            reserved = _reserve(file, total)
        else:
            reserved = None
        opened: list[int] = [] if file is None else [file]
        try:
            (maker, reserved, *_), *_ = self.gather_objects((file, reserved))
            if reserved is not None:
                raise MemoryError(f"shared memory: {total:,} bytes cannot be had: {reserved}")

            def mapped() -> mmap.mmap:
                if file is None:
                    path = f"/proc/{self._pids[0]}/fd/{maker}"
                    opened.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))
                return mmap.mmap(opened[0], total)

            view, problem = _map(mapped)
            _had(self.gather_objects(problem), total)
            advise_huge(view)
        finally:
            for descriptor in opened:
                os.close(descriptor)
        arenas_PB = _tensor(view, self.size)
        return arenas_PB, _bases(arenas_PB)

    def barrier(self, where: str) -> None:
        if self._closed is None:
            self._arrivals_P[self.rank] += 1
        super().barrier(where)

    def abort(self, reason: str) -> None:
        super().abort(reason)
        self._arrivals_P = torch.empty(0, dtype=torch.int64)  # lets the memory go

    def missing(self) -> str:
        arrivals = self._arrivals_P.tolist()
        late = [p for p, count in enumerate(arrivals) if count < arrivals[self.rank]]
        dead: list[int] = []
        # A process that ends closes its connections a moment before it is seen to be gone.
        until = time.monotonic() + 1
        while late and not dead and time.monotonic() < until:
            dead = [p for p, pid in enumerate(self._pids) if not _alive(pid)]
            time.sleep(0.02)
        if dead:
            return f"ranks {dead} died"
        return f"ranks {late} did not come" if late else super().missing()


class NvlinkGroup(CollectiveGroup):
    """One GPU per rank; arenas in torch's symmetric memory, barriers on the device's stream.

    Needs CUDA and executor='triton', which follows peers' addresses; the torch executor's twins
    would see only their own arena, so `create_context` refuses them.
    """

    kind, sees_peers = "nvlink", True

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, *, timeout_s: float = 60.0
    ) -> None:
        if not torch.cuda.is_available():
            raise InputError("group='nvlink' needs a CUDA device; use 'shared' or 'virtual'")
        super().__init__(process_group, timeout_s=timeout_s)
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._process_group = process_group or dist.group.WORLD
        self._handle: Any = None

    def allocate(self, nbytes: int) -> tuple[Tensor, Tensor]:
        import torch.distributed._symmetric_memory as symmetric

        device = torch.device("cuda", torch.cuda.current_device())
        arena_B = symmetric.empty([nbytes], dtype=torch.uint8, device=device).zero_()
        # A rendezvous can hang where one rank cannot join: all say so first.
        self.gather_objects(torch.cuda.current_device())
        assert self._process_group is not None
        self._handle = symmetric.rendezvous(arena_B, self._process_group)
        bases_P = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device="cuda")
        return arena_B[None], bases_P

    def barrier(self, where: str) -> None:
        if self._handle is None:
            super().barrier(where)
        else:
            self._handle.barrier(channel=0, timeout_ms=int(self.timeout_s * 1000))

    def close(self) -> None:
        self._handle = None
        super().close()


KINDS = {g.kind: g for g in (VirtualGroup, SharedGroup, NvlinkGroup, CollectiveGroup)}


def _tensor(memory: mmap.mmap, ranks: int) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8).view(ranks, -1)


def _map(make: Callable[[], mmap.mmap]) -> tuple[Any, str | None]:
    """What `make` maps, or why it cannot."""
    try:
        return make(), None
    except (OSError, MemoryError, OverflowError) as error:
        return None, f"{type(error).__name__}: {error}"


def _had(problems: Sequence[str | None], nbytes: int) -> None:
    """MemoryError where some rank could not map its memory; the same on all."""
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise MemoryError(f"rank {rank}: arena of {nbytes:,} bytes cannot be had: {problem}")


def _bases(arenas_PB: Tensor) -> Tensor:
    ranks = torch.arange(arenas_PB.shape[0], device=arenas_PB.device)
    return ranks * arenas_PB.stride(0) + arenas_PB.data_ptr()


def _reserve(file: int, nbytes: int) -> str | None:
    try:
        os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        return str(error)
    return None


def _alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and was not waited for does not."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False
