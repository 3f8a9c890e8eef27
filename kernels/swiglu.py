"""SwiGLU, act = silu(gate) * up, plain or clamped; its backward is beside it in `swiglu_backward`.

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
    kernel,
    operand,
    pointer,
    rounded,
    widened,
    word,
)
from .ops import Arguments, Blanks, Cost, Sizes, op
from .peers import Kept, for_experts
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

    for_experts(block, row_blocks(words[Decide.ROWS]))


def row_blocks(rows: int) -> list[int]:
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
def clamped(gate, up, LIMIT: tl.constexpr):
    # NaN is neither above nor below, and stays.
    gate = tl.where(gate > LIMIT, LIMIT, gate)
    up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return gate, up


@kernel
def swiglu_kernel(
    arena_at: tl.int64,
    row_bytes_at: tl.int64,
    decision_at: tl.int64,
    act_at: tl.int64,
    F,
    OK: tl.constexpr,
    ROWS_WORD: tl.constexpr,
    H1_INDEX: tl.constexpr,
    DTYPE: tl.constexpr,
    VECTOR: tl.constexpr,
    CLAMP: tl.constexpr,
    LIMIT: tl.constexpr,
    BR: tl.constexpr,
    BF: tl.constexpr,
):
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
                gate, up = clamped(gate, up, LIMIT)
            value = gate / (1 + tl.exp(-gate)) * up
            tl.store(act + at + f[None, :], rounded(value, DTYPE), mask=mask)


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
    target: Target, *, h1: Kept, decision: Tensor, act_RF: Tensor, limit: float | None = None
) -> list[Launch]:
    """Launches equivalent to `swiglu_torch`."""
    choice, constants = launch_constants(target, h1, act_RF, limit)
    args: dict[str, int | Tensor | None] = {
        "arena_at": h1.arena_B,
        "row_bytes_at": h1.row_bytes_O,
        "decision_at": decision,
        "act_at": act_RF,
        "F": act_RF.shape[1],
    }
    return [
        Launch(
            kernel=swiglu_kernel,
            grid=choice.programs,
            args=args,
            constants=constants,
            num_warps=choice.warps,
        )
    ]


def launch_constants(
    target: Target, h1: Kept, act_RF: Tensor, limit: float | None, *others: Tensor
) -> tuple[RowsChoice, dict[str, Any]]:
    F = act_RF.shape[1]
    choice = choose_swiglu(target, F=F, many_values=bool(others) or limit is not None)
    vector = in_16_bytes(F * act_RF.element_size(), *map(address, (h1.arena_B, act_RF, *others)))
    return choice, {
        "OK": int(Decide.OK),
        "ROWS_WORD": int(Decide.ROWS),
        "H1_INDEX": h1.index,
        "DTYPE": TRITON_DTYPE[act_RF.dtype],
        "VECTOR": vector,
        "CLAMP": limit is not None,
        "LIMIT": 0.0 if limit is None else float(limit),
        "BR": choice.BR,
        "BF": choice.BF,
    }
