"""`nvlink`: one GPU per rank, which reaches its peers' arenas by address alone."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.errors import InputError
from workbench.moe.failures import PeerError
from workbench.moe.groups.collective import CollectiveGroup
from workbench.runtime import Runtime, find_runtime

T = TypeVar("T")


class NvlinkGroup(CollectiveGroup):
    """One GPU per rank of one peer-access domain, which may span hosts; arenas in symmetric memory,
    barriers on the device's stream.

    Needs executor='triton', which follows peers' addresses; the torch executor's twins would see
    only their own arena, so `create_context` refuses them. A peer that dies or is late is found by
    `settle`, `check` and whatever else of ours waits for the device, `timeout_s` after this rank
    began to wait; the barrier itself gives up after twice that, which ends the process. After
    PeerError the device's stream is stuck: leave the process with `os._exit`.
    """

    kind, sees_peers, arena_in_allocator = "nvlink", True, False

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float = 60.0,
        device: str = "cuda",
    ) -> None:
        runtime = find_runtime(device)
        if problem := runtime.problem(1):
            raise InputError(f"group='nvlink' {problem}; use 'shared' or 'virtual'")
        super().__init__(process_group, timeout_s=timeout_s, device=device)
        self._symmetric = self._agreed(
            "symmetric memory", lambda: runtime.symmetric(process_group or dist.group.WORLD)
        )
        self._agreed("rendezvous", self._symmetric.connect)

    def allocate(self, nbytes: int) -> tuple[Tensor, Tensor]:
        arena_B = self._agreed("allocation", lambda: self._symmetric.empty(nbytes))
        bases = self._agreed("rendezvous", lambda: self._symmetric.exchange(arena_B))
        bases_P = torch.tensor(bases, dtype=torch.int64).to(self.device)
        return arena_B[None], bases_P

    def barrier(self, where: str) -> None:
        self._open()
        self._symmetric.barrier(2 * self.timeout_s)
        self._at = where

    def align(self) -> None:
        self.barrier("the start of an iteration")

    def missing(self) -> str:
        late = self._symmetric.unanswered() if self._at else []
        return f"ranks {late} did not come" if late else super().missing()

    def _agreed(self, what: str, make: Callable[[], T]) -> T:
        """What `make` gives on this rank, if it gives something on every rank in time. MemoryError
        or InputError with the first rank that it does not, the same on all; PeerError where there
        is no end on a rank, or one is not heard of."""
        # half the time: peers that failed at once wait for this one in what follows
        made, problem = _in_time(make, self.timeout_s / 2, self.runtime, self.device)
        problems = self.gather_objects(problem)
        for rank, found in enumerate(problems):
            if found is not None:
                made = None  # freed here, whoever keeps the traceback
                kind, text = found
                text = f"rank {rank}: {what} failed: {text}"
                if kind == "TimeoutError":
                    self.abort(text)
                    raise PeerError(text)
                raise MemoryError(text) if kind == "MemoryError" else InputError(text)
        return made


def _in_time(
    make: Callable[[], T], limit_s: float, runtime: Runtime, device: torch.device
) -> tuple[Any, tuple[str, str] | None]:
    """What `make` gives, or the kind and text of why it does not; on a thread, as one that hangs
    (a rendezvous with a rank that failed does) cannot be ended."""
    found: list[Any] = [None, ("TimeoutError", f"no end within {limit_s:g} s")]

    def run() -> None:
        try:
            runtime.select(device.index or 0)  # a thread begins on the first
            found[:] = make(), None
        except Exception as error:  # whatever the driver has to say, peers must hear of it
            text = " ".join(str(error).split())
            kind = "MemoryError" if isinstance(error, MemoryError) else type(error).__name__
            found[1] = kind, f"{type(error).__name__}: {text[:300]}"

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return found[0], found[1]
