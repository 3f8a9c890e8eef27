"""Byte and row counts of the two published systems' activation memory, over whole tables.

Every function takes scalars or arrays that broadcast and returns int64 arrays, so a table of
100,000 cases and a single plan go through the same lines. Nothing here imports torch.

Legend: T tokens per rank, D hidden, F expert width, E experts, E_local = E / ep, K experts per
token, R routed rows a rank holds. Sizes are bytes unless a name says rows.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.errors import InputError

IntArray = NDArray[np.int64]

ALIGNMENT_BYTES = 128
DIST_MOE_EXPERT_ROWS = 128  # MXFP8 pads each local expert to this
MOK_EXPERT_ROWS = 256
MX_BLOCK = 32  # elements that share one E8M0 scale byte
ROW_SCALE_COPIES = 4  # a row-quantised operand reserves its scales four times over
UNSET_BYTES = np.iinfo(np.int64).min  # "no byte request" in a table column; NaN for factors
MAX_BYTES = 2.0**53  # float64 is exact up to here, and int64 cannot wrap


class PlanError(InputError):
    """A workload or capacity that cannot be planned; says field, value and rule."""


def align_up(amount: ArrayLike, multiple: ArrayLike = ALIGNMENT_BYTES) -> IntArray:
    """`amount` rounded up to a multiple of `multiple`, as int64."""
    unit = np.asarray(multiple, np.int64)
    units: IntArray = np.asarray(amount, np.int64) + (unit - 1)
    units //= unit  # in place: tables of rows per expert run to hundreds of MB
    return units * unit


def padded_rows(rows_per_expert: ArrayLike, multiple: int) -> IntArray:
    """Rows of a rank when each of its experts is padded: [..., E_local] -> [...].

    An expert that receives nothing takes nothing. Raises TypeError for rows that are no integers
    and PlanError for negative ones.
    """
    rows = integers("rows_per_expert", rows_per_expert)
    if rows.ndim == 0:
        raise PlanError(f"rows_per_expert={rows} must have a last axis of local experts")
    if (rows < 0).any():
        raise PlanError(f"rows_per_expert={rows.min()} must not be negative")
    return align_up(rows, multiple).sum(axis=-1, dtype=np.int64)


def evenly_padded_rows(rows: ArrayLike, E_local: ArrayLike, multiple: ArrayLike) -> IntArray:
    """`padded_rows` of `rows` spread evenly over E_local experts, the first taking the remainder.

    Elementwise, so a table need not hold its rows per expert.
    """
    experts: IntArray = np.asarray(E_local, np.int64)
    each, extra = np.divmod(np.asarray(rows, np.int64), experts)
    return extra * align_up(each + 1, multiple) + (experts - extra) * align_up(each, multiple)


def asked_rows(factor: ArrayLike, T: ArrayLike, K: ArrayLike) -> IntArray:
    """`factor` times the balanced T*K rows, rounded to nearest, halves up."""
    balanced = np.asarray(T, np.int64) * np.asarray(K, np.int64)
    return np.floor(np.asarray(factor, np.float64) * balanced + 0.5).astype(np.int64)


def dist_moe_rows(
    T: ArrayLike,
    K: ArrayLike,
    E_local: ArrayLike,
    ep: ArrayLike,
    factor: ArrayLike,
    mxfp8: ArrayLike,
) -> IntArray:
    """Rows that dist_moe reserves for at `factor` times the balanced T*K.

    Never more than the topology can deliver (ep*T tokens, each at most min(K, E_local) times).
    MXFP8 adds the worst padding of E_local experts, each to 128 rows.
    """
    T, K, E_local, ep = (np.asarray(x, np.int64) for x in (T, K, E_local, ep))
    reachable = T * ep * np.minimum(K, E_local)
    rows = np.minimum(asked_rows(factor, T, K), reachable)
    worst = rows + E_local * (DIST_MOE_EXPERT_ROWS - 1)
    return np.where(mxfp8, worst // DIST_MOE_EXPERT_ROWS * DIST_MOE_EXPERT_ROWS, rows)


def bf16_bytes(rows: ArrayLike, width: ArrayLike) -> IntArray:
    """Aligned bytes of a BF16 [rows, width] buffer."""
    return align_up(np.asarray(rows, np.int64) * np.asarray(width, np.int64) * 2)


def mx_row_bytes(rows: ArrayLike, width: ArrayLike) -> IntArray:
    """Aligned bytes of an FP8 [rows, width] operand with scales along the width."""
    rows, width = np.asarray(rows, np.int64), np.asarray(width, np.int64)
    blocks = (width + (MX_BLOCK - 1)) // MX_BLOCK
    return align_up(rows * width) + align_up(rows * blocks * ROW_SCALE_COPIES)


def mx_col_bytes(rows: ArrayLike, width: ArrayLike) -> IntArray:
    """Aligned bytes of an FP8 [rows, width] operand with scales along the rows."""
    rows, width = np.asarray(rows, np.int64), np.asarray(width, np.int64)
    blocks = (rows + (MX_BLOCK - 1)) // MX_BLOCK
    return align_up(rows * width) + align_up(blocks * width)


def saved_bytes(
    T: ArrayLike, D: ArrayLike, F: ArrayLike, K: ArrayLike, rows: ArrayLike, mxfp8: ArrayLike
) -> IntArray:
    """Bytes a dist_moe layer keeps for backward when it recomputes nothing.

    BF16: the gathered input, the gate and up products, and the T*K route outputs. MXFP8 keeps
    the input and the hidden activation column-quantised, in place of the BF16 input.
    """
    T, K, F = (np.asarray(x, np.int64) for x in (T, K, F))
    operands = np.where(mxfp8, mx_col_bytes(rows, D) + mx_col_bytes(rows, F), bf16_bytes(rows, D))
    return operands + bf16_bytes(rows, 2 * F) + bf16_bytes(T * K, D)


def training_scratch_bytes(
    D: ArrayLike, F: ArrayLike, rows: ArrayLike, mxfp8: ArrayLike, mega: ArrayLike
) -> IntArray:
    """Scratch of dist_moe's backward when it also recomputes the layer's forward.

    BF16: input, gate/up product and its gradient, hidden gradient; the gathered output gradient
    hides inside them unless D > F. MXFP8: four column-quantised operands, two dense buffers, and
    one row-quantised slot, which mega needs wide enough for input and hidden side by side.
    """
    F = np.asarray(F, np.int64)
    x, h1, h = bf16_bytes(rows, D), bf16_bytes(rows, 2 * F), bf16_bytes(rows, F)
    bf16 = x + 2 * h1 + h + np.where(np.asarray(D) > F, x, 0)
    cols = 2 * mx_col_bytes(rows, D) + mx_col_bytes(rows, F) + mx_col_bytes(rows, 2 * F)
    x_row, h_row = mx_row_bytes(rows, D), mx_row_bytes(rows, F)
    slot = np.maximum(np.where(mega, x_row + h_row, x_row), mx_row_bytes(rows, 2 * F))
    return np.where(mxfp8, cols + h1 + h + slot, bf16)


def inference_scratch_bytes(
    D: ArrayLike, F: ArrayLike, rows: ArrayLike, mxfp8: ArrayLike, mega: ArrayLike
) -> IntArray:
    """Scratch of dist_moe's forward-only layout: input, gate/up product, hidden."""
    F = np.asarray(F, np.int64)
    x_row, h_row = mx_row_bytes(rows, D), mx_row_bytes(rows, F)
    slot = np.where(mega, x_row + h_row, np.maximum(x_row, h_row))
    operands = np.where(mxfp8, slot, bf16_bytes(rows, D) + bf16_bytes(rows, F))
    return operands + bf16_bytes(rows, 2 * F)


