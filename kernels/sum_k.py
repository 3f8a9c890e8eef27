"""The owner's sum over its K routes, in FP32 and in k order.

Legend: T tokens, K experts per token, D hidden width.
"""

from dataclasses import dataclass

import torch
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
    pointer,
    rounded,
    widened,
    word,
)
from .ops import Arguments, Blanks, Cost, op
from .peers import for_experts
from .words import Decide

_TOKENS = 256


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
        row_tD, total_tD = torch.empty(
            2, end - start, D, dtype=torch.float32, device=out_TD.device
        ).unbind()
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


@dataclass(frozen=True, kw_only=True)
class SumChoice:
    """A program sums BT tokens' columns, BD of them."""

    BT: int
    BD: int
    warps: int


def choose_sum_k(target: Target, *, D: int) -> SumChoice:
    """Pure. The K rows of a token are read once; 16 KiB of loads under way per step of k."""
    if target.interprets:
        return SumChoice(BT=32, BD=64, warps=4)
    BD = min(1024, triton.next_power_of_2(D))
    return SumChoice(BT=max(1, 2048 // BD), BD=BD, warps=4)


@kernel
def sum_k_kernel(
    rows_at: tl.int64,
    scores_at: tl.int64,
    decision_at: tl.int64,
    out_at: tl.int64,
    T,
    K,
    D,
    OK: tl.constexpr,
    SCORED: tl.constexpr,
    DTYPE: tl.constexpr,
    OUT: tl.constexpr,
    VECTOR: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """Grid: blocks of tokens times blocks of columns. rows: DTYPE [T, K, D]; scores: float32
    [T, K]; out: OUT [T, D]."""
    columns = (D + BD - 1) // BD
    t = tl.program_id(0) // columns * BT + tl.arange(0, BT)
    d = tl.program_id(0) % columns * BD + tl.arange(0, BD)
    mask = (t < T)[:, None] & (d < D)[None, :]
    total = tl.full([BT, BD], float("nan"), tl.float32)
    if word(decision_at, OK) != 0:
        rows = pointer(rows_at, DTYPE, VECTOR)
        for k in range(K):
            route = t.to(tl.int64) * K + k
            row = widened(tl.load(rows + route[:, None] * D + d[None, :], mask=mask, other=0.0))
            if SCORED:
                score = tl.load(pointer(scores_at, tl.float32) + route, mask=t < T, other=0.0)
                row *= score[:, None]
            total = tl.where(k == 0, row, total + row)
    at = t.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(pointer(out_at, OUT, VECTOR) + at, rounded(total, OUT), mask=mask)


@kernel
def take_dscores_kernel(
    dscores_at: tl.int64,
    decision_at: tl.int64,
    out_at: tl.int64,
    count,
    OK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: blocks. dscores, out: float32 [count]."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(pointer(dscores_at, tl.float32) + i, mask=i < count, other=0.0)
    value = tl.where(word(decision_at, OK) != 0, value, float("nan"))
    tl.store(pointer(out_at, tl.float32) + i, value, mask=i < count)


def _examples(blank: Blanks) -> dict[str, Arguments]:
    s = blank.sizes
    return {
        "": {
            "rows_TKD": blank.empty(s.T, s.K, s.D),
            "scores_TK": blank.scores_TK,
            "decision": blank.decision,
            "out_TD": blank.x_TD,
        }
    }


@op(
    twin=sum_k_torch,
    examples=_examples,
    cost=lambda s, _: Cost(hbm_bytes=s.bytes(s.R, s.D) + 4 * s.R + s.bytes(s.T, s.D)),
)
def sum_k(
    target: Target, *, rows_TKD: Tensor, scores_TK: Tensor | None, decision: Tensor, out_TD: Tensor
) -> list[Launch]:
    """Launches equivalent to `sum_k_torch`."""
    T, K, D = rows_TKD.shape
    choice = choose_sum_k(target, D=D)
    vector = in_16_bytes(
        D * rows_TKD.element_size(), D * out_TD.element_size(), address(rows_TKD), address(out_TD)
    )
    return [
        Launch(
            kernel=sum_k_kernel,
            grid=cdiv(T, choice.BT) * cdiv(D, choice.BD),
            args={
                "rows_at": rows_TKD,
                "scores_at": scores_TK,
                "decision_at": decision,
                "out_at": out_TD,
                "T": T,
                "K": K,
                "D": D,
            },
            constants={
                "OK": int(Decide.OK),
                "SCORED": scores_TK is not None,
                "DTYPE": TRITON_DTYPE[rows_TKD.dtype],
                "OUT": TRITON_DTYPE[out_TD.dtype],
                "VECTOR": vector,
                "BT": choice.BT,
                "BD": choice.BD,
            },
            num_warps=choice.warps,
        )
    ]


@op(
    twin=take_dscores_torch,
    examples=lambda blank: {
        "": {"dscores_TK": blank.scores_TK, "decision": blank.decision, "out_TK": blank.scores_TK}
    },
    cost=lambda s, _: Cost(hbm_bytes=8 * s.R),
)
def take_dscores(
    target: Target, *, dscores_TK: Tensor, decision: Tensor, out_TK: Tensor
) -> list[Launch]:
    """Launches equivalent to `take_dscores_torch`."""
    count = out_TK.numel()
    return [
        Launch(
            kernel=take_dscores_kernel,
            grid=cdiv(count, 1024),
            args={
                "dscores_at": dscores_TK,
                "decision_at": decision,
                "out_at": out_TK,
                "count": count,
            },
            constants={"OK": int(Decide.OK), "BLOCK": 1024},
        )
    ]
