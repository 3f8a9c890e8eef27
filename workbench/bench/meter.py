"""Bytes that ranks send one another: metered at the launches that move them, and counted from the
route table.

`rows` are the routed rows (the study's wire bytes); `words` are what travels beside them: routed
scores and their gradients. Ids and headers, the same for every load, are in neither.

Legend: P ranks, E experts in all, D hidden width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workbench.case import Case
from workbench.kernels.catalogue import OPS
from workbench.kernels.peers import Peers
from workbench.kernels.words import Decide
from workbench.moe.context import Context
from workbench.runtime import to_host
from workbench.systems import SYSTEMS

Ints = npt.NDArray[np.int64]


class Meter:
    """While entered, adds up what the hosted ranks' launches and all-to-alls move between ranks:
    `rows_PP` and `words_PP`, bytes from rank to rank, int64."""

    def __init__(self, context: Context) -> None:
        ranks = context.group.size
        self.rows_PP, self.words_PP = (np.zeros((ranks, ranks), np.int64) for _ in range(2))
        self._context = context

    def __enter__(self) -> "Meter":
        executor, group = self._context.executor, self._context.group
        self._launch: Callable[..., None] = executor.launch
        self._all_to_all = group.all_to_all
        executor.launch = self._launched  # type: ignore[method-assign]
        group.all_to_all = self._exchanged  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self._context.executor.launch, self._context.group.all_to_all

    def _launched(self, op: str, rank: int, arguments: dict[str, Any]) -> None:
        words = to_host(arguments["decision"]).tolist() if "decision" in arguments else []
        runs = bool(words) and words[Decide.OK]
        if arguments.get("again"):
            runs = runs and words[Decide.KEPT] < words[Decide.ROWS]
        if runs:
            for moves, pulls in ((OPS[op].pulls, True), (OPS[op].pushes, False)):
                for buffer, peer in moves:
                    self._moved(rank, arguments[buffer], arguments[peer], words, pulls)
        self._launch(op, rank, arguments)

    def _moved(
        self, rank: int, buffer: Peers, peers_R: Tensor | None, words: list[int], pulls: bool
    ) -> None:
        if peers_R is None or len(buffer.bases_P) == 1 or _is_local(buffer):
            return  # the rank's own rows, or one that arrived by all-to-all
        peers = to_host(peers_R)[: words[Decide.ROWS]].long()
        rows_P = torch.bincount(peers, minlength=len(self.rows_PP))
        row_bytes = buffer.all_P.shape[-1] * buffer.all_P.element_size()
        amounts = self._table(buffer.all_P.shape[-1])
        bytes_P = rows_P.numpy() * row_bytes
        if pulls:
            amounts[:, rank] += bytes_P
        else:
            amounts[rank, :] += bytes_P

    def _exchanged(self, parts: Sequence[tuple[Tensor, Sequence[int], Tensor, Any]]) -> None:
        for rank, (send, splits, _, _) in zip(self._context.group.hosted, parts, strict=True):
            row_bytes = send.shape[-1] * send.element_size()
            self._table(send.shape[-1])[rank] += np.asarray(splits, np.int64) * row_bytes
        self._all_to_all(parts)

    def _table(self, width: int) -> Ints:
        return self.words_PP if width == 1 else self.rows_PP


def _is_local(buffer: Peers) -> bool:
    """Whether the rows of all ranks lie in one rank's arena, gathered there before; those that are
    known by address alone do not."""
    if len(buffer.all_P) != len(buffer.bases_P):
        return False
    size = buffer.all_P[0].numel() * buffer.all_P.element_size()
    return buffer.all_P.stride(0) * buffer.all_P.element_size() == size


def routed_bytes(case: Case, counts_PE: npt.ArrayLike, recomputed_P: npt.ArrayLike) -> Ints:
    """Bytes of routed rows from rank to rank, int64 [P, P], of one layer in one iteration.

    `counts_PE` has the rows that each rank sends to each expert. Rows go to the experts and back,
    as wide as the case's system says, in training twice; a rank that recomputes the layer fetches
    its rows once more.
    """
    counts = np.asarray(counts_PE, np.int64)
    to_PP = counts.reshape(len(counts), len(counts), -1).sum(axis=2)
    ways = 2 if case.mode == "training" else 1
    again_P = np.asarray(recomputed_P, np.int64)
    system = SYSTEMS[case.pipeline]
    there, back = (round(case.D * size) for size in system.wire_bytes(case.precision, case.mode))
    return there * to_PP * (ways + again_P[None, :]) + back * ways * to_PP.T


def between(bytes_PP: Ints, domains: Sequence[int]) -> dict[str, list[int]]:
    """Bytes that each rank sends to and receives from others, those in its own peer-access domain
    (scale-up; ranks of one domain have the same number) apart from those beyond it (scale-out)."""
    names = np.asarray(domains)
    others = ~np.eye(len(bytes_PP), dtype=bool)
    near = (names[:, None] == names[None, :]) & others
    found = {}
    for name, mask in (("ScaleUp", near), ("ScaleOut", others & ~near)):
        chosen = np.where(mask, bytes_PP, 0)
        found[f"sent{name}"] = chosen.sum(axis=1).tolist()
        found[f"received{name}"] = chosen.sum(axis=0).tolist()
    return found
