"""One rank in one call: its memory, its tensors, and the launches that phases make of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from workbench.kernels.peers import Kept, Peers
from workbench.kernels.words import Decide, operand_offset
from workbench.moe.arena import OursPlan
from workbench.moe.config import MoEConfig
from workbench.moe.weights import NO_WEIGHTS, Weights
from workbench.runtime import to_host


class Executor(Protocol):
    """Runs ops by name; the ops' arguments are those of the twins in `kernels`."""

    def launch(self, op: str, rank: int, arguments: dict[str, Any]) -> None: ...


class RankMemory:
    """The views that the plan lays into the arenas, for one rank; made once, on first use.

    `arenas_PB` is uint8 [P, B], or [1, B] where peers are not seen or by address alone; `owner` is
    this rank's index in `bases_P`.
    """

    def __init__(self, plan: OursPlan, arenas_PB: Tensor, bases_P: Tensor, owner: int) -> None:
        self.plan, self.owner = plan, owner
        self.row = owner if arenas_PB.shape[0] == bases_P.shape[0] else 0
        self.arenas_PB, self.bases_P = arenas_PB, bases_P
        # The same bytes as another storage: torch refuses to read a table of all ranks' rows and
        # to write between them, as it compares the outer bounds.
        self._window_PB = _alias(arenas_PB)
        row_bytes_O = torch.tensor(plan.row_bytes, dtype=torch.int64)
        self.row_bytes_O = row_bytes_O.to(arenas_PB.device)
        self._own: dict[str, Tensor] = {}
        self._peers: dict[str, Peers] = {}

    def release(self) -> None:
        """Lets the arenas go, whoever still holds this object (a kept traceback does)."""
        self.arenas_PB = self._window_PB = torch.empty(0, 0, dtype=torch.uint8)
        self._own.clear()
        self._peers.clear()

    @property
    def arena_B(self) -> Tensor:
        return self.arenas_PB[self.row]

    def own(self, name: str) -> Tensor:
        """This rank's region."""
        if name not in self._own:
            self._own[name] = self._all(name, self.arenas_PB)[self.row]
        return self._own[name]

    def peers(self, name: str) -> Peers:
        """The region on every rank."""
        if name not in self._peers:
            offset = self.plan.regions[name].offset
            self._peers[name] = Peers(
                all_P=self._all(name, self._window_PB), bases_P=self.bases_P, offset=offset
            )
        return self._peers[name]

    def local(self, name: str) -> Peers:
        """A region of this rank whose first axis stands for the ranks."""
        key = f"{name} as local"
        if key not in self._peers:
            region, own = self.plan.regions[name], self.own(name)
            step = own.stride(0) * own.element_size()
            parts = torch.arange(own.shape[0], device=self.bases_P.device)
            bases = self.bases_P[self.owner] + parts * step
            self._peers[key] = Peers(all_P=own, bases_P=bases, offset=region.offset)
        return self._peers[key]

    def local_rows(self, name: str) -> Peers:
        """A region of this rank as the buffer of a group of one."""
        key = f"{name} as rows"
        if key not in self._peers:
            self._peers[key] = Peers(
                all_P=self.own(name)[None],
                bases_P=self.bases_P[self.owner : self.owner + 1],
                offset=self.plan.regions[name].offset,
            )
        return self._peers[key]

    def _all(self, name: str, arenas_PB: Tensor) -> Tensor:
        region = self.plan.regions[name]
        dtype: torch.dtype = getattr(torch, region.dtype)
        flat = arenas_PB[:, region.offset : region.offset + region.nbytes].view(dtype)
        return flat.unflatten(1, region.shape)


def _alias(arenas_PB: Tensor) -> Tensor:
    if isinstance(arenas_PB, FakeTensor) or arenas_PB.device.type != "cpu":
        return arenas_PB
    return torch.from_numpy(arenas_PB.numpy())


@dataclass
class Step:
    """What a phase is given. Region names of a layer entry are asked for without their number.

    Tensors of the call are None where the call has none: a forward has no dy.
    """

    config: MoEConfig
    plan: OursPlan
    memory: RankMemory
    executor: Executor
    rank: int
    entry: int
    saves: bool
    x_TD: Tensor | None = None
    ids_TK: Tensor | None = None
    scores_TK: Tensor | None = None
    weights: Weights = NO_WEIGHTS
    y_TD: Tensor | None = None
    dy_TD: Tensor | None = None
    dx_TD: Tensor | None = None
    dscores_TK: Tensor | None = None
    gradients: Weights = NO_WEIGHTS
    words: list[int] | None = None
    """The decision, and `counts_PE`, as the host has read them; None before: what exchanges rows by
    collectives reads them once in a call, which a graph then cannot hold."""
    counts_PE: Any = None

    def launch(self, op: str, **arguments: Any) -> None:
        self.executor.launch(op, self.rank, arguments)

    def own(self, name: str) -> Tensor:
        return self.memory.own(self._named(name))

    def peers(self, name: str) -> Peers:
        return self.memory.peers(self._named(name))

    def local(self, name: str) -> Peers:
        return self.memory.local(self._named(name))

    def local_rows(self, name: str) -> Peers:
        return self.memory.local_rows(self._named(name))

    def kept(self, name: str) -> Kept:
        """An operand that the layer keeps for backward."""
        index, operand = next((i, o) for i, o in enumerate(self.plan.operands) if o.name == name)
        return Kept(
            arena_B=self.memory.arena_B,
            decision=self.decision,
            index=index,
            row_bytes_O=self.memory.row_bytes_O,
            width=operand.width,
            dtype=getattr(torch, operand.dtype),
            place=None if self.words is None else self._place(index, self.words),
        )

    def _place(self, index: int, words: Sequence[int]) -> tuple[int, int]:
        rows = words[Decide.ROWS]
        return words[Decide.BASE] + operand_offset(rows, self.plan.row_bytes[:index]), rows

    @property
    def decision(self) -> Tensor:
        return self.memory.own("decisions")[self.entry]

    def offset(self, name: str) -> int:
        return self.plan.regions[name].offset

    def _named(self, name: str) -> str:
        return name if name in self.plan.regions else f"{name}.{self.entry}"


def splits(step: Step, back: bool) -> tuple[Sequence[int], Sequence[int]]:
    """Rows sent to and received from each rank; nothing where the call does not run."""
    ranks = step.config.ep
    if step.words is None:
        step.words = to_host(step.decision).tolist()
        step.counts_PE = to_host(step.own("counts_PE"))
    if not step.words[Decide.OK]:
        return [0] * ranks, [0] * ranks
    counts_PP = step.counts_PE.view(ranks, ranks, -1).sum(2)
    out, into = counts_PP[step.rank].tolist(), counts_PP[:, step.rank].tolist()
    return (into, out) if back else (out, into)
