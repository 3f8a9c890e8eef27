"""The planner's decision, on the device: does the call run, and is its layer saved or recomputed.

Legend: P ranks, E experts in all, L layer entries, H header words, O operands kept.
"""

import torch
import triton
from torch import Tensor

from .decide_kernels import decide_backward_kernel, decide_kernel, release_kernel
from .device import Launch, Target
from .ops import Arguments, Blanks, Cost, op
from .peers import Peers
from .words import DECIDE_WORDS, Code, Decide, Head, Peak, operand_offset


def decide_torch(
    *,
    heads: Peers,
    counts_PE: Tensor,
    decisions_L: Tensor,
    entry: int,
    rank: int,
    rows_available: int,
    slot_at: int,
    slot_bytes: int,
    row_bytes_O: Tensor,
    scratch_at: int,
    saves: bool,
    texts: Peers,
    first_error: Tensor,
    error_text: Tensor,
    peaks: Tensor,
) -> None:
    """Writes decision `entry` of decisions_L (int64 [L, DECIDE_WORDS]).

    The call runs if no header (int64 [P, H]) has a code, all ranks are in the same call, and the
    busiest rank's rows fit its scratch frame; every rank comes to the same conclusion from the
    same data. The layer is kept if its operands (`row_bytes_O` per row, int64 [O]) fit the slot
    space `slot_at`..`slot_at + slot_bytes` behind what other entries hold; else they lie at
    `scratch_at` and backward produces them again. Without `saves` nothing is held. The first error
    since it was last cleared is copied to `first_error` (int64 [DECIDE_WORDS]), with the text of
    the rank at fault (`texts`: uint8 [P, TEXT_BYTES]) in `error_text`. `peaks` (int64 [PEAK_WORDS])
    is raised.
    """
    per_rank = counts_PE.shape[1] // counts_PE.shape[0]
    rows_P = counts_PE.view(len(counts_PE), -1, per_rank).sum((0, 2))
    code, who, a, b = _agree(heads.all_P)
    if code == Code.OK and int(rows_P.max()) > rows_available:
        code, who = Code.OVERFLOW, int(rows_P.argmax())
        a, b = int(rows_P[who]), rows_available
    mine = decisions_L[entry]
    mine.zero_()
    _note(mine, (code, who, a, b), texts, first_error, error_text)
    if code != Code.OK:
        return
    rows = int(rows_P[rank])
    top = max(slot_at, int(decisions_L[:, Decide.END].max()))
    end = top + operand_offset(rows, row_bytes_O.tolist())
    kept = saves and end <= slot_at + slot_bytes
    mine[Decide.OK] = 1
    mine[Decide.ROWS] = rows
    mine[Decide.BASE] = top if kept else scratch_at
    if kept:
        mine[Decide.KEPT] = rows
        mine[Decide.END] = end
    peaks[Peak.ROWS] = max(int(peaks[Peak.ROWS]), rows)
    peaks[Peak.SLOT_BYTES] = max(int(peaks[Peak.SLOT_BYTES]), int(mine[Decide.END]) - slot_at)
    peaks[Peak.SAVED] += int(mine[Decide.END] > 0)
    peaks[Peak.RECOMPUTED] += int(saves and not kept)


def decide_backward_torch(
    *, heads: Peers, decision: Tensor, texts: Peers, first_error: Tensor, error_text: Tensor
) -> None:
    """Stops a backward call whose headers (int64 [P, H]) hold a code or differ."""
    if decision[Decide.OK]:
        _note(decision, _agree(heads.all_P), texts, first_error, error_text)
        if decision[Decide.CODE] != Code.OK:
            decision[Decide.OK] = 0


def release_torch(*, decision: Tensor) -> None:
    """Gives the slot space of a decision (int64 [DECIDE_WORDS]) back."""
    decision[Decide.END] = 0


def _agree(heads_PH: Tensor) -> tuple[int, int, int, int]:
    """Code, rank and details that all ranks conclude from all headers."""
    heads = heads_PH.tolist()
    for who, head in enumerate(heads):
        if head[Head.CODE] != Code.OK:
            return head[Head.CODE], who, head[Head.A], head[Head.B]
    call = slice(Head.KIND, Head.CALL + 1)
    for who, head in enumerate(heads):
        if head[call] != heads[0][call]:
            return Code.MISMATCH, who, head[Head.KIND], heads[0][Head.KIND]
    return Code.OK, 0, 0, 0


