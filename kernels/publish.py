"""Publish: a rank's rows, ids and scores go where its peers can read them, and are checked.

Legend: T tokens, D hidden width, K experts per token, E experts in all.
"""

import torch
from torch import Tensor

from .words import Code, Head


def publish_torch(
    *,
    x_TD: Tensor,
    ids_TK: Tensor,
    scores_TK: Tensor,
    x_out_TD: Tensor,
    ids_out_TK: Tensor,
    scores_out_TK: Tensor,
    head: Tensor,
    num_experts: int,
) -> None:
    """Copies x, ids (any integer dtype to int32) and scores (to float32) into symmetric memory.

    A wrong id or score is noted in `head` (int64 [HEAD_WORDS]). A no-op where the host has already
    put a code there.
    """
    if head[Head.CODE]:
        return
    x_out_TD.copy_(x_TD)
    ids_out_TK.copy_(ids_TK)
    scores_out_TK.copy_(scores_TK)
    ordered_TK = ids_TK.sort(1).values
    faults = (
        (Code.ID_RANGE, (ids_TK < 0) | (ids_TK >= num_experts), ids_TK),
        (Code.ID_REPEATED, ordered_TK[:, 1:] == ordered_TK[:, :-1], ordered_TK[:, 1:]),
        (Code.SCORE, ~torch.isfinite(scores_TK), None),
    )
    for code, bad, values in faults:
        if bad.any():
            token, k = bad.nonzero()[0].tolist()
            head[Head.A] = token
            head[Head.B] = k if values is None else int(values[token, k])
            head[Head.CODE] = int(code)
            return


def publish_grad_torch(*, dy_TD: Tensor, dy_out_TD: Tensor, head: Tensor) -> None:
    """Copies the output's gradient into symmetric memory; a no-op where the host put a code."""
    if not head[Head.CODE]:
        dy_out_TD.copy_(dy_TD)
