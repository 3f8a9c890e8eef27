"""Grouped weight gradients: one product per expert over the rows that it received.

Legend: D hidden width, F expert width, E experts of this rank, R rows.
"""

import torch
from torch import Tensor

from .memory import for_experts, rows_at
from .words import Decide


def w2_wgrad_torch(
    *, dy_RD: Tensor, act_RF: Tensor, starts_e: Tensor, decision: Tensor, dw2_EDF: Tensor
) -> None:
    """dw2[expert] = dy_RD.T @ act_RF over its rows (act holds the score); zeros without rows.

    NaN everywhere where the call does not run: a gradient is never silently wrong.
    """
    words = decision.tolist()
    if not words[Decide.OK]:
        dw2_EDF.fill_(float("nan"))
        return

    def expert(e: int, start: int, end: int) -> None:
        torch.mm(dy_RD[start:end].t(), act_RF[start:end], out=dw2_EDF[e])

    for_experts(expert, starts_e.tolist(), empty=True)


def w13_wgrad_torch(
    *, arena_B: Tensor, starts_e: Tensor, decision: Tensor, dw13_E2FD: Tensor
) -> None:
    """dw13[expert] = dh1_R2F.T @ x_RD over its rows, both where `decision` says; else as above."""
    words = decision.tolist()
    if not words[Decide.OK]:
        dw13_E2FD.fill_(float("nan"))
        return
    _, width, D = dw13_E2FD.shape
    rows, dtype = words[Decide.ROWS], dw13_E2FD.dtype
    x_RD = rows_at(arena_B, words[Decide.X_AT], rows, D, dtype)
    dh1_R2F = rows_at(arena_B, words[Decide.H1_AT], rows, width, dtype)

    def expert(e: int, start: int, end: int) -> None:
        torch.mm(dh1_R2F[start:end].t(), x_RD[start:end], out=dw13_E2FD[e])

    for_experts(expert, starts_e.tolist(), empty=True)
