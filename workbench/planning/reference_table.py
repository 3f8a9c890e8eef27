"""The memory plan of dist_moe for a whole table of workloads, and the rules it must meet.

`dist_moe_table` is the only place where the plan is put together: a single plan is a table of
one. Legend: see `plan_arithmetic`.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.planning import arithmetic as pa

PIPELINES = {"bf16": ("standard",), "mxfp8": ("staged", "mega")}
HIDDEN_MULTIPLE = 64

_INTEGERS = (
    "num_local_input_tokens",
    "hidden_dim",
    "intermediate_dim",
    "top_k",
    "num_experts",
    "max_moe_layers_per_activation_slot",
    "num_activation_slots",
    "activation_slot_bytes",
    "ep_size",
)
_REALS = ("device_scratch_capacity_factor", "activation_slot_capacity_factor")


def checked_columns(values: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """The plan's input columns, broadcast against one another, of one dtype each, and checked.

    `values` holds `dist_moe_table`'s arguments; `ep_size` may be absent, and then the rules that
    need it are not applied. Raises TypeError or PlanError for the first row that breaks a rule.
    """
    columns: dict[str, NDArray[Any]] = {}
    for name, value in values.items():
        if name in _INTEGERS:
            columns[name] = pa.integers(name, value)
        elif name in _REALS:
            columns[name] = pa.reals(name, value)
        else:
            columns[name] = np.asarray(value)
    if columns["inference"].dtype.kind != "b":
        raise TypeError(f"inference={values['inference']!r} must be true or false")
    columns = dict(zip(columns, np.broadcast_arrays(*columns.values()), strict=True))
    _check_workload(columns)
    _check_capacity(columns)
    if "ep_size" in columns:
        _check_group(columns)
    return columns


def _check_workload(c: dict[str, NDArray[Any]]) -> None:
    for name in (
        "num_local_input_tokens",
        "hidden_dim",
        "intermediate_dim",
        "top_k",
        "num_experts",
        "max_moe_layers_per_activation_slot",
    ):
        pa.refuse(c[name] <= 0, name, "must be positive", c)
    pa.refuse(
        c["hidden_dim"] % HIDDEN_MULTIPLE != 0,
        "hidden_dim",
        f"must be divisible by {HIDDEN_MULTIPLE}",
        c,
    )
    pa.refuse(
        c["top_k"] > c["num_experts"], "top_k", "must be at most num_experts={num_experts}", c
    )
    bf16, mxfp8 = c["precision"] == "bf16", c["precision"] == "mxfp8"
    pa.refuse(~(bf16 | mxfp8), "precision", f"must be one of {', '.join(PIPELINES)}", c)
    for precision, chosen in (("bf16", bf16), ("mxfp8", mxfp8)):
        known = np.logical_or.reduce([c["pipeline"] == name for name in PIPELINES[precision]])
        rule = f"must be one of {', '.join(PIPELINES[precision])} for precision={precision}"
        pa.refuse(chosen & ~known, "pipeline", rule, c)
    for name in ("hidden_dim", "intermediate_dim"):
        rule = f"must be divisible by {pa.MX_BLOCK}, the elements per MXFP8 scale"
        pa.refuse(mxfp8 & (c[name] % pa.MX_BLOCK != 0), name, rule, c)


def _check_capacity(c: dict[str, NDArray[Any]]) -> None:
    has_bytes = c["activation_slot_bytes"] != pa.UNSET_BYTES
    has_factor = ~np.isnan(c["activation_slot_capacity_factor"])
    for name, given in (
        ("activation_slot_bytes", has_bytes),
        ("activation_slot_capacity_factor", has_factor),
    ):
        pa.refuse(given & (c[name] < 0), name, "must not be negative", c)
        pa.refuse(given & c["inference"], name, "must be unset: inference saves nothing", c)
    name = "activation_slot_capacity_factor"
    pa.refuse(np.isinf(c[name]), name, "must be finite", c)
    rule = "and activation_slot_capacity_factor={activation_slot_capacity_factor} exclude each"
    pa.refuse(has_bytes & has_factor, "activation_slot_bytes", f"{rule} other", c)
    slots = c["num_activation_slots"]
    pa.refuse(~c["inference"] & (slots < 1), "num_activation_slots", "must be at least 1", c)
    pa.refuse(slots < 0, "num_activation_slots", "must not be negative", c)
    name = "device_scratch_capacity_factor"
    pa.refuse(~(np.isfinite(c[name]) & (c[name] > 0)), name, "must be finite and positive", c)


def _check_group(c: dict[str, NDArray[Any]]) -> None:
    ep = c["ep_size"]
    pa.refuse(ep <= 0, "ep_size", "must be positive", c)
    pa.refuse(
        c["num_experts"] % ep != 0, "num_experts", "must be divisible by ep_size={ep_size}", c
    )
    # A generous float bound of every product below, so that int64 and float64 stay exact.
    tokens = c["num_local_input_tokens"].astype(np.float64)
    rows = tokens * c["top_k"] + 128.0 * c["num_experts"]
    width = 16.0 * (c["hidden_dim"].astype(np.float64) + c["intermediate_dim"])
    layers = c["max_moe_layers_per_activation_slot"].astype(np.float64)
    factor = np.nan_to_num(c["activation_slot_capacity_factor"], nan=0.0)
    scale = np.minimum(c["device_scratch_capacity_factor"], ep) + factor + 1.0
    slots = np.maximum(c["num_activation_slots"], 1).astype(np.float64)
    bound = rows * scale * width * layers * slots
    largest = np.maximum(bound, np.maximum(tokens * ep * width, c["activation_slot_bytes"] * slots))
    rule = "with this shape, depth and capacity needs more than 2**53 bytes"
    pa.refuse(~(largest < pa.MAX_BYTES), "num_local_input_tokens", rule, c)


def dist_moe_table(
    *,
    num_local_input_tokens: ArrayLike,
    hidden_dim: ArrayLike,
    intermediate_dim: ArrayLike,
    top_k: ArrayLike,
    num_experts: ArrayLike,
    max_moe_layers_per_activation_slot: ArrayLike,
    ep_size: ArrayLike,
    precision: ArrayLike,
    pipeline: ArrayLike,
    inference: ArrayLike = False,
    device_scratch_capacity_factor: ArrayLike = 1.0,
    activation_slot_bytes: ArrayLike = pa.UNSET_BYTES,
    activation_slot_capacity_factor: ArrayLike = np.nan,
    num_activation_slots: ArrayLike = 1,
) -> dict[str, NDArray[Any]]:
    """What dist_moe reserves, for every row of the broadcast arguments.

    The arguments are the fields of `DistMoEConfig` and the group size; a slot request that is
    not made is `UNSET_BYTES` or NaN. Returns one array per field of `DistMoEPlan` that depends
    on the workload: int64 bytes and rows, float64 factors, the `inference` flags. Raises
    TypeError or PlanError naming the first row that cannot be planned.
    """
    c = checked_columns(dict(locals()))
    T, D, F = c["num_local_input_tokens"], c["hidden_dim"], c["intermediate_dim"]
    K, ep, layers = c["top_k"], c["ep_size"], c["max_moe_layers_per_activation_slot"]
    E_local = c["num_experts"] // ep
    mxfp8, mega, inference = c["precision"] == "mxfp8", c["pipeline"] == "mega", c["inference"]
    # One rank can receive no more than everything: ep times the balanced rows.
    scratch_factor = np.minimum(c["device_scratch_capacity_factor"], ep)

    rows = pa.dist_moe_rows(T, K, E_local, ep, scratch_factor, mxfp8)
    balanced_rows = pa.dist_moe_rows(T, K, E_local, ep, 1.0, mxfp8)
    scratch = pa.scratch_bytes(D, F, rows, mxfp8, mega, inference)
    saved_input = pa.bf16_bytes(T, D)
    minimum = np.where(inference, 0, layers * saved_input)
    balanced = np.where(inference, 0, layers * pa.saved_bytes(T, D, F, K, balanced_rows, mxfp8))
    useful = np.where(inference, 0, layers * pa.saved_bytes(T, D, F, K, rows, mxfp8))

    request, factor = c["activation_slot_bytes"], c["activation_slot_capacity_factor"]
    requested = request != pa.UNSET_BYTES
    rule = "must be at least minimum_activation_slot_bytes={minimum}"
    pa.refuse(
        requested & (request < minimum), "activation_slot_bytes", rule, c | {"minimum": minimum}
    )
    slot = pa.slot_bytes(minimum, balanced, np.nan_to_num(factor, nan=0.0))
    slot = np.where(requested, pa.align_up(np.where(requested, request, 0)), slot)
    slots = np.where(inference, 0, c["num_activation_slots"])
    total = slots * slot + scratch
    return {
        "balanced_recv_rows": T * K,
        "device_scratch_capacity_rows": rows,
        "total_scratch_capacity_rows": rows,
        "device_scratch_capacity_factor": scratch_factor,
        "total_scratch_capacity_factor": scratch_factor,
        "saved_input_bytes_per_layer": saved_input,
        "device_scratch_bytes": scratch,
        "minimum_activation_slot_bytes": minimum,
        "balanced_full_save_activation_slot_bytes": balanced,
        "maximum_useful_activation_slot_bytes": useful,
        "activation_slot_bytes": slot,
        "activation_slot_capacity_factor": factor,
        "total_activation_bytes": slots * slot,
        "total_device_buffer_bytes": total,
        "total_virtual_bytes": total,
        "num_activation_slots": slots,
        "inference": inference,
    }
