"""`virtual`: all ranks of a group in one process."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.errors import InputError
from workbench.moe.groups.peers_group import Splits, bases_of, mapped, refuse_missing, tensor_of
from workbench.moe.pages import huge_pages
from workbench.runtime import find_runtime


class VirtualGroup:
    """All `size` ranks in this process, stepped from barrier to barrier; on one CPU or GPU."""

    kind, sees_peers, arena_in_allocator = "virtual", True, True

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.runtime = find_runtime(str(device).partition(":")[0])  # before torch is to know it
        self.device = torch.device(device)
        if size < 1:
            raise InputError(f"size={size} must be at least 1")
        self.size = size
        self.hosted = tuple(range(size))

    def allocate(self, nbytes: int) -> tuple[Tensor, Tensor]:
        if self.device.type == "cpu":
            memory, problem = mapped(lambda: huge_pages(self.size * nbytes))
            refuse_missing([problem], self.size * nbytes)
            arenas_PB = tensor_of(memory, self.size)
        else:
            arenas_PB = torch.zeros(self.size, nbytes, dtype=torch.uint8, device=self.device)
        return arenas_PB, bases_of(arenas_PB)

    def barrier(self, where: str) -> None:
        """Nothing to do: a phase has run on every rank before the next one starts."""

    def align(self) -> None:
        """All ranks' work is in one stream."""

    def settle(self, where: str) -> None:
        self.runtime.synchronize()

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
