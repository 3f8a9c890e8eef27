"""Row orders of the unfused baseline: what it packs before and unpacks after an all-to-all.

A rank sends its T * K routes ordered by (expert, token, k); a rank receives rows ordered by
(source rank, expert, token, k), and multiplies them ordered by (expert, source rank, token, k).

Legend: T tokens, D hidden width, K experts per token, P ranks, E experts in all, R rows received.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .count_sort import count_sort
from .device import TRITON_DTYPE, Launch, Target, address, cdiv, in_16_bytes, kernel, pointer, word
from .ops import Cost, op
from .words import Decide


def send_order_torch(
    *, ids_TK: Tensor, decision: Tensor, order_N: Tensor, num_experts: int
) -> None:
    """order_N[i] = token * K + k of the i-th row sent; int64 [T * K]. ids_TK: int32."""
    if decision[Decide.OK]:
        torch.argsort(ids_TK.flatten(), stable=True, out=order_N)


def receive_order_torch(
    *, rank_R: Tensor, decision: Tensor, position_R: Tensor, ranks: int
) -> None:
    """position_R[r] = place in the received rows of the r-th row as it is multiplied; int64."""
    if decision[Decide.OK]:
        rows = int(decision[Decide.ROWS])
        order_R = torch.argsort(rank_R[:rows], stable=True)
        position_R[order_R] = torch.arange(rows, device=order_R.device)


def pack_torch(
    *, rows_ND: Tensor, order_N: Tensor, divisor: int, decision: Tensor, send_ND: Tensor
) -> None:
    """send_ND[i] = rows_ND[order_N[i] // divisor]; divisor K packs tokens, 1 packs routes."""
    if decision[Decide.OK]:
        torch.index_select(rows_ND, 0, order_N // divisor, out=send_ND)


def unpack_torch(*, received_ND: Tensor, order_N: Tensor, decision: Tensor, out_ND: Tensor) -> None:
    """out_ND[order_N[i]] = received_ND[i]."""
    if decision[Decide.OK]:
        out_ND.index_copy_(0, order_N, received_ND)


@dataclass(frozen=True, kw_only=True)
class MoveChoice:
    """A program moves BR rows' columns, BD of them."""

    BR: int
    BD: int
    warps: int


def choose_permute(target: Target, *, D: int, vector: bool) -> MoveChoice:
    """Pure. 16 KiB of loads under way per program."""
    BD = min(1024, triton.next_power_of_2(D))
    if target.interprets:
        return MoveChoice(BR=64, BD=min(BD, 64), warps=4)
    return MoveChoice(BR=max(1, (8192 if vector else 1024) // BD), BD=BD, warps=4)


@kernel
def move_kernel(
    rows_at: tl.int64,
    order_at: tl.int64,
    decision_at: tl.int64,
    out_at: tl.int64,
    count,
    D,
    divisor,
    OK: tl.constexpr,
    SCATTER: tl.constexpr,
    DTYPE: tl.constexpr,
    VECTOR: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
):
    """Grid: blocks of rows times blocks of columns. order: int64 [count]. out[i] =
    rows[order[i] // divisor], or with SCATTER out[order[i]] = rows[i]; DTYPE rows of D."""
    if word(decision_at, OK) != 0:
        columns = (D + BD - 1) // BD
        i = tl.program_id(0) // columns * BR + tl.arange(0, BR)
        d = tl.program_id(0) % columns * BD + tl.arange(0, BD)
        order = tl.load(pointer(order_at, tl.int64) + i, mask=i < count, other=0)
        near = i.to(tl.int64)[:, None] * D + d[None, :]
        far = (order // divisor)[:, None] * D + d[None, :]
        mask = (i < count)[:, None] & (d < D)[None, :]
        rows = pointer(rows_at, DTYPE, VECTOR)
        out = pointer(out_at, DTYPE, VECTOR)
        if SCATTER:
            tl.store(out + far, tl.load(rows + near, mask=mask), mask=mask)
        else:
            tl.store(out + near, tl.load(rows + far, mask=mask), mask=mask)


def _move(
    target: Target,
    rows: Tensor,
    order_N: Tensor,
    divisor: int,
    decision: Tensor,
    out: Tensor,
    scatter: bool,
) -> list[Launch]:
    D, count = rows.shape[1], order_N.shape[0]
    vector = in_16_bytes(D * rows.element_size(), address(rows), address(out))
    choice = choose_permute(target, D=D, vector=vector)
    return [
        Launch(
            kernel=move_kernel,
            grid=cdiv(count, choice.BR) * cdiv(D, choice.BD),
            args={
                "rows_at": rows,
                "order_at": order_N,
                "decision_at": decision,
                "out_at": out,
                "count": count,
                "D": D,
                "divisor": divisor,
            },
            constants={
                "OK": int(Decide.OK),
                "SCATTER": scatter,
                "DTYPE": TRITON_DTYPE[rows.dtype],
                "VECTOR": vector,
                "BR": choice.BR,
                "BD": choice.BD,
            },
            num_warps=choice.warps,
        )
    ]


@op(
    twin=send_order_torch,
    main=0,
    examples=lambda blank: {
        "": {
            "ids_TK": blank.ids_TK,
            "decision": blank.decision,
            "order_N": blank.order_N,
            "num_experts": blank.sizes.E,
        }
    },
    cost=lambda s, _: Cost(hbm_bytes=12 * s.R),
)
def send_order(
    target: Target, *, ids_TK: Tensor, decision: Tensor, order_N: Tensor, num_experts: int
) -> list[Launch]:
    """Launches equivalent to `send_order_torch`."""
    return count_sort(
        target,
        bases_P=_alone(ids_TK),
        offset=0,
        N=ids_TK.numel(),
        keys=num_experts,
        decision=decision,
        ok=int(Decide.OK),
        first=order_N,
    )


@op(
    twin=receive_order_torch,
    main=0,
    examples=lambda blank: {
        "": {
            "rank_R": blank.route()["rank_R"],
            "decision": blank.decision,
            "position_R": blank.order_N,
            "ranks": blank.sizes.ep,
        }
    },
    cost=lambda s, _: Cost(hbm_bytes=12 * s.R),
)
def receive_order(
    target: Target, *, rank_R: Tensor, decision: Tensor, position_R: Tensor, ranks: int
) -> list[Launch]:
    """Launches equivalent to `receive_order_torch`."""
    return count_sort(
        target,
        bases_P=_alone(rank_R),
        offset=0,
        N=rank_R.shape[0],
        keys=ranks,
        decision=decision,
        ok=int(Decide.OK),
        rows_word=int(Decide.ROWS),
        first=position_R,
        inverse=True,
    )


@op(
    twin=pack_torch,
    examples=lambda blank: {
        "": {
            "rows_ND": blank.x_TD,
            "order_N": blank.order_N,
            "divisor": blank.sizes.K,
            "decision": blank.decision,
            "send_ND": blank.rows_RD,
        }
    },
    cost=lambda s, _: Cost(hbm_bytes=s.bytes(s.T, s.D) + s.bytes(s.R, s.D)),
)
def pack(
    target: Target,
    *,
    rows_ND: Tensor,
    order_N: Tensor,
    divisor: int,
    decision: Tensor,
    send_ND: Tensor,
) -> list[Launch]:
    """Launches equivalent to `pack_torch`."""
    return _move(target, rows_ND, order_N, divisor, decision, send_ND, False)


@op(
    twin=unpack_torch,
    examples=lambda blank: {
        "": {
            "received_ND": blank.rows_RD,
            "order_N": blank.order_N,
            "decision": blank.decision,
            "out_ND": blank.rows_RD,
        }
    },
    cost=lambda s, _: Cost(hbm_bytes=2 * s.bytes(s.R, s.D)),
)
def unpack(
    target: Target, *, received_ND: Tensor, order_N: Tensor, decision: Tensor, out_ND: Tensor
) -> list[Launch]:
    """Launches equivalent to `unpack_torch`."""
    return _move(target, received_ND, order_N, 1, decision, out_ND, True)


def _alone(keys: Tensor) -> Tensor:
    """The address of one source; int64 [1]."""
    return torch.full((1,), address(keys), dtype=torch.int64, device=keys.device)
