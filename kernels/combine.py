"""Grouped products whose rows go to their owners: W2 in forward, W13's dgrad in backward.

Legend: P ranks, N rows of a destination, D hidden width, F expert width, E experts, R rows.
"""

import torch
from torch import Tensor

from .device import Launch, Target
from .grouped_gemm import grouped_gemm, product_tiles
from .ops import Arguments, Blanks, Cost, Sizes, op
from .peers import Kept, Peers, for_experts, wide
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
        _scatter(act_RF, w2_EDF.transpose(1, 2), starts_e, words[Decide.ROWS], rank_R, row_R, out)


def w13_dgrad_combine_torch(
    *,
    dh1: Kept,
    w13_E2FD: Tensor,
    starts_e: Tensor,
    decision: Tensor,
    rank_R: Tensor | None,
    row_R: Tensor,
    out: Peers,
) -> None:
    """out[rank_R[r], row_R[r]] = dh1[r] @ w13[expert], dh1 [R, 2F] where the layer kept h1."""
    words = decision.tolist()
    if words[Decide.OK]:
        _scatter(dh1.rows(), w13_E2FD, starts_e, words[Decide.ROWS], rank_R, row_R, out)


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


def _w2_examples(blank: Blanks) -> dict[str, Arguments]:
    s = blank.sizes
    return {
        "": {
            **blank.over_experts(),
            **blank.route(),
            "act_RF": blank.act_RF,
            "w2_EDF": blank.w2_EDF,
            "out": blank.peers(s.R, s.D),
        }
    }


def _w2_cost(s: Sizes, _: Arguments) -> Cost:
    out = s.bytes(s.R, s.D)
    return Cost(
        flop=2 * s.R * s.D * s.F,
        link_bytes=out,
        hbm_bytes=s.bytes(s.R, s.F) + s.bytes(s.e, s.D, s.F) + out,
    )


@op(
    twin=w2_combine_torch,
    examples=_w2_examples,
    cost=_w2_cost,
    pushes=(("out", "rank_R"),),
    tiles=product_tiles,
)
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
    """Launches equivalent to `w2_combine_torch`; rows go straight to their owners."""
    return grouped_gemm(
        target,
        weights=w2_EDF,
        weights_NK=True,
        starts_e=starts_e,
        decision=decision,
        rows=row_R.shape[0],
        peers=out,
        rank_R=rank_R,
        row_R=row_R,
        scatter=True,
        a=act_RF,
    )


def _w13_examples(blank: Blanks) -> dict[str, Arguments]:
    s = blank.sizes
    return {
        "": {
            **blank.over_experts(),
            **blank.route(),
            "dh1": blank.h1_kept,
            "w13_E2FD": blank.w13_E2FD,
            "out": blank.peers(s.R, s.D),
        }
    }


def _w13_cost(s: Sizes, _: Arguments) -> Cost:
    out = s.bytes(s.R, s.D)
    return Cost(
        flop=4 * s.R * s.D * s.F,
        link_bytes=out,
        hbm_bytes=s.bytes(s.R, 2 * s.F) + s.bytes(s.e, 2 * s.F, s.D) + out,
    )


@op(
    twin=w13_dgrad_combine_torch,
    examples=_w13_examples,
    cost=_w13_cost,
    pushes=(("out", "rank_R"),),
    tiles=product_tiles,
)
def w13_dgrad_combine(
    target: Target,
    *,
    dh1: Kept,
    w13_E2FD: Tensor,
    starts_e: Tensor,
    decision: Tensor,
    rank_R: Tensor | None,
    row_R: Tensor,
    out: Peers,
) -> list[Launch]:
    """Launches equivalent to `w13_dgrad_combine_torch`; rows go straight to their owners."""
    return grouped_gemm(
        target,
        weights=w13_E2FD,
        weights_NK=False,
        starts_e=starts_e,
        decision=decision,
        rows=row_R.shape[0],
        peers=out,
        rank_R=rank_R,
        row_R=row_R,
        scatter=True,
        a=dh1,
    )
