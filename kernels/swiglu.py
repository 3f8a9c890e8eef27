"""SwiGLU, act = silu(gate) * up, and its backward with the score gradient; plain or clamped.

With a limit, gate is at most the limit and up within +- the limit before they are used.

Legend: P ranks, T tokens per rank, K experts per token, F expert width, R rows, E experts.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
import triton
import triton.language as tl
from torch import Tensor

from .device import (
    TRITON_DTYPE,
    Launch,
    Target,
    address,
    cdiv,
    in_16_bytes,
    operand,
    peer_rows,
    pointer,
    rounded,
    widened,
    word,
)
from .memory import Kept, Peers, for_experts
from .ops import Arguments, Blanks, Cost, Sizes, op
from .words import Decide

_ROWS = 512


def swiglu_torch(*, h1: Kept, decision: Tensor, act_RF: Tensor, limit: float | None = None) -> None:
    """act_RF[r] = silu(h1[r, :F]) * h1[r, F:] in FP32; h1 [R, 2F] is kept by the layer."""
    words = decision.tolist()
    if not words[Decide.OK]:
        return
    F = act_RF.shape[1]
    h1_R2F = h1.rows()

    def block(_: int, start: int, end: int) -> None:
        h1_r2F = h1_R2F[start:end].to(torch.float32, copy=limit is not None)
        if limit is not None:
            h1_r2F[:, :F].clamp_(max=limit)
            h1_r2F[:, F:].clamp_(-limit, limit)
        act_RF[start:end] = functional.silu(h1_r2F[:, :F]).mul_(h1_r2F[:, F:])

    for_experts(block, _blocks(words[Decide.ROWS]))


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

    for_experts(block, _blocks(rows))
    back_N1[back_R] = ds_R1


def _blocks(rows: int) -> list[int]:
    """Rows are independent: blocks of them whose FP32 copies stay in cache."""
    return [*range(0, rows, _ROWS), rows]


@dataclass(frozen=True, kw_only=True)
class RowsChoice:
    """Blocks of BR rows and BF columns at a time, by `programs` persistent programs."""

    BR: int
    BF: int
    warps: int
    programs: int


def choose_swiglu(target: Target, *, F: int, many_values: bool) -> RowsChoice:
    """Pure. Nothing but loads and stores: as many programs per SM as its registers hold (one less
    in backward and where values are clamped), each with 12 KiB under way."""
    if target.interprets:
        return RowsChoice(BR=16, BF=64, warps=4, programs=2)
    BF = min(1024, triton.next_power_of_2(F))
    return RowsChoice(
        BR=max(1, 2048 // BF), BF=BF, warps=8, programs=(3 if many_values else 4) * target.sms
    )


@triton.jit
def _clamped(gate, up, LIMIT: tl.constexpr):
    # NaN is neither above nor below, and stays.
    gate = tl.where(gate > LIMIT, LIMIT, gate)
    up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return gate, up


@triton.jit
def swiglu_kernel(arena_at, row_bytes_at, decision_at, act_at, F, OK: tl.constexpr,
                  ROWS_WORD: tl.constexpr, H1_INDEX: tl.constexpr, DTYPE: tl.constexpr,
                  VECTOR: tl.constexpr, CLAMP: tl.constexpr, LIMIT: tl.constexpr, BR: tl.constexpr,
                  BF: tl.constexpr):  # fmt: skip
    """Grid: persistent programs. h1: DTYPE [R, 2F] in the arena; act: DTYPE [R, F]."""
    if word(decision_at, OK) != 0:
        rows = word(decision_at, ROWS_WORD).to(tl.int32)
        h1 = operand(0, arena_at, decision_at, row_bytes_at, H1_INDEX, DTYPE, VECTOR)
        act = pointer(act_at, DTYPE, VECTOR)
        columns = (F + BF - 1) // BF
        blocks = (rows + BR - 1) // BR * columns
        for i in range(tl.program_id(0), blocks, tl.num_programs(0)):
            r = i // columns * BR + tl.arange(0, BR)
            f = i % columns * BF + tl.arange(0, BF)
            mask = (r < rows)[:, None] & (f < F)[None, :]
            at = r.to(tl.int64)[:, None] * F
            gate = widened(tl.load(h1 + 2 * at + f[None, :], mask=mask, other=0.0))
            up = widened(tl.load(h1 + 2 * at + F + f[None, :], mask=mask, other=0.0))
            if CLAMP:
                gate, up = _clamped(gate, up, LIMIT)
            value = gate / (1 + tl.exp(-gate)) * up
            tl.store(act + at + f[None, :], rounded(value, DTYPE), mask=mask)


@triton.jit
def swiglu_backward_kernel(
    arena_at, row_bytes_at, decision_at, rank_at, row_at, scores_bases_at, scores_offset, g_at,
    dscores_bases_at, dscores_offset, back_rank_at, back_row_at, act_at, F,
    OK: tl.constexpr, ROWS_WORD: tl.constexpr, H1_INDEX: tl.constexpr, DTYPE: tl.constexpr,
    ROW: tl.constexpr, BACK_ROW: tl.constexpr, BACK_RANKED: tl.constexpr, VECTOR: tl.constexpr,
    CLAMP: tl.constexpr, LIMIT: tl.constexpr, BR: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
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
            s_at = peer_rows(scores_bases_at, scores_offset, rank_at, row_at, r, mine, 1, 4,
                             ROW, True)  # fmt: skip
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
                    gate, up = _clamped(gate, up, LIMIT)
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
            back_at = peer_rows(dscores_bases_at, dscores_offset, back_rank_at, back_row_at, r,
                                mine, 1, 4, BACK_ROW, BACK_RANKED)  # fmt: skip
            tl.store(pointer(back_at, tl.float32), ds, mask=mine)


CLAMP_LIMIT = 7.0
"""Of the clamped variant in tables."""


def _swiglu_examples(blank: Blanks) -> dict[str, Arguments]:
    plain = {"h1": blank.h1_kept, "decision": blank.decision, "act_RF": blank.act_RF}
    return {"": plain, "clamped": {**plain, "limit": CLAMP_LIMIT}}


def _swiglu_cost(s: Sizes, _: Arguments) -> Cost:
    return Cost(hbm_bytes=s.bytes(s.R, 3 * s.F))


def _swiglu_tiles(s: Sizes, launch: Launch) -> int:
    c = launch.constants
    return cdiv(s.R, c["BR"]) * cdiv(s.F, c["BF"])


@op(twin=swiglu_torch, examples=_swiglu_examples, cost=_swiglu_cost, tiles=_swiglu_tiles)
def swiglu(
    target: Target,
    *,
    h1: Kept,
    decision: Tensor,
    act_RF: Tensor,
    limit: float | None = None,
) -> list[Launch]:
    """Launches equivalent to `swiglu_torch`."""
    choice, constants = _rows(target, h1, act_RF, limit)
    args: dict[str, int | Tensor | None] = {
        "arena_at": h1.arena_B, "row_bytes_at": h1.row_bytes_O, "decision_at": decision,
        "act_at": act_RF, "F": act_RF.shape[1],
    }  # fmt: skip
    return [Launch(kernel=swiglu_kernel, grid=choice.programs, args=args, constants=constants,
                   num_warps=choice.warps)]  # fmt: skip


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
    choice, constants = _rows(target, h1, act_RF, limit, g_RF)
    args: dict[str, int | Tensor | None] = {
        "arena_at": h1.arena_B, "row_bytes_at": h1.row_bytes_O, "decision_at": decision,
        "rank_at": rank_R, "row_at": row_R,
        "scores_bases_at": scores.bases_P, "scores_offset": scores.offset, "g_at": g_RF,
        "dscores_bases_at": dscores.bases_P, "dscores_offset": dscores.offset,
        "back_rank_at": back_rank_R, "back_row_at": back_row_R, "act_at": act_RF,
        "F": act_RF.shape[1],
    }  # fmt: skip
    constants |= {"ROW": TRITON_DTYPE[row_R.dtype], "BACK_ROW": TRITON_DTYPE[back_row_R.dtype],
                  "BACK_RANKED": back_rank_R is not None}  # fmt: skip
    return [Launch(kernel=swiglu_backward_kernel, grid=choice.programs, args=args,
                   constants=constants, num_warps=choice.warps)]  # fmt: skip


def _rows(
    target: Target, h1: Kept, act_RF: Tensor, limit: float | None, *others: Tensor
) -> tuple[RowsChoice, dict[str, Any]]:
    F = act_RF.shape[1]
    choice = choose_swiglu(target, F=F, many_values=bool(others) or limit is not None)
    vector = in_16_bytes(F * act_RF.element_size(), *map(address, (h1.arena_B, act_RF, *others)))
    return choice, {
        "OK": int(Decide.OK), "ROWS_WORD": int(Decide.ROWS), "H1_INDEX": h1.index,
        "DTYPE": TRITON_DTYPE[act_RF.dtype], "VECTOR": vector, "CLAMP": limit is not None,
        "LIMIT": 0.0 if limit is None else float(limit), "BR": choice.BR, "BF": choice.BF,
    }  # fmt: skip
