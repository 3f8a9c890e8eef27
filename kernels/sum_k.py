"""The owner's sum over its K routes, in FP32 and in k order.

Legend: T tokens, K experts per token, D hidden width.
"""

import torch
from torch import Tensor

from .memory import for_experts
from .words import Decide

_TOKENS = 128


def sum_k_torch(
    *, rows_TKD: Tensor, scores_TK: Tensor | None, decision: Tensor, out_TD: Tensor
) -> None:
    """out_TD = sum over k of scores_TK (1 if None) * rows_TKD, rounded once.

    NaN everywhere where the call does not run: an output is never silently wrong.
    """
    if not decision[Decide.OK]:
        out_TD.fill_(float("nan"))
        return
    T, K, D = rows_TKD.shape

    def block(_: int, start: int, end: int) -> None:
        row_tD, total_tD = torch.empty(2, end - start, D).unbind()
        total_tD.copy_(rows_TKD[start:end, 0])
        if scores_TK is not None:
            total_tD.mul_(scores_TK[start:end, 0, None])
        for k in range(1, K):
            row_tD.copy_(rows_TKD[start:end, k])
            if scores_TK is None:
                total_tD.add_(row_tD)
            else:
                total_tD.addcmul_(row_tD, scores_TK[start:end, k, None])
        out_TD[start:end] = total_tD

    # Blocks of tokens whose FP32 sums stay in cache.
    for_experts(block, [*range(0, T, _TOKENS), T])


def take_dscores_torch(*, dscores_TK: Tensor, decision: Tensor, out_TK: Tensor) -> None:
    """The score gradients that peers have put into symmetric memory; NaN if it did not run."""
    if decision[Decide.OK]:
        out_TK.copy_(dscores_TK)
    else:
        out_TK.fill_(float("nan"))
