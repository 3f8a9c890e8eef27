"""The owner's sum over its K routes, in FP32 and in k order.

Legend: T tokens, K experts per token, D hidden width.
"""

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
    T, K, _ = rows_TKD.shape

    def tokens(_: int, start: int, end: int) -> None:
        total_tD: Tensor | None = None
        for k in range(K):
            row_tD = rows_TKD[start:end, k].float()
            if scores_TK is not None:
                row_tD = row_tD * scores_TK[start:end, k, None]
            total_tD = row_tD if total_tD is None else total_tD.add_(row_tD)
        assert total_tD is not None
        out_TD[start:end] = total_tD

    # Blocks of tokens whose FP32 sums stay in cache.
    for_experts(tokens, [*range(0, T, _TOKENS), T])


def take_dscores_torch(*, dscores_TK: Tensor, decision: Tensor, out_TK: Tensor) -> None:
    """The score gradients that peers have put into symmetric memory; NaN if the call did not run."""
    if decision[Decide.OK]:
        out_TK.copy_(dscores_TK)
    else:
        out_TK.fill_(float("nan"))
