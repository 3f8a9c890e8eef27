"""`collective`: one process per rank; peers' memory is not seen."""

import datetime
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.errors import InputError
from workbench.moe.failures import ClosedError, PeerError
from workbench.moe.groups.peers_group import Splits, bases_of, mapped, refuse_missing, tensor_of
from workbench.moe.pages import huge_pages
from workbench.runtime import find_runtime

LOOK_S = 0.0005
"""Between two looks at what the host waits for."""


class CollectiveGroup:
    """One process per rank of a torch.distributed group; peers' memory is not seen.

    Makes its own gloo group from the ranks of `process_group` (default: all), and one of the
    device's backend (NCCL) where that is another. Collective over all processes of the job, also
    where their groups differ. `device` is a kind; the process must have selected its own.
    """

    kind, sees_peers, arena_in_allocator = "collective", False, True

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float = 60.0,
        device: str = "cpu",
    ) -> None:
        self.runtime = find_runtime(device)
        if not dist.is_initialized():
            raise InputError(
                f"group={self.kind!r} needs torch.distributed: start the ranks with torchrun and"
                " call torch.distributed.init_process_group('gloo')"
            )
        self.device = self.runtime.current()
        self.timeout_s = timeout_s
        self._ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        self.size = len(self._ranks)
        self.hosted: tuple[int, ...] = (self._ranks.index(dist.get_rank()),)
        self._closed: str | None = None
        self._at = ""
        # Every process takes part in the making of every group: torch then gives it a name that
        # was never used, while groups made among their ranks alone reuse the name of one that is
        # gone, and meet its addresses in the store.
        wanted: list[list[int]] = [[]] * dist.get_world_size()
        dist.all_gather_object(wanted, self._ranks)
        self._control: dist.ProcessGroup | None = self._made(wanted, "gloo")
        self._data = self._control
        if self.runtime.backend != "gloo":
            self._data = self._made(wanted, self.runtime.backend)

    def _made(self, wanted: Sequence[Sequence[int]], backend: str) -> dist.ProcessGroup:
        """A torch group of our ranks, as all processes make all groups."""
        limit = datetime.timedelta(seconds=self.timeout_s)
        made = {
            ranks: dist.new_group(list(ranks), backend=backend, timeout=limit)
            for ranks in sorted({tuple(ranks) for ranks in wanted})
        }
        return made[tuple(self._ranks)]

    @property
    def rank(self) -> int:
        return self.hosted[0]

    def allocate(self, nbytes: int) -> tuple[Tensor, Tensor]:
        if self.device.type == "cpu":
            memory, problem = mapped(lambda: huge_pages(nbytes))
            refuse_missing(self.gather_objects(problem), nbytes)
            arenas_1B = tensor_of(memory, 1)
        else:
            arenas_1B, problem = mapped(
                lambda: torch.zeros(1, nbytes, dtype=torch.uint8, device=self.device)
            )
            refuse_missing(self.gather_objects(problem), nbytes)
        return arenas_1B, bases_of(arenas_1B)

    def barrier(self, where: str) -> None:
        with self._meeting(where) as control:
            dist.barrier(group=control)

    def align(self) -> None:
        if self.device.type != "cpu":
            one = self.runtime.for_backend(torch.ones(1, device=self.device))
            with self._meeting("the start of an iteration"):
                dist.all_reduce(one, group=self._data)

    def settle(self, where: str) -> None:
        if self.device.type == "cpu":
            return
        with self._meeting(where):
            mark, end = self.runtime.event(), time.monotonic() + self.timeout_s
            mark.record()
            while not mark.done():
                if time.monotonic() > end:
                    raise TimeoutError(f"the device is not done {self.timeout_s:g} s later")
                time.sleep(LOOK_S)

    def all_gather(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        ((own, everyone),) = pairs
        own, everyone = map(self.runtime.for_backend, (own, everyone))
        with self._meeting("all_gather"):
            dist.all_gather_single(everyone.view(-1), own.reshape(-1), group=self._data)

    def all_to_all(self, parts: Sequence[tuple[Tensor, Splits, Tensor, Splits]]) -> None:
        ((send, sends, receive, receives),) = parts
        send, receive = map(self.runtime.for_backend, (send, receive))
        with self._meeting("all_to_all"):
            dist.all_to_all_single(
                receive[: sum(receives)],
                send[: sum(sends)],
                list(receives),
                list(sends),
                group=self._data,
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

    def _open(self) -> None:
        if self._closed is not None:
            raise ClosedError(f"group is closed: {self._closed}")

    def _meeting(self, where: str) -> "_Meeting":
        self._open()
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
