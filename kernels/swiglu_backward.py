"""Backward of SwiGLU, act = silu(gate) * up, with the score gradient; plain or clamped.

Legend: P ranks, T tokens per rank, K experts per token, F expert width, R rows, E experts.
"""

import torch
import torch.nn.functional as functional
import triton.language as tl
from torch import Tensor

from .device import (
    TRITON_DTYPE,
    Launch,
    Target,
    cdiv,
    kernel,
    operand,
    peer_rows,
    pointer,
    rounded,
    widened,
    word,
)
from .ops import Arguments, Blanks, Cost, Sizes, op
from .peers import Kept, Peers, for_experts
from .swiglu import CLAMP_LIMIT, clamped, launch_constants, row_blocks
from .words import Decide


def swiglu_backward_torch(
    *,
    h1: Kept,
    decision: Tensor,
    rank_R: Tensor,
    row_R: Tensor,
    scores: Peers,
    g_RF: Tensor,
    dscores: Peers,
    back_rank_R: Tensor | None,
    back_row_R: Tensor,
    act_RF: Tensor,
    limit: float | None = None,
) -> None:
    """From g_RF, the gradient of act before the score: scores' gradient, act times score, dh1.

    With s[r] = scores[rank_R[r], row_R[r]] (float32 [P, N, 1]):
    dscores[back_rank_R[r], back_row_R[r]] = sum over F of act * g (float32 [P, N, 1]);
    act_RF[r] = s * act, which W2's gradient wants, as the rows of dy are gathered without their
    score; h1[r] = s * g * d act / d h1, in place.
    """
    words = decision.tolist()
    if not words[Decide.OK]:
        return
    rows, F = words[Decide.ROWS], act_RF.shape[1]
    h1_R2F = h1.rows()
    table_N1, from_R = scores.find(rank_R, row_R, rows)
    back_N1, back_R = dscores.find(back_rank_R, back_row_R, rows)
    s_R1 = table_N1[from_R]
    ds_R1 = torch.empty_like(s_R1)

    def block(_: int, start: int, end: int) -> None:
        h1_r2F, s_r1 = h1_R2F[start:end], s_R1[start:end]
        # Copies, in float32 too, as h1 is overwritten.
        gate_rF, up_rF = h1_r2F.to(torch.float32, copy=True).split(F, dim=1)
        if limit is not None:
            cut_gate, cut_up = gate_rF > limit, up_rF.abs() > limit
            gate_rF.clamp_(max=limit)
            up_rF.clamp_(-limit, limit)
        g_rF = g_RF[start:end].to(torch.float32, copy=True)
        silu_rF = functional.silu(gate_rF)
        act_rF = silu_rF * up_rF
        room_rF = act_rF * g_rF
        torch.sum(room_rF, 1, keepdim=True, out=ds_R1[start:end])
        act_RF[start:end] = act_rF.mul_(s_r1)
        g_rF.mul_(s_r1)
        silu_rF.mul_(g_rF)
        if limit is not None:
            silu_rF.masked_fill_(cut_up, 0)
        h1_r2F[:, F:] = silu_rF
        g_rF.mul_(up_rF)
        torch.ops.aten.silu_backward.grad_input(g_rF, gate_rF, grad_input=room_rF)
        if limit is not None:
            room_rF.masked_fill_(cut_gate, 0)
        h1_r2F[:, :F] = room_rF

    for_experts(block, row_blocks(rows))
    back_N1[back_R] = ds_R1


