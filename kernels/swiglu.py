"""SwiGLU, act = silu(gate) * up, and its backward with the score gradient.

Legend: P ranks, T tokens per rank, K experts per token, F expert width, R rows, E experts.
"""

import torch
import torch.nn.functional as functional
from torch import Tensor

from .memory import Peers, for_experts, rows_at
from .words import Decide


def swiglu_torch(*, arena_B: Tensor, decision: Tensor, starts_e: Tensor, act_RF: Tensor) -> None:
    """act_RF[r] = silu(h1[r, :F]) * h1[r, F:] in FP32; h1_R2F lies where `decision` says."""
    words = decision.tolist()
    if not words[Decide.OK]:
        return
    F = act_RF.shape[1]
    h1_R2F = rows_at(arena_B, words[Decide.H1_AT], words[Decide.ROWS], 2 * F, act_RF.dtype)

    def expert(_: int, start: int, end: int) -> None:
        h1_r2F = h1_R2F[start:end].float()
        gate_rF = functional.silu(h1_r2F[:, :F])
        act_RF[start:end] = gate_rF.mul_(h1_r2F[:, F:])

    for_experts(expert, starts_e.tolist())


def swiglu_backward_torch(
    *,
    arena_B: Tensor,
    decision: Tensor,
    starts_e: Tensor,
    rank_R: Tensor,
    row_R: Tensor,
    scores: Peers,
    g_RF: Tensor,
    dscores: Peers,
    back_rank_R: Tensor | None,
    back_row_R: Tensor,
    act_RF: Tensor,
) -> None:
    """From g_RF, the gradient of act before the score: scores' gradient, act times score, dh1.

    With s[r] = scores[rank_R[r], row_R[r]] (float32 [P, N, 1]):
    dscores[back_rank_R[r], back_row_R[r]] = sum over F of act * g (float32 [P, N, 1]);
    act_RF[r] = s * act, which W2's gradient wants, as the rows of dy are gathered without their
    score; h1_R2F[r] = s * g * d act / d h1, in place where `decision` says.
    """
    words = decision.tolist()
    if not words[Decide.OK]:
        return
    rows, F = words[Decide.ROWS], act_RF.shape[1]
    h1_R2F = rows_at(arena_B, words[Decide.H1_AT], rows, 2 * F, act_RF.dtype)
    table_N1, from_R = scores.find(rank_R, row_R, rows)
    back_N1, back_R = dscores.find(back_rank_R, back_row_R, rows)
    s_R1 = table_N1[from_R]
    ds_R1 = torch.empty_like(s_R1)

    def expert(_: int, start: int, end: int) -> None:
        h1_r2F = h1_R2F[start:end]
        gate_rF, up_rF = h1_r2F[:, :F].float(), h1_r2F[:, F:].float()
        s_r1 = s_R1[start:end]
        g_rF = g_RF[start:end].float()
        sigmoid_rF = torch.sigmoid(gate_rF)
        silu_rF = gate_rF * sigmoid_rF
        act_rF = silu_rF * up_rF
        torch.sum(act_rF * g_rF, 1, keepdim=True, out=ds_R1[start:end])
        act_RF[start:end] = act_rF.mul_(s_r1)
        g_rF = g_rF * s_r1
        dup_rF = silu_rF * g_rF
        # d silu = sigmoid * (1 + gate * (1 - sigmoid)) = sigmoid + silu * (1 - sigmoid)
        slope_rF = silu_rF.addcmul_(silu_rF, sigmoid_rF, value=-1).add_(sigmoid_rF)
        dgate_rF = slope_rF.mul_(up_rF).mul_(g_rF)
        h1_r2F[:, :F] = dgate_rF
        h1_r2F[:, F:] = dup_rF

    for_experts(expert, starts_e.tolist())
    back_N1[back_R] = ds_R1
