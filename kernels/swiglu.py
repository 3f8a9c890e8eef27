"""SwiGLU, act = silu(gate) * up, and its backward with the score gradient.

Legend: P ranks, T tokens per rank, K experts per token, F expert width, R rows, E experts.
"""

import torch
import torch.nn.functional as functional
from torch import Tensor

from .memory import Peers, for_experts, rows_at
from .words import Decide

_ROWS = 128


def swiglu_torch(*, arena_B: Tensor, decision: Tensor, act_RF: Tensor) -> None:
    """act_RF[r] = silu(h1[r, :F]) * h1[r, F:] in FP32; h1_R2F lies where `decision` says."""
    words = decision.tolist()
    if not words[Decide.OK]:
        return
    F = act_RF.shape[1]
    h1_R2F = rows_at(arena_B, words[Decide.H1_AT], words[Decide.ROWS], 2 * F, act_RF.dtype)

    def block(_: int, start: int, end: int) -> None:
        h1_r2F = h1_R2F[start:end].float()
        act_RF[start:end] = functional.silu(h1_r2F[:, :F]).mul_(h1_r2F[:, F:])

    for_experts(block, _blocks(words[Decide.ROWS]))


def swiglu_backward_torch(
    *,
    arena_B: Tensor,
    decision: Tensor,
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

    def block(_: int, start: int, end: int) -> None:
        h1_r2F, s_r1 = h1_R2F[start:end], s_R1[start:end]
        # Copies, in float32 too, as h1 is overwritten.
        gate_rF, up_rF = h1_r2F.to(torch.float32, copy=True).split(F, dim=1)
        g_rF = g_RF[start:end].to(torch.float32, copy=True)
        silu_rF = functional.silu(gate_rF)
        act_rF = silu_rF * up_rF
        room_rF = act_rF * g_rF
        torch.sum(room_rF, 1, keepdim=True, out=ds_R1[start:end])
        act_RF[start:end] = act_rF.mul_(s_r1)
        g_rF.mul_(s_r1)
        h1_r2F[:, F:] = silu_rF.mul_(g_rF)
        g_rF.mul_(up_rF)
        torch.ops.aten.silu_backward.grad_input(g_rF, gate_rF, grad_input=room_rF)
        h1_r2F[:, :F] = room_rF

    for_experts(block, _blocks(rows))
    back_N1[back_R] = ds_R1


def _blocks(rows: int) -> list[int]:
    """Rows are independent: blocks of them whose FP32 copies stay in cache."""
    return [*range(0, rows, _ROWS), rows]
