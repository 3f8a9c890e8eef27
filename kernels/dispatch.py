"""Grouped products whose rows come from their owners: W13 in forward, W2's dgrad in backward.

Legend: P ranks, N rows of a source, D hidden width, F expert width, E experts of this rank, R rows.
"""

import torch
from torch import Tensor

from .device import Launch, Target
from .grouped_gemm import grouped_gemm, product_tiles
from .ops import Arguments, Blanks, Cost, Sizes, op
from .peers import Kept, Peers, for_experts
from .words import Decide


def dispatch_w13_torch(
    *,
    x: Peers,
    rank_R: Tensor | None,
    row_R: Tensor,
    divisor: int,
    starts_e: Tensor,
    w13_E2FD: Tensor,
    x_kept: Kept,
    h1: Kept,
    decision: Tensor,
    again: bool = False,
) -> None:
    """x_kept[r] = x[rank_R[r], row_R[r] // divisor]; h1 = x_kept @ w13[expert].T, FP32 inside.

    x: [P, N, D]. rank_R (None: the only rank), row_R: integers, the source of each row.
    starts_e: int64 [E + 1]. x_kept [R, D] and h1 [R, 2F] are kept by the layer. A no-op unless the
    decision is OK; with `again`, unless the layer's rows were not all kept.
    """
    words = decision.tolist()
    if words[Decide.OK] and not (again and words[Decide.KEPT] == words[Decide.ROWS]):
        w13_EDF2 = w13_E2FD.transpose(1, 2)
        _gather(x, rank_R, row_R, divisor, starts_e, x_kept.rows(), w13_EDF2, h1.rows())


def w2_dgrad_torch(
    *,
    dy: Peers,
    rank_R: Tensor | None,
    row_R: Tensor,
    divisor: int,
    starts_e: Tensor,
    w2_EDF: Tensor,
    decision: Tensor,
    dy_RD: Tensor,
    g_RF: Tensor,
) -> None:
    """dy_RD[r] = dy[rank_R[r], row_R[r] // divisor]; g_RF = dy_RD @ w2[expert], without score.

    dy: [P, N, D]. A no-op unless the decision is OK.
    """
    words = decision.tolist()
    if words[Decide.OK]:
        rows = words[Decide.ROWS]
        _gather(dy, rank_R, row_R, divisor, starts_e, dy_RD[:rows], w2_EDF, g_RF[:rows])


def _gather(
    source: Peers,
    rank_R: Tensor | None,
    row_R: Tensor,
    divisor: int,
    starts_e: Tensor,
    a_RK: Tensor,
    b_EKN: Tensor,
    out_RN: Tensor,
) -> None:
    table_NK, from_R = source.find(rank_R, row_R, len(a_RK), divisor)

    def expert(e: int, start: int, end: int) -> None:
        # Multiplied at once, while it is in cache.
        a_rK = a_RK[start:end]
        torch.index_select(table_NK, 0, from_R[start:end], out=a_rK)
        torch.mm(a_rK, b_EKN[e], out=out_RN[start:end])

    for_experts(expert, starts_e.tolist())


def _dispatch_examples(blank: Blanks) -> dict[str, Arguments]:
    s = blank.sizes
    return {
        "": {
            **blank.over_experts(),
            **blank.route(),
            "x": blank.peers(s.T, s.D),
            "divisor": s.K,
            "w13_E2FD": blank.w13_E2FD,
            "x_kept": blank.x_kept,
            "h1": blank.h1_kept,
        }
    }


def _dispatch_cost(s: Sizes, _: Arguments) -> Cost:
    x, h1 = s.bytes(s.R, s.D), s.bytes(s.R, 2 * s.F)
    return Cost(
        flop=4 * s.R * s.D * s.F, hbm_bytes=3 * x + s.bytes(s.e, 2 * s.F, s.D) + h1, link_bytes=x
    )


@op(
    twin=dispatch_w13_torch,
    examples=_dispatch_examples,
    cost=_dispatch_cost,
    pulls=(("x", "rank_R"),),
    tiles=product_tiles,
)
def dispatch_w13(
    target: Target,
    *,
    x: Peers,
    rank_R: Tensor | None,
    row_R: Tensor,
    divisor: int,
    starts_e: Tensor,
    w13_E2FD: Tensor,
    x_kept: Kept,
    h1: Kept,
    decision: Tensor,
    again: bool = False,
) -> list[Launch]:
    """Launches equivalent to `dispatch_w13_torch`."""
    return grouped_gemm(
        target,
        weights=w13_E2FD,
        weights_NK=True,
        starts_e=starts_e,
        decision=decision,
        again=again,
        rows=row_R.shape[0],
        peers=x,
        rank_R=rank_R,
        row_R=row_R,
        divisor=divisor,
        gather=True,
        a=x_kept,
        out=h1,
    )


def _dgrad_examples(blank: Blanks) -> dict[str, Arguments]:
    s = blank.sizes
    return {
        "": {
            **blank.over_experts(),
            **blank.route(),
            "dy": blank.peers(s.T, s.D),
            "divisor": s.K,
            "w2_EDF": blank.w2_EDF,
            "dy_RD": blank.rows_RD,
            "g_RF": blank.act_RF,
        }
    }


def _dgrad_cost(s: Sizes, _: Arguments) -> Cost:
    dy, g = s.bytes(s.R, s.D), s.bytes(s.R, s.F)
    return Cost(
        flop=2 * s.R * s.D * s.F, hbm_bytes=3 * dy + s.bytes(s.e, s.D, s.F) + g, link_bytes=dy
    )


@op(
    twin=w2_dgrad_torch,
    examples=_dgrad_examples,
    cost=_dgrad_cost,
    pulls=(("dy", "rank_R"),),
    tiles=product_tiles,
)
def w2_dgrad(
    target: Target,
    *,
    dy: Peers,
    rank_R: Tensor | None,
    row_R: Tensor,
    divisor: int,
    starts_e: Tensor,
    w2_EDF: Tensor,
    decision: Tensor,
    dy_RD: Tensor,
    g_RF: Tensor,
) -> list[Launch]:
    """Launches equivalent to `w2_dgrad_torch`."""
    return grouped_gemm(
        target,
        weights=w2_EDF,
        weights_NK=False,
        starts_e=starts_e,
        decision=decision,
        rows=row_R.shape[0],
        peers=dy,
        rank_R=rank_R,
        row_R=row_R,
        divisor=divisor,
        gather=True,
        a=dy_RD,
        out=g_RF,
    )
