"""The int64 words that ops read and write on the device: a rank's header and a call's decision.

A header lies in symmetric memory, one per rank: what the rank says about the call it is in. A
decision is local: what a rank concluded from everyone's header and ids, one per saved layer.
"""

from collections.abc import Iterable
from enum import IntEnum


class Head(IntEnum):
    """Index of a word in a header, int64 [HEAD_WORDS]."""

    CODE = 0
    """A `Code`."""
    A = 1
    """First detail of the code: rows needed, the token at fault, or the words that differ."""
    B = 2
    """Second detail of the code: rows available, the offending id or k."""
    KIND = 3
    """0 for a forward, 1 for a backward."""
    ENTRY = 4
    """Index of the layer entry that the call works on; it must be the same on every rank."""
    CALL = 5
    """Number of the call in this context; it must be the same on every rank."""


HEAD_WORDS = 16
TEXT_BYTES = 512
"""Bytes of text (UTF-8, zero-padded) beside a header: what the host found wrong with its input."""


class Code(IntEnum):
    """Why a call did nothing. 0 is the only good one."""

    OK = 0
    HOST = 1
    """The host refused the input of its rank; the text says why."""
    ID_RANGE = 2
    """An expert id outside 0..E-1; A = token, B = id."""
    ID_REPEATED = 3
    """A token names an expert twice; A = token, B = id."""
    SCORE = 4
    """A score is NaN or infinite; A = token, B = k."""
    MISMATCH = 5
    """Ranks are in different calls; A = KIND of the first that differs, B = KIND of rank 0."""
    OVERFLOW = 6
    """More rows than the scratch frame holds; A = rows needed, B = rows available."""


class Decide(IntEnum):
    """Index of a word in a decision, int64 [DECIDE_WORDS]."""

    OK = 0
    """1 if the call runs, 0 if every op of it is a no-op."""
    ROWS = 1
    """Rows received."""
    KEPT = 2
    """Of these, the rows whose operands are kept for backward: all, or none, which then produces
    them again."""
    BASE = 3
    """Byte offset in the rank's arena of the first operand; the others lie behind it, each aligned
    (see `operand_offset`)."""
    END = 4
    """Byte behind the slot space that is held, 0 if none is."""
    CODE = 5
    """The `Code` that all ranks agree on: that of the lowest rank that has one."""
    RANK = 6
    """The rank whose code it is."""
    A = 7
    B = 8


DECIDE_WORDS = 16

ALIGNMENT_BYTES = 128
"""Every region of an arena, and every operand of a layer, starts at a multiple of this."""


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to whole ALIGNMENT_BYTES."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def operand_offset(rows: int, row_bytes: Iterable[int]) -> int:
    """Bytes that operands of `row_bytes` per row take for `rows` rows, one behind the other: where
    the next one starts, counted from the first."""
    return sum(aligned(rows * each) for each in row_bytes)


class Peak(IntEnum):
    """Index of a word in a rank's peaks, int64 [PEAK_WORDS], since the context was made."""

    ROWS = 0
    """Most rows received in a call."""
    SLOT_BYTES = 1
    """Most slot bytes held at a time; with `alltoall`, whose layers have a part each, by one."""
    SAVED = 2
    """Layers whose rows were kept in the slot."""
    RECOMPUTED = 3
    """Layers that did not fit and were left to be recomputed."""


PEAK_WORDS = 4
