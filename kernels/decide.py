"""The planner's decision, on the device: does the call run, and is its layer saved or recomputed.

Legend: P ranks, E experts in all, L layer entries, H header words, O operands kept.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import ALIGNED, Launch, Target, pointer, word
from .memory import Peers
from .ops import Arguments, Blanks, Cost, op
from .words import DECIDE_WORDS, TEXT_BYTES, Code, Decide, Head, Peak, operand_offset


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


D_OK, D_ROWS, D_KEPT, D_BASE, D_END, D_CODE, D_RANK, D_A, D_B = (
    tl.constexpr(int(w)) for w in Decide
)
H_CODE, H_A, H_B, H_KIND, H_ENTRY, H_CALL = (tl.constexpr(int(w)) for w in Head)
P_ROWS, P_SLOT_BYTES, P_SAVED, P_RECOMPUTED = (tl.constexpr(int(w)) for w in Peak)
WORDS, TEXT = tl.constexpr(DECIDE_WORDS), tl.constexpr(TEXT_BYTES)
C_OK, C_MISMATCH = tl.constexpr(int(Code.OK)), tl.constexpr(int(Code.MISMATCH))
C_OVERFLOW = tl.constexpr(int(Code.OVERFLOW))
NOBODY = tl.constexpr(1 << 30)


@triton.jit
def _pick(values, index, at):
    """values[at], for a vector in registers and its indices."""
    return tl.sum(tl.where(index == at, values, 0), 0)


@triton.jit
def _agree_on(heads_at, heads_offset, P, P_2: tl.constexpr):
    """Code, rank and details that all ranks conclude from all headers (int64 [H] each)."""
    p = tl.arange(0, P_2)
    base = tl.load(pointer(heads_at, tl.int64) + p, mask=p < P, other=0) + heads_offset
    head = pointer(base, tl.int64)
    codes = tl.load(head + H_CODE, mask=p < P, other=0)
    kinds = tl.load(head + H_KIND, mask=p < P, other=0)
    entries = tl.load(head + H_ENTRY, mask=p < P, other=0)
    calls = tl.load(head + H_CALL, mask=p < P, other=0)
    a = tl.load(head + H_A, mask=p < P, other=0)
    b = tl.load(head + H_B, mask=p < P, other=0)
    kind = _pick(kinds, p, 0)
    other = (kinds != kind) | (entries != _pick(entries, p, 0)) | (calls != _pick(calls, p, 0))
    wrong = tl.min(tl.where((p < P) & (codes != C_OK), p, NOBODY), 0)
    stray = tl.min(tl.where((p < P) & other, p, NOBODY), 0)
    if wrong < NOBODY:
        code = _pick(codes, p, wrong)
        who = wrong
        a_word = _pick(a, p, wrong)
        b_word = _pick(b, p, wrong)
    elif stray < NOBODY:
        code = tl.full([], C_MISMATCH, tl.int64)
        who = stray
        a_word = _pick(kinds, p, stray)
        b_word = kind
    else:
        code = tl.full([], C_OK, tl.int64)
        who = tl.full([], 0, tl.int32)
        a_word = tl.full([], 0, tl.int64)
        b_word = tl.full([], 0, tl.int64)
    return code, who, a_word, b_word


@triton.jit
def _note_error(mine, code, who, a, b, texts_at, texts_offset, first_error_at, error_text_at):
    """Writes the four words of what was found, and keeps the first error with its text."""
    tl.store(mine + D_CODE, code)
    tl.store(mine + D_RANK, who.to(tl.int64))
    tl.store(mine + D_A, a)
    tl.store(mine + D_B, b)
    if (code != C_OK) & (word(first_error_at, D_CODE) == C_OK):
        # One program wrote these words: behind a barrier, all its threads see them.
        tl.debug_barrier()
        i = tl.arange(0, WORDS)
        tl.store(pointer(first_error_at, tl.int64) + i, tl.load(mine + i))
        c = tl.arange(0, TEXT)
        text = tl.load(pointer(texts_at, tl.int64) + who) + texts_offset
        value = tl.load(pointer(text, tl.uint8) + c)
        tl.store(pointer(error_text_at, tl.uint8) + c, value)


@triton.jit
def decide_kernel(
    heads_at, heads_offset, counts_at, decisions_at, texts_at, texts_offset, first_error_at,
    error_text_at, peaks_at, P, per_rank, entries, entry, rank, rows_available, slot_from,
    slot_bytes, row_bytes_at, scratch,
    SAVES: tl.constexpr, OPERANDS: tl.constexpr, P_2: tl.constexpr, E_2: tl.constexpr,
    L_2: tl.constexpr, SOURCES: tl.constexpr,
):  # fmt: skip
    """Grid: 1. counts: int64 [P, P * per_rank]; decisions: int64 [entries, WORDS]; peaks:
    int64; row_bytes: int64 [OPERANDS]."""
    q = tl.arange(0, P_2)
    e = tl.arange(0, E_2)
    source = tl.arange(0, SOURCES)
    rows_q = tl.zeros([P_2], tl.int64)
    width = P * per_rank
    for first in range(0, P, SOURCES):
        at = ((first + source)[:, None, None] * width + q[None, :, None] * per_rank
              + e[None, None, :])  # fmt: skip
        mask = ((first + source < P)[:, None, None] & (q < P)[None, :, None]
                & (e < per_rank)[None, None, :])  # fmt: skip
        count = tl.load(pointer(counts_at, tl.int64) + at, mask=mask, other=0)
        rows_q += tl.sum(tl.sum(count, 2), 0)
    code, who, a, b = _agree_on(heads_at, heads_offset, P, P_2)
    most = tl.max(rows_q, 0)
    if (code == C_OK) & (most > rows_available):
        code = tl.full([], C_OVERFLOW, tl.int64)
        who = tl.min(tl.where(rows_q == most, q, NOBODY), 0)
        a = most
        b = tl.full([], 0, tl.int64) + rows_available
    decisions = pointer(decisions_at, tl.int64)
    mine = decisions + entry * WORDS
    # What other entries hold, before any word of this one is written.
    entries_l = tl.arange(0, L_2)
    ends = tl.load(decisions + entries_l * WORDS + D_END,
                   mask=(entries_l < entries) & (entries_l != entry), other=0)  # fmt: skip
    top = tl.maximum(tl.max(ends, 0), slot_from)
    tl.store(mine + tl.arange(0, WORDS), tl.zeros([WORDS], tl.int64))
    tl.debug_barrier()
    _note_error(mine, code, who, a, b, texts_at, texts_offset, first_error_at, error_text_at)
    if code == C_OK:
        rows = _pick(rows_q, q, rank)
        end = top
        for i in tl.static_range(OPERANDS):
            end += (rows * word(row_bytes_at, i) + ALIGNED - 1) // ALIGNED * ALIGNED
        held = end * 0
        recompute = end * 0
        base = held + scratch
        if SAVES:
            fits = end - slot_from <= slot_bytes  # their sum may not fit 32 bits
            base = tl.where(fits, top, base)
            held = tl.where(fits, end, held)
            recompute = tl.where(fits, 0, 1).to(tl.int64)
        tl.store(mine + D_OK, 1)
        tl.store(mine + D_ROWS, rows)
        tl.store(mine + D_KEPT, tl.where(held > 0, rows, 0))
        tl.store(mine + D_BASE, base)
        tl.store(mine + D_END, held)
        peaks = pointer(peaks_at, tl.int64)
        tl.store(peaks + P_ROWS, tl.maximum(tl.load(peaks + P_ROWS), rows))
        used = tl.maximum(tl.load(peaks + P_SLOT_BYTES), held - slot_from)
        tl.store(peaks + P_SLOT_BYTES, used)
        tl.store(peaks + P_SAVED, tl.load(peaks + P_SAVED) + (held > 0).to(tl.int64))
        tl.store(peaks + P_RECOMPUTED, tl.load(peaks + P_RECOMPUTED) + recompute)


@triton.jit
def decide_backward_kernel(heads_at, heads_offset, decision_at, texts_at, texts_offset,
                           first_error_at, error_text_at, P, P_2: tl.constexpr):  # fmt: skip
    """Grid: 1."""
    if word(decision_at, D_OK) != 0:
        mine = pointer(decision_at, tl.int64)
        code, who, a, b = _agree_on(heads_at, heads_offset, P, P_2)
        _note_error(mine, code, who, a, b, texts_at, texts_offset, first_error_at, error_text_at)
        if code != C_OK:
            tl.debug_barrier()
            tl.store(mine + D_OK, 0)


@triton.jit
def release_kernel(decision_at, END: tl.constexpr):
    """Grid: 1."""
    tl.store(pointer(decision_at, tl.int64) + END, 0)


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
    return [Launch(
        kernel=decide_kernel, grid=1,
        args={"heads_at": heads.bases_P, "heads_offset": heads.offset, "counts_at": counts_PE,
              "decisions_at": decisions_L, "texts_at": texts.bases_P,
              "texts_offset": texts.offset, "first_error_at": first_error,
              "error_text_at": error_text, "peaks_at": peaks, "P": P, "per_rank": E // P,
              "entries": decisions_L.shape[0], "entry": entry, "rank": rank,
              "rows_available": rows_available, "slot_from": slot_at, "slot_bytes": slot_bytes,
              "row_bytes_at": row_bytes_O, "scratch": scratch_at},
        constants={"SAVES": saves, "OPERANDS": row_bytes_O.shape[0], "P_2": P_2, "E_2": E_2,
                   "L_2": triton.next_power_of_2(decisions_L.shape[0]),
                   "SOURCES": max(1, 4096 // (P_2 * E_2))},
    )]  # fmt: skip


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
    return [Launch(
        kernel=decide_backward_kernel, grid=1,
        args={"heads_at": heads.bases_P, "heads_offset": heads.offset, "decision_at": decision,
              "texts_at": texts.bases_P, "texts_offset": texts.offset,
              "first_error_at": first_error, "error_text_at": error_text, "P": P},
        constants={"P_2": triton.next_power_of_2(P)},
    )]  # fmt: skip


@op(
    twin=release_torch,
    examples=lambda blank: {"": {"decision": blank.decision}},
    cost=lambda s, _: Cost(hbm_bytes=8),
)
def release(target: Target, *, decision: Tensor) -> list[Launch]:
    """Launches equivalent to `release_torch`."""
    return [Launch(kernel=release_kernel, grid=1, args={"decision_at": decision},
                   constants={"END": int(Decide.END)})]  # fmt: skip
