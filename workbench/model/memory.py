"""Peak allocated memory of a case as a sum of named terms, in GiB.

dist_moe's slot and scratch come from its plan, byte for byte. Everything else is a count (weights,
tokens, rows) times bytes per piece; those bytes are fitted and should come out near the sizes of
the types: 2 for a BF16 weight, 4 for an FP32 gradient, 33/32 for an MXFP8 copy.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import nnls

from workbench.moe import plan_arithmetic as pa
from workbench.moe.case_plan import CasePlans

Array = npt.NDArray[Any]
GIB = 2.0**30

MEMORY_UNITS: Mapping[str, str] = {
    "weight": "bytes per local weight: BF16",
    "gradient": "bytes per local weight in training",
    "mxfp8_copies_dist_moe": "bytes per routed local weight: its quantised copy",
    "mxfp8_copies_mok": "bytes per routed local weight: its quantised copies",
    "token_buffers": "dist_moe: bytes per token, column of D and layer: input, output, symmetric "
    "publish and combine buffers",
    "shared_activations": "bytes per token, column of F and layer in training: the shared "
    "expert's kept activations",
    "backward_tokens": "dist_moe: bytes per token and column of D in training, once",
    "backward_columns": "dist_moe: bytes per token and column of F in training, once",
    "row_buffers_D_bf16": "mok BF16: bytes per row of capacity and column of D",
    "row_buffers_F_bf16": "mok BF16: bytes per row of capacity and column of F",
    "row_buffers_D_mxfp8": "mok MXFP8: bytes per row of capacity and column of D",
    "row_buffers_F_mxfp8": "mok MXFP8: bytes per row of capacity and column of F",
    "row_gradients_D": "mok: more bytes of the same in training, per column of D",
    "row_gradients_F": "mok: more bytes of the same in training, per column of F",
    "retained_bf16": "mok BF16: bytes per retained row and column (D + 3F) of each further layer",
    "retained_mxfp8": "mok MXFP8: bytes per retained row and column of each further layer",
}
"""Term -> unit and meaning of its fitted constant."""

PLANNED = ("slot", "scratch")


def memory_amounts(table: pd.DataFrame) -> tuple[dict[str, Array], dict[str, Array]]:
    """(GiB planned by dist_moe: `slot`, `scratch`; 2**30 pieces per term), each [N].

    The study's single layers keep everything that scratchFactor admits, so that is their slot.
    """
    ints = {n: table[n].to_numpy(np.float64) for n in ("T", "D", "F", "E", "K", "ep", "layers")}
    T, D, F, K, layers = (ints[n] for n in ("T", "D", "F", "K", "layers"))
    dist = (table["backend"] == "dist_moe").to_numpy()
    mok = (table["backend"] == "mok").to_numpy()
    training = (table["mode"] == "training").to_numpy()
    mxfp8 = (table["precision"] == "mxfp8").to_numpy()
    routed = layers * (ints["E"] / ints["ep"]) * 3 * D * F
    every = routed + layers * table["sharedExperts"].to_numpy(np.float64) * 3 * D * F
    tokens = layers * T
    capacity = mok * table["scratchFactor"].to_numpy(np.float64) * T * K
    asked = np.floor(table["slotFactor"].to_numpy(np.float64) * T * K + 0.5).astype(np.int64)
    further = mok * training * (layers - 1) * pa.mok_retained_rows(asked, 4096) * (D + 3 * F)
    pieces = {
        "weight": every,
        "gradient": every * training,
        "mxfp8_copies_dist_moe": routed * mxfp8 * dist,
        "mxfp8_copies_mok": routed * mxfp8 * mok,
        "token_buffers": tokens * D * dist,
        "shared_activations": tokens * F * training * (table["sharedExperts"] > 0).to_numpy(),
        "backward_tokens": T * D * training * dist,
        "backward_columns": T * F * training * dist,
        "row_buffers_D_bf16": capacity * D * ~mxfp8,
        "row_buffers_F_bf16": capacity * F * ~mxfp8,
        "row_buffers_D_mxfp8": capacity * D * mxfp8,
        "row_buffers_F_mxfp8": capacity * F * mxfp8,
        "row_gradients_D": capacity * D * training,
        "row_gradients_F": capacity * F * training,
        "retained_bf16": further * ~mxfp8,
        "retained_mxfp8": further * mxfp8,
    }
    planned = {name: np.zeros(len(table)) for name in PLANNED}
    if dist.any():
        single = (table["layers"] == 1).to_numpy()
        slot_factor = np.where(single, table["scratchFactor"], table["slotFactor"])
        chosen = table.assign(slotFactor=slot_factor)[dist]
        plan = CasePlans(table=chosen, backend="dist_moe").dist_moe
        planned["slot"][dist] = plan["total_activation_bytes"] / GIB
        planned["scratch"][dist] = plan["device_scratch_bytes"] / GIB
    return planned, {name: amount / GIB for name, amount in pieces.items()}


def fit_memory(table: pd.DataFrame, use: npt.NDArray[np.bool_] | None = None) -> dict[str, float]:
    """Bytes per piece of each term, by non-negative least squares on relative error.

    Uses the cases of `use` [N] that have peakAllocatedGiB; {} if none has. A term that no case
    needs gets 0.
    """
    measured = table["peakAllocatedGiB"].to_numpy(np.float64)
    known = np.isfinite(measured) & (np.ones(len(table), bool) if use is None else use)
    if not known.any():
        return {}
    planned, pieces = memory_amounts(table)
    rest = (measured - planned["slot"] - planned["scratch"])[known] / measured[known]
    columns = np.stack(list(pieces.values()), axis=1)[known] / measured[known, None]
    scale = np.maximum(columns.max(axis=0), 1e-300)  # alike in size, or nnls stops early
    found, _ = nnls(columns / scale, rest)
    return dict(zip(pieces, (found / scale).tolist(), strict=True))


def memory_terms(table: pd.DataFrame, constants: Mapping[str, float]) -> pd.DataFrame:
    """GiB of each term of each case, by the table's index; their sum is the prediction."""
    planned, pieces = memory_amounts(table)
    terms = planned | {name: constants[name] * amount for name, amount in pieces.items()}
    return pd.DataFrame(terms, index=table.index)


def predict_memory(table: pd.DataFrame, constants: Mapping[str, float]) -> Array:
    """Peak allocated GiB of each case, [N]; NaN without constants."""
    if not constants:
        return np.full(len(table), np.nan)
    planned, pieces = memory_amounts(table)
    total = planned["slot"] + planned["scratch"]
    for name, amount in pieces.items():
        total = total + constants[name] * amount
    return total
