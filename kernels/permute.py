"""Row orders of the unfused baseline: what it packs before and unpacks after an all-to-all.

A rank sends its T * K routes ordered by (expert, token, k); a rank receives rows ordered by
(source rank, expert, token, k), and multiplies them ordered by (expert, source rank, token, k).

Legend: T tokens, D hidden width, K experts per token, P ranks, E experts in all, R rows received.
"""

import torch
from torch import Tensor

from .words import Decide


def send_order_torch(*, ids_TK: Tensor, decision: Tensor, order_N: Tensor) -> None:
    """order_N[i] = token * K + k of the i-th row sent; int64 [T * K]."""
    if decision[Decide.OK]:
        torch.argsort(ids_TK.flatten(), stable=True, out=order_N)


def receive_order_torch(*, rank_R: Tensor, decision: Tensor, position_R: Tensor) -> None:
    """position_R[r] = place in the received rows of the r-th row as it is multiplied; int64."""
    if decision[Decide.OK]:
        rows = int(decision[Decide.ROWS])
        order_R = torch.argsort(rank_R[:rows], stable=True)
        position_R[order_R] = torch.arange(rows, device=order_R.device)


def pack_torch(
    *, rows_ND: Tensor, order_N: Tensor, divisor: int, decision: Tensor, send_ND: Tensor
) -> None:
    """send_ND[i] = rows_ND[order_N[i] // divisor]; divisor K packs tokens, 1 packs routes."""
    if decision[Decide.OK]:
        torch.index_select(rows_ND, 0, order_N // divisor, out=send_ND)


def unpack_torch(*, received_ND: Tensor, order_N: Tensor, decision: Tensor, out_ND: Tensor) -> None:
    """out_ND[order_N[i]] = received_ND[i]."""
    if decision[Decide.OK]:
        out_ND.index_copy_(0, order_N, received_ND)
