"""The kernels of the decision: one program that reads every rank's head and writes the words."""

import triton
import triton.language as tl

from .device import ALIGNED, kernel, pointer, word
from .words import DECIDE_WORDS, TEXT_BYTES, Code, Decide, Head, Peak

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


@kernel
def decide_kernel(
    heads_at: tl.int64,
    heads_offset: tl.int64,
    counts_at: tl.int64,
    decisions_at: tl.int64,
    texts_at: tl.int64,
    texts_offset: tl.int64,
    first_error_at: tl.int64,
    error_text_at: tl.int64,
    peaks_at: tl.int64,
    P,
    per_rank,
    entries,
    entry: tl.int32,
    rank: tl.int32,
    rows_available,
    slot_from: tl.int64,
    slot_bytes: tl.int64,
    row_bytes_at: tl.int64,
    scratch: tl.int64,
    SAVES: tl.constexpr,
    OPERANDS: tl.constexpr,
    P_2: tl.constexpr,
    E_2: tl.constexpr,
    L_2: tl.constexpr,
    SOURCES: tl.constexpr,
):
    """Grid: 1. counts: int64 [P, P * per_rank]; decisions: int64 [entries, WORDS]; peaks:
    int64; row_bytes: int64 [OPERANDS]."""
    q = tl.arange(0, P_2)
    e = tl.arange(0, E_2)
    source = tl.arange(0, SOURCES)
    rows_q = tl.zeros([P_2], tl.int64)
    width = P * per_rank
    for first in range(0, P, SOURCES):
        at = (
            (first + source)[:, None, None] * width + q[None, :, None] * per_rank + e[None, None, :]
        )
        mask = (
            (first + source < P)[:, None, None]
            & (q < P)[None, :, None]
            & (e < per_rank)[None, None, :]
        )
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
    ends = tl.load(
        decisions + entries_l * WORDS + D_END,
        mask=(entries_l < entries) & (entries_l != entry),
        other=0,
    )
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


@kernel
def decide_backward_kernel(
    heads_at: tl.int64,
    heads_offset: tl.int64,
    decision_at: tl.int64,
    texts_at: tl.int64,
    texts_offset: tl.int64,
    first_error_at: tl.int64,
    error_text_at: tl.int64,
    P,
    P_2: tl.constexpr,
):
    """Grid: 1."""
    if word(decision_at, D_OK) != 0:
        mine = pointer(decision_at, tl.int64)
        code, who, a, b = _agree_on(heads_at, heads_offset, P, P_2)
        _note_error(mine, code, who, a, b, texts_at, texts_offset, first_error_at, error_text_at)
        if code != C_OK:
            tl.debug_barrier()
            tl.store(mine + D_OK, 0)


@kernel
def release_kernel(decision_at: tl.int64, END: tl.constexpr):
    """Grid: 1."""
    tl.store(pointer(decision_at, tl.int64) + END, 0)