def _note(
    mine: Tensor,
    found: tuple[int, int, int, int],
    texts: Peers,
    first_error: Tensor,
    error_text: Tensor,
) -> None:
    for index, value in zip((Decide.CODE, Decide.RANK, Decide.A, Decide.B), found, strict=True):
        mine[index] = value
    code, who, *_ = found
    if code != Code.OK and first_error[Decide.CODE] == Code.OK:
        first_error.copy_(mine)
        error_text.copy_(texts.all_P[who])


def _decide_examples(blank: Blanks) -> dict[str, Arguments]:
    s = blank.sizes
    return {
        "": {
            **blank.errors(),
            "counts_PE": blank.counts_PE,
            "entry": 2,
            "rank": 1 % s.ep,
            "decisions_L": blank.empty(11, DECIDE_WORDS, dtype=torch.int64),
            "rows_available": 8 * s.R,
            "slot_at": 1 << 33,
            "slot_bytes": 1 << 34,
            "row_bytes_O": blank.x_kept.row_bytes_O,
            "scratch_at": 1 << 35,
            "saves": True,
            "peaks": blank.peaks,
        }
    }


@op(twin=decide_torch, examples=_decide_examples, cost=lambda s, _: Cost(hbm_bytes=8 * s.ep * s.E))
def decide(
    target: Target,
    *,
    heads: Peers,
    counts_PE: Tensor,
    decisions_L: Tensor,
    entry: int,
    rank: int,
    rows_available: int,
    slot_at: int,
    slot_bytes: int,
    row_bytes_O: Tensor,
    scratch_at: int,
    saves: bool,
    texts: Peers,
    first_error: Tensor,
    error_text: Tensor,
    peaks: Tensor,
) -> list[Launch]:
    """Launches equivalent to `decide_torch`."""
    P, E = counts_PE.shape
    P_2, E_2 = triton.next_power_of_2(P), triton.next_power_of_2(E // P)
    return [
        Launch(
            kernel=decide_kernel,
            grid=1,
            args={
                "heads_at": heads.bases_P,
                "heads_offset": heads.offset,
                "counts_at": counts_PE,
                "decisions_at": decisions_L,
                "texts_at": texts.bases_P,
                "texts_offset": texts.offset,
                "first_error_at": first_error,
                "error_text_at": error_text,
                "peaks_at": peaks,
                "P": P,
                "per_rank": E // P,
                "entries": decisions_L.shape[0],
                "entry": entry,
                "rank": rank,
                "rows_available": rows_available,
                "slot_from": slot_at,
                "slot_bytes": slot_bytes,
                "row_bytes_at": row_bytes_O,
                "scratch": scratch_at,
            },
            constants={
                "SAVES": saves,
                "OPERANDS": row_bytes_O.shape[0],
                "P_2": P_2,
                "E_2": E_2,
                "L_2": triton.next_power_of_2(decisions_L.shape[0]),
                "SOURCES": max(1, 4096 // (P_2 * E_2)),
            },
        )
    ]


@op(
    twin=decide_backward_torch,
    examples=lambda blank: {"": {**blank.errors(), "decision": blank.decision}},
    cost=lambda s, _: Cost(hbm_bytes=8 * s.ep),
)
def decide_backward(
    target: Target,
    *,
    heads: Peers,
    decision: Tensor,
    texts: Peers,
    first_error: Tensor,
    error_text: Tensor,
) -> list[Launch]:
    """Launches equivalent to `decide_backward_torch`."""
    P = heads.bases_P.shape[0]
    return [
        Launch(
            kernel=decide_backward_kernel,
            grid=1,
            args={
                "heads_at": heads.bases_P,
                "heads_offset": heads.offset,
                "decision_at": decision,
                "texts_at": texts.bases_P,
                "texts_offset": texts.offset,
                "first_error_at": first_error,
                "error_text_at": error_text,
                "P": P,
            },
            constants={"P_2": triton.next_power_of_2(P)},
        )
    ]


@op(
    twin=release_torch,
    examples=lambda blank: {"": {"decision": blank.decision}},
    cost=lambda s, _: Cost(hbm_bytes=8),
)
def release(target: Target, *, decision: Tensor) -> list[Launch]:
    """Launches equivalent to `release_torch`."""
    return [
        Launch(
            kernel=release_kernel,
            grid=1,
            args={"decision_at": decision},
            constants={"END": int(Decide.END)},
        )
    ]