@kernel
def swiglu_backward_kernel(
    arena_at: tl.int64,
    row_bytes_at: tl.int64,
    decision_at: tl.int64,
    rank_at: tl.int64,
    row_at: tl.int64,
    scores_bases_at: tl.int64,
    scores_offset: tl.int64,
    g_at: tl.int64,
    dscores_bases_at: tl.int64,
    dscores_offset: tl.int64,
    back_rank_at: tl.int64,
    back_row_at: tl.int64,
    act_at: tl.int64,
    F,
    OK: tl.constexpr,
    ROWS_WORD: tl.constexpr,
    H1_INDEX: tl.constexpr,
    DTYPE: tl.constexpr,
    ROW: tl.constexpr,
    BACK_ROW: tl.constexpr,
    BACK_RANKED: tl.constexpr,
    VECTOR: tl.constexpr,
    CLAMP: tl.constexpr,
    LIMIT: tl.constexpr,
    BR: tl.constexpr,
    BF: tl.constexpr,
):
    """Grid: persistent programs. h1: DTYPE [R, 2F] in the arena, overwritten; g, act: DTYPE
    [R, F]; scores, dscores: float32 [N, 1] of every peer; ranks int32 [R], rows as given."""
    if word(decision_at, OK) != 0:
        rows = word(decision_at, ROWS_WORD).to(tl.int32)
        h1 = operand(0, arena_at, decision_at, row_bytes_at, H1_INDEX, DTYPE, VECTOR)
        g_rows = pointer(g_at, DTYPE, VECTOR)
        act_rows = pointer(act_at, DTYPE, VECTOR)
        for i in range(tl.program_id(0), (rows + BR - 1) // BR, tl.num_programs(0)):
            r = i * BR + tl.arange(0, BR)
            mine = r < rows
            s_at = peer_rows(
                scores_bases_at, scores_offset, rank_at, row_at, r, mine, 1, 4, ROW, True
            )
            s = tl.load(pointer(s_at, tl.float32), mask=mine, other=0.0)
            ds = tl.zeros([BR], tl.float32)
            at = r.to(tl.int64)[:, None] * F
            for first in range(0, F, BF):
                f = first + tl.arange(0, BF)
                mask = mine[:, None] & (f < F)[None, :]
                gate = widened(tl.load(h1 + 2 * at + f[None, :], mask=mask, other=0.0))
                up = widened(tl.load(h1 + 2 * at + F + f[None, :], mask=mask, other=0.0))
                g = widened(tl.load(g_rows + at + f[None, :], mask=mask, other=0.0))
                if CLAMP:
                    keep_gate = ~(gate > LIMIT)
                    keep_up = ~((up > LIMIT) | (up < -LIMIT))
                    gate, up = clamped(gate, up, LIMIT)
                sigmoid = 1 / (1 + tl.exp(-gate))
                silu = gate * sigmoid
                act = silu * up
                ds += tl.sum(act * g, 1)
                g *= s[:, None]
                # d silu = sigmoid * (1 + gate * (1 - sigmoid)) = sigmoid + silu * (1 - sigmoid)
                dgate = (silu - silu * sigmoid + sigmoid) * up * g
                dup = silu * g
                if CLAMP:
                    dgate = tl.where(keep_gate, dgate, 0.0)
                    dup = tl.where(keep_up, dup, 0.0)
                tl.store(act_rows + at + f[None, :], rounded(act * s[:, None], DTYPE), mask=mask)
                tl.store(h1 + 2 * at + f[None, :], rounded(dgate, DTYPE), mask=mask)
                tl.store(h1 + 2 * at + F + f[None, :], rounded(dup, DTYPE), mask=mask)
            back_at = peer_rows(
                dscores_bases_at,
                dscores_offset,
                back_rank_at,
                back_row_at,
                r,
                mine,
                1,
                4,
                BACK_ROW,
                BACK_RANKED,
            )
            tl.store(pointer(back_at, tl.float32), ds, mask=mine)


def _backward_examples(blank: Blanks) -> dict[str, Arguments]:
    s = blank.sizes
    plain = {
        **blank.route(),
        **blank.route("back_"),
        "h1": blank.h1_kept,
        "decision": blank.decision,
        "act_RF": blank.act_RF,
        "g_RF": blank.act_RF,
        "scores": blank.peers(s.R, 1, dtype=torch.float32),
        "dscores": blank.peers(s.R, 1, dtype=torch.float32),
    }
    return {"": plain, "clamped": {**plain, "limit": CLAMP_LIMIT}}


def _backward_cost(s: Sizes, _: Arguments) -> Cost:
    return Cost(hbm_bytes=s.bytes(s.R, 6 * s.F) + 8 * s.R, link_bytes=4 * s.R)


@op(
    twin=swiglu_backward_torch,
    examples=_backward_examples,
    cost=_backward_cost,
    pulls=(("scores", "rank_R"),),
    pushes=(("dscores", "back_rank_R"),),
    tiles=lambda s, launch: cdiv(s.R, launch.constants["BR"]),
)
def swiglu_backward(
    target: Target,
    *,
    h1: Kept,
    decision: Tensor,
    rank_R: Tensor,
    row_R: Tensor,
    scores: Peers,
    g_RF: Tensor,
    dscores: Peers,
    back_rank_R: Tensor | None,
    back_row_R: Tensor,
    act_RF: Tensor,
    limit: float | None = None,
) -> list[Launch]:
    """Launches equivalent to `swiglu_backward_torch`."""
    choice, constants = launch_constants(target, h1, act_RF, limit, g_RF)
    args: dict[str, int | Tensor | None] = {
        "arena_at": h1.arena_B,
        "row_bytes_at": h1.row_bytes_O,
        "decision_at": decision,
        "rank_at": rank_R,
        "row_at": row_R,
        "scores_bases_at": scores.bases_P,
        "scores_offset": scores.offset,
        "g_at": g_RF,
        "dscores_bases_at": dscores.bases_P,
        "dscores_offset": dscores.offset,
        "back_rank_at": back_rank_R,
        "back_row_at": back_row_R,
        "act_at": act_RF,
        "F": act_RF.shape[1],
    }
    constants |= {
        "ROW": TRITON_DTYPE[row_R.dtype],
        "BACK_ROW": TRITON_DTYPE[back_row_R.dtype],
        "BACK_RANKED": back_rank_R is not None,
    }
    return [
        Launch(
            kernel=swiglu_backward_kernel,
            grid=choice.programs,
            args=args,
            constants=constants,
            num_warps=choice.warps,
        )
    ]
