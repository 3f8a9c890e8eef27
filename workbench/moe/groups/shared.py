"""`shared`: one process per rank on one machine, every arena mapped by every rank."""

import mmap
import os
import time

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from workbench.errors import InputError
from workbench.moe.groups.collective import CollectiveGroup
from workbench.moe.groups.peers_group import bases_of, mapped, refuse_missing, tensor_of
from workbench.moe.pages import advise_huge


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

            def view_of_all() -> mmap.mmap:
                if file is None:
                    path = f"/proc/{self._pids[0]}/fd/{maker}"
                    opened.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))
                return mmap.mmap(opened[0], total)

            view, problem = mapped(view_of_all)
            refuse_missing(self.gather_objects(problem), total)
            advise_huge(view)
        finally:
            for descriptor in opened:
                os.close(descriptor)
        arenas_PB = tensor_of(view, self.size)
        return arenas_PB, bases_of(arenas_PB)

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
