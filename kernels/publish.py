"""Publish: a rank's rows, ids and scores go where its peers can read them, and are checked.

Legend: T tokens, D hidden width, K experts per token, E experts in all.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import TRITON_DTYPE, Launch, Target, address, cdiv, in_16_bytes, kernel, pointer, word
from .ops import Arguments, Blanks, Cost, op
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


@dataclass(frozen=True, kw_only=True)
class CopyChoice:
    """BLOCK elements are copied, or BT tokens checked, by a program."""

    BLOCK: int
    BT: int
    warps: int


def choose_publish(target: Target, *, K: int) -> CopyChoice:
    """Pure."""
    if target.interprets:
        return CopyChoice(BLOCK=8192, BT=64, warps=4)
    return CopyChoice(BLOCK=8192, BT=max(1, 1024 // triton.next_power_of_2(K)), warps=4)


@kernel
def copy_kernel(
    head_at: tl.int64,
    from_at: tl.int64,
    to_at: tl.int64,
    count,
    CODE: tl.constexpr,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: blocks. from: FROM [count], to: TO [count], both exact in TO or refused later; head:
    int64, a no-op where it has a code."""
    if word(head_at, CODE) == 0:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(pointer(from_at, FROM, VECTOR) + i, mask=i < count)
        tl.store(pointer(to_at, TO, VECTOR) + i, value.to(TO), mask=i < count)


@kernel
def check_kernel(
    ids_at: tl.int64,
    scores_at: tl.int64,
    found_at: tl.int64,
    T,
    K,
    experts,
    IDS: tl.constexpr,
    SCORES: tl.constexpr,
    RANGE: tl.constexpr,
    REPEATED: tl.constexpr,
    SCORE: tl.constexpr,
    BT: tl.constexpr,
    K_2: tl.constexpr,
):
    """Grid: blocks of tokens. ids: IDS [T, K], scores: SCORES [T, K]; found: int64 [blocks], the
    least of code << 56 | token << 24 | k (or the repeated id) of what is wrong, else a large one.
    """
    nothing: tl.constexpr = 1 << 62
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    k = tl.arange(0, K_2)
    mask = (t < T)[:, None] & (k < K)[None, :]
    at = t.to(tl.int64)[:, None] * K + k[None, :]
    ids = tl.load(pointer(ids_at, IDS) + at, mask=mask, other=-1).to(tl.int64)
    repeated = tl.zeros([BT, K_2], tl.int1)
    for other in range(K):
        its = tl.load(pointer(ids_at, IDS) + t.to(tl.int64) * K + other, mask=t < T, other=-1)
        repeated |= (ids == its.to(tl.int64)[:, None]) & (k != other)[None, :]
    score = tl.load(pointer(scores_at, SCORES) + at, mask=mask, other=0.0).to(tl.float32)
    wild = ~(tl.abs(score) < float("inf"))
    token = t.to(tl.int64)[:, None] << 24
    where = token + k[None, :]
    least = tl.where(mask & wild, where + (SCORE << 56), nothing)
    least = tl.where(mask & repeated, token + ids + (REPEATED << 56), least)
    least = tl.where(mask & ((ids < 0) | (ids >= experts)), where + (RANGE << 56), least)
    tl.store(pointer(found_at, tl.int64) + tl.program_id(0), tl.min(tl.min(least, 1), 0))


