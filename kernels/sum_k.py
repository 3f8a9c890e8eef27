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

    def bags(_: int, start: int, end: int) -> None:
        rows_ND = rows_TKD[start:end].flatten(0, 1)
        first_t = torch.arange(0, (end - start) * K, K)
        each_N = torch.arange((end - start) * K)
        # A bag's rows are summed in FP32, one after the other, and rounded once.
        out_TD[start:end] = torch.embedding_bag(rows_ND, each_N, first_t, mode=0)[0]

    def weighted(_: int, start: int, end: int) -> None:
        assert scores_TK is not None
        row_tD, total_tD = torch.empty(2, end - start, D).unbind()
        for k in range(K):
            scores_t1 = scores_TK[start:end, k, None]
            if k == 0:
                total_tD.copy_(rows_TKD[start:end, k]).mul_(scores_t1)
            else:
                total_tD.addcmul_(row_tD.copy_(rows_TKD[start:end, k]), scores_t1)
        out_TD[start:end] = total_tD

    # Blocks of tokens whose FP32 sums stay in cache.
    for_experts(bags if scores_TK is None else weighted, [*range(0, T, _TOKENS), T])


def take_dscores_torch(*, dscores_TK: Tensor, decision: Tensor, out_TK: Tensor) -> None:
    """The score gradients that peers have put into symmetric memory; NaN if it did not run."""
    if decision[Decide.OK]:
        out_TK.copy_(dscores_TK)
    else:
        out_TK.fill_(float("nan"))
