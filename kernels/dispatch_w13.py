"""Dispatch and W13: gather the routed rows from their owners, multiply by gate and up weights.

Legend: P ranks, T tokens per rank, D hidden width, F expert width, E experts of this rank, R rows.
"""

import torch
from torch import Tensor

from .device import Launch, Target
from .grouped_gemm import grouped_gemm
from .memory import Peers, for_experts, rows_at
from .words import Decide


def dispatch_w13_torch(
    *,
    x: Peers,
    rank_R: Tensor | None,
    row_R: Tensor,
    divisor: int,
    starts_e: Tensor,
    w13_E2FD: Tensor,
    arena_B: Tensor,
    decision: Tensor,
    when: Decide,
) -> None:
    """x_RD[r] = x[rank_R[r], row_R[r] // divisor]; h1_R2F = x_RD @ w13[expert].T, FP32 inside.

    x: [P, N, D]. rank_R (None: the only rank), row_R: integers, the source of each row.
    starts_e: int64 [E + 1]. x_RD and h1_R2F are written into the own arena where `decision` says.
    A no-op unless its words OK and `when` are set.
    """
    words = decision.tolist()
    if not (words[Decide.OK] and words[when]):
        return
    rows, dtype = words[Decide.ROWS], w13_E2FD.dtype
    _, width, D = w13_E2FD.shape
    x_RD = rows_at(arena_B, words[Decide.X_AT], rows, D, dtype)
    h1_R2F = rows_at(arena_B, words[Decide.H1_AT], rows, width, dtype)
    table_ND, from_R = x.find(rank_R, row_R, rows, divisor)

    def expert(e: int, start: int, end: int) -> None:
        x_rD = x_RD[start:end]
        torch.index_select(table_ND, 0, from_R[start:end], out=x_rD)
        torch.mm(x_rD, w13_E2FD[e].t(), out=h1_R2F[start:end])

    for_experts(expert, starts_e.tolist())


def dispatch_w13(
    target: Target,
    *,
    x: Peers,
    rank_R: Tensor | None,
    row_R: Tensor,
    divisor: int,
    starts_e: Tensor,
    w13_E2FD: Tensor,
    arena_B: Tensor,
    decision: Tensor,
    when: Decide,
) -> list[Launch]:
    """As the twin."""
    return grouped_gemm(
        target, weights=w13_E2FD, weights_NK=True, starts_e=starts_e, decision=decision, when=when,
        rows=row_R.shape[0], peers=x, rank_R=rank_R, row_R=row_R, divisor=divisor, gather=True,
        arena_B=arena_B, a=Decide.X_AT, out=Decide.H1_AT,
    )  # fmt: skip
