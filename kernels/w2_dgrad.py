"""W2's dgrad with the gather of the output gradient's rows from their owners.

Legend: P ranks, N rows of a source, D hidden width, F expert width, E experts, R rows.
"""

import torch
from torch import Tensor

from .device import Launch, Target
from .grouped_gemm import grouped_gemm
from .memory import Peers, for_experts
from .words import Decide


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
    if not words[Decide.OK]:
        return
    table_ND, from_R = dy.find(rank_R, row_R, words[Decide.ROWS], divisor)

    def expert(e: int, start: int, end: int) -> None:
        dy_rD = dy_RD[start:end]
        torch.index_select(table_ND, 0, from_R[start:end], out=dy_rD)
        torch.mm(dy_rD, w2_EDF[e], out=g_RF[start:end])

    for_experts(expert, starts_e.tolist())


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
    """As the twin."""
    return grouped_gemm(
        target, weights=w2_EDF, weights_NK=False, starts_e=starts_e, decision=decision,
        when=Decide.OK, rows=row_R.shape[0], peers=dy, rank_R=rank_R, row_R=row_R,
        divisor=divisor, gather=True, a=dy_RD, out=g_RF,
    )  # fmt: skip
