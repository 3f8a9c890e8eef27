"""Grouped products whose rows go to their owners: W2 in forward, W13's dgrad in backward.

Legend: P ranks, N rows of a destination, D hidden width, F expert width, E experts, R rows.
"""

import torch
from torch import Tensor

from .device import Launch, Target
from .grouped_gemm import grouped_gemm
from .memory import Peers, for_experts, rows_at, wide
from .words import Decide


def w2_combine_torch(
    *,
    act_RF: Tensor,
    w2_EDF: Tensor,
    starts_e: Tensor,
    decision: Tensor,
    rank_R: Tensor | None,
    row_R: Tensor,
    out: Peers,
) -> None:
    """out[rank_R[r], row_R[r]] = act_RF[r] @ w2[expert].T, FP32 inside, rounded once.

    out: [P, N, D]. A no-op unless the decision is OK.
    """
    words = decision.tolist()
    if words[Decide.OK]:
        _scatter(act_RF, w2_EDF.transpose(1, 2), starts_e, words[Decide.ROWS],
                 rank_R, row_R, out)  # fmt: skip


def w13_dgrad_combine_torch(
    *,
    arena_B: Tensor,
    w13_E2FD: Tensor,
    starts_e: Tensor,
    decision: Tensor,
    rank_R: Tensor | None,
    row_R: Tensor,
    out: Peers,
) -> None:
    """out[rank_R[r], row_R[r]] = dh1_R2F[r] @ w13[expert], dh1 where `decision` says h1 lies."""
    words = decision.tolist()
    if words[Decide.OK]:
        dh1_R2F = rows_at(
            arena_B, words[Decide.H1_AT], words[Decide.ROWS], w13_E2FD.shape[1], w13_E2FD.dtype
        )
        _scatter(dh1_R2F, w13_E2FD, starts_e, words[Decide.ROWS], rank_R, row_R, out)


def _scatter(
    a_RK: Tensor,
    b_EKN: Tensor,
    starts_e: Tensor,
    rows: int,
    rank_R: Tensor | None,
    row_R: Tensor,
    out: Peers,
) -> None:
    table_ND, to_R = out.find(rank_R, row_R, rows)

    def expert(e: int, start: int, end: int) -> None:
        # Scattered at once, while it is in cache.
        out_rD = torch.mm(a_RK[start:end], b_EKN[e])
        wide(table_ND).index_copy_(0, to_R[start:end], wide(out_rD))

    for_experts(expert, starts_e.tolist())


def w2_combine(
    target: Target,
    *,
    act_RF: Tensor,
    w2_EDF: Tensor,
    starts_e: Tensor,
    decision: Tensor,
    rank_R: Tensor | None,
    row_R: Tensor,
    out: Peers,
) -> list[Launch]:
    """As the twin; rows go straight to their owners."""
    return grouped_gemm(
        target, weights=w2_EDF, weights_NK=True, starts_e=starts_e, decision=decision,
        when=Decide.OK, rows=row_R.shape[0], peers=out, rank_R=rank_R, row_R=row_R, scatter=True,
        a=act_RF,
    )  # fmt: skip


def w13_dgrad_combine(
    target: Target,
    *,
    arena_B: Tensor,
    w13_E2FD: Tensor,
    starts_e: Tensor,
    decision: Tensor,
    rank_R: Tensor | None,
    row_R: Tensor,
    out: Peers,
) -> list[Launch]:
    """As the twin; rows go straight to their owners."""
    return grouped_gemm(
        target, weights=w13_E2FD, weights_NK=False, starts_e=starts_e, decision=decision,
        when=Decide.OK, rows=row_R.shape[0], peers=out, rank_R=rank_R, row_R=row_R, scatter=True,
        arena_B=arena_B, a=Decide.H1_AT,
    )  # fmt: skip