def scratch_bytes(
    D: ArrayLike,
    F: ArrayLike,
    rows: ArrayLike,
    mxfp8: ArrayLike,
    mega: ArrayLike,
    inference: ArrayLike,
) -> IntArray:
    """Scratch of one running dist_moe layer at `rows` capacity rows."""
    return np.where(
        inference,
        inference_scratch_bytes(D, F, rows, mxfp8, mega),
        training_scratch_bytes(D, F, rows, mxfp8, mega),
    )


def slot_bytes(minimum: ArrayLike, full_save: ArrayLike, factor: ArrayLike) -> IntArray:
    """Slot at `factor` of the optional bytes between `minimum` and the balanced full save."""
    minimum = np.asarray(minimum, np.int64)
    optional = np.asarray(full_save, np.int64) - minimum
    extra = np.ceil(np.asarray(factor, np.float64) * optional).astype(np.int64)
    return align_up(minimum + extra)


def mok_retained_rows(requested: ArrayLike, minibatch: ArrayLike) -> IntArray:
    """Rows mok keeps per layer: `requested` in whole minibatches."""
    requested, minibatch = np.asarray(requested, np.int64), np.asarray(minibatch, np.int64)
    return (requested + minibatch - 1) // minibatch * minibatch


def mok_schedule_rows(rows_per_expert: ArrayLike) -> IntArray:
    """Rows mok schedules, each expert padded to 256: [..., E_local] -> [...]."""
    return padded_rows(rows_per_expert, MOK_EXPERT_ROWS)


def mok_replay_rows(schedule_rows: ArrayLike, retained_rows: ArrayLike) -> IntArray:
    """Scheduled rows beyond the retained ones, which mok runs again in backward."""
    excess = np.asarray(schedule_rows, np.int64) - np.asarray(retained_rows, np.int64)
    return np.maximum(excess, 0)


def integers(name: str, value: Any) -> IntArray:
    """`value` as int64; refuses what is not a whole number (booleans and floats included)."""
    array = np.asarray(value)
    if array.dtype.kind == "O" and all(type(x) is int for x in array.flat):
        raise PlanError(f"{name}={value} must be below 2**63")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name}={value!r} must be an integer")
    if array.dtype == np.uint64 and (array > np.iinfo(np.int64).max).any():
        raise PlanError(f"{name}={array.max()} must be below 2**63")
    return array.astype(np.int64, copy=False)


def reals(name: str, value: Any) -> NDArray[np.float64]:
    """`value` as float64; refuses what is not a real number (booleans included)."""
    array = np.asarray(value)
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name}={value!r} must be a real number")
    return array.astype(np.float64, copy=False)


def refuse(bad: NDArray[np.bool_], name: str, rule: str, columns: dict[str, NDArray[Any]]) -> None:
    """Raise PlanError for the first row where `bad`; `{field}` in `rule` is that row's value."""
    rows = np.flatnonzero(bad)
    if rows.size:
        at = {key: column.reshape(-1)[rows[0]].item() for key, column in columns.items()}
        place = f" (row {rows[0]})" if bad.ndim else ""
        raise PlanError(f"{name}={at[name]} {rule.format(**at)}{place}")