@kernel
def note_kernel(
    head_at: tl.int64,
    ids_at: tl.int64,
    found_at: tl.int64,
    blocks,
    K,
    IDS: tl.constexpr,
    RANGE: tl.constexpr,
    CODE: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: 1. Writes the least of `found` (int64 [blocks]) into the head, unless it has a code."""
    head = pointer(head_at, tl.int64)
    least = tl.full([BLOCK], 1 << 62, tl.int64)
    for first in range(0, blocks, BLOCK):
        i = first + tl.arange(0, BLOCK)
        found = tl.load(pointer(found_at, tl.int64) + i, mask=i < blocks, other=1 << 62)
        least = tl.minimum(least, found)
    first_wrong = tl.min(least, 0)
    if (word(head_at, CODE) == 0) & (first_wrong < (1 << 62)):
        code = first_wrong >> 56
        token = (first_wrong >> 24) & 0xFFFFFFFF
        detail = first_wrong & 0xFFFFFF
        tl.store(head + A, token)
        if code == RANGE:
            detail = tl.load(pointer(ids_at, IDS) + token * K + detail).to(tl.int64)
        tl.store(head + B, detail)
        tl.store(head + CODE, code)


def _copy(head: Tensor, source: Tensor, to: Tensor, choice: CopyChoice) -> Launch:
    vector = in_16_bytes(address(source), address(to))
    # A count that no vector divides is copied element by element, each with its own address.
    block = choice.BLOCK if vector and source.numel() % 16 == 0 else 2048
    return Launch(
        kernel=copy_kernel,
        grid=cdiv(source.numel(), block),
        args={"head_at": head, "from_at": source, "to_at": to, "count": source.numel()},
        constants={
            "CODE": int(Head.CODE),
            "FROM": TRITON_DTYPE[source.dtype],
            "TO": TRITON_DTYPE[to.dtype],
            "VECTOR": vector,
            "BLOCK": block,
        },
        num_warps=choice.warps,
    )


def _examples(blank: Blanks) -> dict[str, Arguments]:
    s = blank.sizes
    return {
        "": {
            "x_TD": blank.x_TD,
            "ids_TK": blank.empty(s.T, s.K, dtype=torch.int64),
            "scores_TK": blank.scores_TK,
            "x_out_TD": blank.x_TD,
            "ids_out_TK": blank.ids_TK,
            "scores_out_TK": blank.scores_TK,
            "head": blank.head,
            "num_experts": s.E,
        }
    }


@op(
    twin=publish_torch,
    examples=_examples,
    main=0,
    cost=lambda s, _: Cost(hbm_bytes=2 * s.bytes(s.T, s.D) + 20 * s.R),
)
def publish(
    target: Target,
    *,
    x_TD: Tensor,
    ids_TK: Tensor,
    scores_TK: Tensor,
    x_out_TD: Tensor,
    ids_out_TK: Tensor,
    scores_out_TK: Tensor,
    head: Tensor,
    num_experts: int,
) -> list[Launch]:
    """Launches equivalent to `publish_torch`; E below 2**24."""
    T, K = ids_TK.shape
    choice = choose_publish(target, K=K)
    blocks = cdiv(T, choice.BT)
    found = torch.empty(blocks, dtype=torch.int64, device=head.device)
    ids = {"IDS": TRITON_DTYPE[ids_TK.dtype], "RANGE": int(Code.ID_RANGE)}
    return [
        _copy(head, x_TD, x_out_TD, choice),
        _copy(head, ids_TK, ids_out_TK, choice),
        _copy(head, scores_TK, scores_out_TK, choice),
        Launch(
            kernel=check_kernel,
            grid=blocks,
            args={
                "ids_at": ids_TK,
                "scores_at": scores_TK,
                "found_at": found,
                "T": T,
                "K": K,
                "experts": num_experts,
            },
            constants=ids
            | {
                "SCORES": TRITON_DTYPE[scores_TK.dtype],
                "REPEATED": int(Code.ID_REPEATED),
                "SCORE": int(Code.SCORE),
                "BT": choice.BT,
                "K_2": triton.next_power_of_2(K),
            },
            num_warps=choice.warps,
        ),
        Launch(
            kernel=note_kernel,
            grid=1,
            args={"head_at": head, "ids_at": ids_TK, "found_at": found, "blocks": blocks, "K": K},
            constants=ids
            | {"CODE": int(Head.CODE), "A": int(Head.A), "B": int(Head.B), "BLOCK": 1024},
        ),
    ]


@op(
    twin=publish_grad_torch,
    examples=lambda blank: {"": {"dy_TD": blank.x_TD, "dy_out_TD": blank.x_TD, "head": blank.head}},
    cost=lambda s, _: Cost(hbm_bytes=2 * s.bytes(s.T, s.D)),
)
def publish_grad(target: Target, *, dy_TD: Tensor, dy_out_TD: Tensor, head: Tensor) -> list[Launch]:
    """Launches equivalent to `publish_grad_torch`."""
    return [_copy(head, dy_TD, dy_out_TD, choose_publish(target, K=1))]
