"""Grouped weight gradients: one product per expert over the rows that it received.

Legend: D hidden width, F expert width, E experts of this rank, R rows, M x N the gradient's shape.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from .device import (
    TRITON_DTYPE,
    Launch,
    Target,
    address,
    cdiv,
    in_16_bytes,
    kernel,
    matmul,
    operand,
    operand_args,
    operand_constants,
    pointer,
    rounded,
    widened,
    word,
)
from .ops import Arguments, Blanks, Cost, Sizes, op
from .peers import Kept, for_experts
from .words import Decide


def w2_wgrad_torch(
    *,
    dy_RD: Tensor,
    act_RF: Tensor,
    starts_e: Tensor,
    decision: Tensor,
    dw2_EDF: Tensor,
    accumulate: bool = False,
) -> None:
    """dw2[expert] = dy_RD.T @ act_RF over its rows (act holds the score); zeros without rows.

    dw2_EDF may be float32 whatever the rows are. With `accumulate` the product is added to it,
    rounded once. NaN everywhere where the call does not run: a gradient is never silently wrong.
    """
    if not decision[Decide.OK]:
        dw2_EDF.fill_(float("nan"))
        return
    _wgrad(dy_RD, act_RF, starts_e, dw2_EDF, accumulate)


def w13_wgrad_torch(
    *,
    x: Kept,
    dh1: Kept,
    starts_e: Tensor,
    decision: Tensor,
    dw13_E2FD: Tensor,
    accumulate: bool = False,
) -> None:
    """dw13[expert] = dh1.T @ x over its rows, of x [R, D] and dh1 [R, 2F]; else as `w2_wgrad`."""
    if not decision[Decide.OK]:
        dw13_E2FD.fill_(float("nan"))
        return
    _wgrad(dh1.rows(), x.rows(), starts_e, dw13_E2FD, accumulate)


def _wgrad(a_RM: Tensor, b_RN: Tensor, starts_e: Tensor, out_EMN: Tensor, accumulate: bool) -> None:
    def expert(e: int, start: int, end: int) -> None:
        a_rM, b_rN = a_RM[start:end], b_RN[start:end]
        if a_rM.dtype == out_EMN.dtype and not accumulate:
            # Laid out: with AMX, a copy and a product beat a transposed product.
            torch.mm(a_rM.t().contiguous(), b_rN, out=out_EMN[e])
            return
        product_MN = torch.mm(a_rM.float().t(), b_rN.float())
        out_EMN[e] = product_MN.add_(out_EMN[e]) if accumulate else product_MN

    for_experts(expert, starts_e.tolist(), empty=True)


@dataclass(frozen=True, kw_only=True)
class WgradChoice:
    """Tile BM x BN of a gradient, BK rows at a time, `stages` of them in flight."""

    BM: int
    BN: int
    BK: int
    stages: int
    warps: int
    programs: int
    group: int
    warp_specialize: bool


def choose_wgrad(
    target: Target, *, M: int, N: int, itemsize: int, accumulate: bool, tma: bool
) -> WgradChoice:
    """Pure. As the other grouped products. Half as wide where the gradient is read too, as both
    tiles are in registers."""
    if target.interprets:
        return WgradChoice(
            BM=64, BN=64, BK=32, stages=1, warps=4, programs=2, group=2, warp_specialize=False
        )
    if itemsize == 4 or not tma:
        return WgradChoice(
            BM=64,
            BN=64,
            BK=32,
            stages=2,
            warps=8,
            programs=target.sms,
            group=8,
            warp_specialize=False,
        )
    wide = N > 128 and not accumulate
    return WgradChoice(
        BM=128,
        BN=256 if wide else 128,
        BK=64,
        stages=4,
        warps=8,
        programs=target.sms,
        group=8,
        warp_specialize=False,
    )


@kernel
def wgrad_kernel(
    arena_at: tl.int64,
    row_bytes_at: tl.int64,
    decision_at: tl.int64,
    a_at: tl.int64,
    b_at: tl.int64,
    starts_at: tl.int64,
    out_at: tl.int64,
    E,
    M,
    N,
    A_INDEX: tl.constexpr,
    B_INDEX: tl.constexpr,
    OK: tl.constexpr,
    ROWS_WORD: tl.constexpr,
    A_TMA: tl.constexpr,
    B_TMA: tl.constexpr,
    VECTOR: tl.constexpr,
    DTYPE: tl.constexpr,
    OUT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    SPECIALIZE: tl.constexpr,
):
    """Grid: persistent programs over the tiles of all experts.

    a: DTYPE [R, M], b: DTYPE [R, N], each at its address or, with its INDEX >= 0, where the layer
    keeps that operand; starts: int64 [E + 1]; out: OUT [E, M, N].
    """
    runs = word(decision_at, OK) != 0
    rows = tl.where(runs, word(decision_at, ROWS_WORD), 0).to(tl.int32)
    a = operand(a_at, arena_at, decision_at, row_bytes_at, A_INDEX, DTYPE, VECTOR)
    b = operand(b_at, arena_at, decision_at, row_bytes_at, B_INDEX, DTYPE, VECTOR)
    out = pointer(out_at, OUT, VECTOR)
    starts = pointer(starts_at, tl.int64)
    # A descriptor of no rows is not a descriptor; it is never read.
    shape_rows = tl.maximum(rows, 1)
    if A_TMA:
        a_tiles = tl.make_tensor_descriptor(a, [shape_rows, M], [M.to(tl.int64), 1], [BK, BM])
    if B_TMA:
        b_tiles = tl.make_tensor_descriptor(b, [shape_rows, N], [N.to(tl.int64), 1], [BK, BN])
    m_tiles = (M + BM - 1) // BM
    n_tiles = (N + BN - 1) // BN
    tiles = m_tiles * n_tiles
    for i in tl.range(tl.program_id(0), E * tiles, tl.num_programs(0)):
        expert = i // tiles
        # Row tiles GROUP at a time: their operands stay in cache while columns go by.
        inside = i % tiles
        first = inside // (GROUP * n_tiles) * GROUP
        group = tl.minimum(m_tiles - first, GROUP)
        inside -= first * n_tiles
        m_at = (first + inside % group) * BM
        n_at = inside // group * BN
        m = m_at + tl.arange(0, BM)
        n = n_at + tl.arange(0, BN)
        start = tl.where(runs, tl.load(starts + expert), 0).to(tl.int32)
        end = tl.where(runs, tl.load(starts + expert + 1), 0).to(tl.int32)
        whole = start + (end - start) // BK * BK
        acc = tl.zeros([BM, BN], tl.float32)
        k = tl.arange(0, BK)
        for row in tl.range(start, whole, BK, num_stages=STAGES, warp_specialize=SPECIALIZE):
            if A_TMA:
                a_tile = a_tiles.load([row, m_at])
            else:
                a_tile = tl.load(
                    a + (row + k).to(tl.int64)[:, None] * M + m[None, :],
                    mask=(m < M)[None, :],
                    other=0.0,
                )
            if B_TMA:
                b_tile = b_tiles.load([row, n_at])
            else:
                b_tile = tl.load(
                    b + (row + k).to(tl.int64)[:, None] * N + n[None, :],
                    mask=(n < N)[None, :],
                    other=0.0,
                )
            acc = matmul(a_tile.T, b_tile, acc, DTYPE)
        if whole < end:
            # Rows of the next expert, or behind the last row, must not even be multiplied by 0.
            in_rows = (whole + k < end)[:, None]
            a_tail = tl.load(
                a + (whole + k).to(tl.int64)[:, None] * M + m[None, :],
                mask=in_rows & (m < M)[None, :],
                other=0.0,
            )
            b_tail = tl.load(
                b + (whole + k).to(tl.int64)[:, None] * N + n[None, :],
                mask=in_rows & (n < N)[None, :],
                other=0.0,
            )
            acc = matmul(a_tail.T, b_tail, acc, DTYPE)
        acc = tl.where(runs, acc, float("nan"))
        to = out + expert.to(tl.int64) * M * N + m.to(tl.int64)[:, None] * N + n[None, :]
        mask = (m < M)[:, None] & (n < N)[None, :]
        if ACCUMULATE:
            acc += widened(tl.load(to, mask=mask, other=0.0))
        tl.store(to, rounded(acc, OUT), mask=mask)


def _launch(
    target: Target,
    *,
    a: Tensor | Kept,
    b: Tensor | Kept,
    dtype: torch.dtype,
    starts_e: Tensor,
    decision: Tensor,
    out_EMN: Tensor,
    accumulate: bool,
) -> list[Launch]:
    E, M, N = out_EMN.shape
    tensors = [t.arena_B if isinstance(t, Kept) else t for t in (a, b)]
    aligned = in_16_bytes(*map(address, tensors))
    choice = choose_wgrad(
        target,
        M=M,
        N=N,
        itemsize=dtype.itemsize,
        accumulate=accumulate,
        tma=aligned and in_16_bytes(M * dtype.itemsize, N * dtype.itemsize),
    )
    args = {
        **operand_args(a=a, b=b),
        "decision_at": decision,
        "starts_at": starts_e,
        "out_at": out_EMN,
        "E": E,
        "M": M,
        "N": N,
    }
    constants: dict[str, Any] = {
        **operand_constants(a=a, b=b),
        "OK": int(Decide.OK),
        "ROWS_WORD": int(Decide.ROWS),
        "A_TMA": aligned and in_16_bytes(M * dtype.itemsize),
        "B_TMA": aligned and in_16_bytes(N * dtype.itemsize),
        "VECTOR": aligned and in_16_bytes(M * dtype.itemsize, N * dtype.itemsize, address(out_EMN)),
        "DTYPE": TRITON_DTYPE[dtype],
        "OUT": TRITON_DTYPE[out_EMN.dtype],
        "ACCUMULATE": accumulate,
        "BM": choice.BM,
        "BN": choice.BN,
        "BK": choice.BK,
        "STAGES": choice.stages,
        "GROUP": choice.group,
        "SPECIALIZE": choice.warp_specialize,
    }
    programs = min(choice.programs, E * cdiv(M, choice.BM) * cdiv(N, choice.BN))
    return [
        Launch(
            kernel=wgrad_kernel,
            grid=programs,
            args=args,
            constants=constants,
            num_warps=choice.warps,
            num_stages=choice.stages,
        )
    ]


def wgrad_tiles(sizes: Sizes, launch: Launch) -> int:
    """Tiles of the gradients of all experts."""
    args, c = launch.integers, launch.constants
    return args["E"] * cdiv(args["M"], c["BM"]) * cdiv(args["N"], c["BN"])


def _w2_examples(blank: Blanks) -> dict[str, Arguments]:
    s = blank.sizes
    plain = {
        **blank.over_experts(),
        "dy_RD": blank.rows_RD,
        "act_RF": blank.act_RF,
        "dw2_EDF": blank.w2_EDF,
    }
    wide = blank.empty(s.e, s.D, s.F, dtype=torch.float32)
    return {"": plain, "FP32, accumulating": {**plain, "dw2_EDF": wide, "accumulate": True}}


def _w2_cost(s: Sizes, arguments: Arguments) -> Cost:
    dw2 = arguments["dw2_EDF"]
    written = dw2.numel() * dw2.element_size() * (2 if arguments.get("accumulate") else 1)
    rows = s.bytes(s.R, s.D) + s.bytes(s.R, s.F)
    return Cost(flop=2 * s.R * s.D * s.F, hbm_bytes=rows + written)


@op(twin=w2_wgrad_torch, examples=_w2_examples, cost=_w2_cost, tiles=wgrad_tiles)
def w2_wgrad(
    target: Target,
    *,
    dy_RD: Tensor,
    act_RF: Tensor,
    starts_e: Tensor,
    decision: Tensor,
    dw2_EDF: Tensor,
    accumulate: bool = False,
) -> list[Launch]:
    """Launches equivalent to `w2_wgrad_torch`."""
    return _launch(
        target,
        a=dy_RD,
        b=act_RF,
        dtype=dy_RD.dtype,
        starts_e=starts_e,
        decision=decision,
        out_EMN=dw2_EDF,
        accumulate=accumulate,
    )


def _w13_examples(blank: Blanks) -> dict[str, Arguments]:
    return {
        "": {
            **blank.over_experts(),
            "x": blank.x_kept,
            "dh1": blank.h1_kept,
            "dw13_E2FD": blank.w13_E2FD,
        }
    }


def _w13_cost(s: Sizes, _: Arguments) -> Cost:
    rows = s.bytes(s.R, s.D) + s.bytes(s.R, 2 * s.F)
    return Cost(flop=4 * s.R * s.D * s.F, hbm_bytes=rows + s.bytes(s.e, 2 * s.F, s.D))


@op(twin=w13_wgrad_torch, examples=_w13_examples, cost=_w13_cost, tiles=wgrad_tiles)
def w13_wgrad(
    target: Target,
    *,
    x: Kept,
    dh1: Kept,
    starts_e: Tensor,
    decision: Tensor,
    dw13_E2FD: Tensor,
    accumulate: bool = False,
) -> list[Launch]:
    """Launches equivalent to `w13_wgrad_torch`."""
    return _launch(
        target,
        a=dh1,
        b=x,
        dtype=x.dtype,
        starts_e=starts_e,
        decision=decision,
        out_EMN=dw13_E2FD,
        accumulate=accumulate,
    )
