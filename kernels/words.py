"""The int64 words that ops read and write on the device: a rank's header and a call's decision.

A header lies in symmetric memory, one per rank: what the rank says about the call it is in. A
decision is local: what a rank concluded from everyone's header and ids, one per saved layer.
"""

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
    RECOMPUTE = 2
    """1 if backward must produce x and h1 again."""
    X_AT = 3
    """Byte offset in the own arena of the gathered rows x_RD."""
    H1_AT = 4
    """Byte offset in the own arena of the gate and up output h1_R2F."""
    END = 5
    """Byte behind the slot space that is held, 0 if none is."""
    CODE = 6
    """The `Code` that all ranks agree on: that of the lowest rank that has one."""
    RANK = 7
    """The rank whose code it is."""
    A = 8
    B = 9


DECIDE_WORDS = 16


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
