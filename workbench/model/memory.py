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

from workbench.model.coefficients import Group
from workbench.model.fit import group_rows
from workbench.model.timemodel import CaseArrays
from workbench.planning import arithmetic as pa
from workbench.planning.reference import MokConfig
from workbench.planning.reference_table import dist_moe_table
from workbench.systems import SYSTEMS

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


def memory_amounts(cases: CaseArrays, group: Group) -> tuple[dict[str, Array], dict[str, Array]]:
    """(GiB planned by dist_moe: `slot`, `scratch`; 2**30 pieces of the other terms) of the cases
    of one group, [N]; terms that the group does not have are left out."""
    T, D, F, K, layers = (cases.T, cases.D, cases.F, cases.K, cases.layers)
    training = cases.training
    mxfp8 = group.precision == "mxfp8"
    expert = 3.0 * D * F
    routed = layers * (cases.E // cases.ep) * expert
    every = routed + layers * cases.sharedExperts * expert
    pieces = {
        "weight": every,
        "gradient": every * training,
        "shared_activations": layers * T * F * (training & (cases.sharedExperts > 0)),
    }
    planned: dict[str, Array] = {}
    if mxfp8:
        pieces[f"mxfp8_copies_{group.backend}"] = routed
    system = SYSTEMS[group.pipeline]
    if system.reserves == "slot":
        pieces["token_buffers"] = layers * T * D
        pieces["backward_tokens"] = T * D * training
        pieces["backward_columns"] = T * F * training
        plan = dist_moe_table(
            num_local_input_tokens=T,
            hidden_dim=D,
            intermediate_dim=F,
            top_k=K,
            num_experts=cases.E,
            max_moe_layers_per_activation_slot=layers,
            ep_size=cases.ep,
            precision=group.precision,
            pipeline=group.pipeline,
            inference=~training,
            device_scratch_capacity_factor=cases.scratchFactor,
            activation_slot_capacity_factor=np.where(training, cases.slotFactor, np.nan),
        )
        planned["slot"] = plan["total_activation_bytes"] / GIB
        planned["scratch"] = plan["device_scratch_bytes"] / GIB
    if system.reserves == "rows":
        capacity = cases.scratchFactor * T * K
        kept = pa.mok_retained_rows(pa.asked_rows(cases.slotFactor, T, K), MokConfig.minibatch_rows)
        pieces[f"row_buffers_D_{group.precision}"] = capacity * D
        pieces[f"row_buffers_F_{group.precision}"] = capacity * F
        pieces["row_gradients_D"] = capacity * D * training
        pieces["row_gradients_F"] = capacity * F * training
        pieces[f"retained_{group.precision}"] = training * (layers - 1) * kept * (D + 3 * F)
    return planned, {name: amount / GIB for name, amount in pieces.items()}


def _all_amounts(table: pd.DataFrame) -> pd.DataFrame:
    """`memory_amounts` of a whole table, 0 where a term does not apply."""
    cases = CaseArrays.of(table)
    amounts = pd.DataFrame(0.0, index=range(len(table)), columns=[*PLANNED, *MEMORY_UNITS])
    for group, rows in group_rows(table).items():
        if len(rows):
            planned, pieces = memory_amounts(cases.take(rows), group)
            for name, values in (planned | pieces).items():
                amounts.loc[rows, name] = values
    return amounts


def fit_memory(table: pd.DataFrame, use: npt.NDArray[np.bool_] | None = None) -> dict[str, float]:
    """Bytes per piece of each term, by non-negative least squares on relative error.

    Uses the cases of `use` [N] that have peakAllocatedGiB; {} if none has. A term that no case
    needs gets 0.
    """
    measured = table["peakAllocatedGiB"].to_numpy(np.float64)
    known = np.isfinite(measured) & (np.ones(len(table), bool) if use is None else use)
    if not known.any():
        return {}
    amounts = _all_amounts(table)
    rest = (measured - amounts[list(PLANNED)].sum(axis=1).to_numpy())[known] / measured[known]
    columns = amounts[list(MEMORY_UNITS)].to_numpy()[known] / measured[known, None]
    scale = np.maximum(columns.max(axis=0), 1e-300)  # alike in size, or nnls stops early
    found, _ = nnls(columns / scale, rest)
    return dict(zip(MEMORY_UNITS, (found / scale).tolist(), strict=True))


def memory_terms(table: pd.DataFrame, constants: Mapping[str, float]) -> pd.DataFrame:
    """GiB of each term of each case, by the table's index; their sum is the prediction."""
    terms = _all_amounts(table).set_index(table.index)
    return terms * pd.Series(dict.fromkeys(PLANNED, 1.0) | dict(constants))


def predict_memory(cases: CaseArrays, group: Group, constants: Mapping[str, float]) -> Array:
    """Peak allocated GiB of the cases of one group, [N]; NaN without constants."""
    if not constants or not SYSTEMS[group.pipeline].published:
        return np.full(len(cases.ep), np.nan)
    planned, pieces = memory_amounts(cases, group)
    total = np.zeros(len(cases.ep))
    for amount in planned.values():
        total = total + amount
    for name, amount in pieces.items():
        total = total + constants[name] * amount
    return total
