"""Predicted times of cases, with the floors, the 90 % interval and what it rests on.

Cases are taken in blocks of one group on two threads, so that a million of them stay in cache.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from workbench.bench.schema import METRICS
from workbench.case import STUDY_SHAPE, Case, case_table
from workbench.errors import InputError
from workbench.hardware import Hardware, load_hardware
from workbench.model.fit import group_rows
from workbench.model.memory import predict_memory
from workbench.model.parameters import Group
from workbench.model.roofline import FLOORS
from workbench.model.timemodel import CaseArrays, Terms, binding, layer_terms, predict_times

if TYPE_CHECKING:
    from workbench.model.calibration import Calibration

Array = npt.NDArray[Any]
BLOCK = 16_384
THREADS = 2
REASONS = (
    "",
    "device without calibration",
    "mode without a record",
    "shape without a record",
    "ep outside the records",
    "F outside the records",
    "load outside the records",
    "more layers than in any record",
    "replay or recomputation without a record",
)
"""Why a prediction is extrapolated; the first that applies is reported."""
TIMES = ("iterationMS", "forwardMS", "backwardMS")
FLOOR_COLUMNS = {name: f"busiest{column}" for name, column in FLOORS.items()}


def predict_table(
    calibration: "Calibration",
    cases: pd.DataFrame | Sequence[Case],
    device: Hardware | None = None,
) -> pd.DataFrame:
    """The cases' own columns and, for each case:

    iterationMS, forwardMS, backwardMS      ms; backward NaN in inference
    iterationLowMS, iterationHighMS         the 90 % interval
    busiest...FloorMS, busiestBinds         floors of the busiest rank at the device's peaks
    usefulTFPerGPU                          useful FLOP over iterationMS
    peakAllocatedGiB                        NaN if the calibration has no memory
    extrapolated, extrapolation             whether, and why, nothing like it was measured
    origin, device, calibratedOn            "predicted", the device predicted for, whose records

    A device without calibration has its own floors and the calibrated device's efficiencies.
    Raises InputError for a pipeline without a record and a device without the peak or NIC.
    """
    table = cases if isinstance(cases, pd.DataFrame) else case_table(list(cases))
    own = load_hardware(calibration.device)
    hardware = device or own
    count = len(table)
    out: dict[str, Array] = {name: np.full(count, np.nan) for name in (*TIMES, *_FLOORS_AND_LOAD)}
    out["binds"], out["why"] = np.zeros(count, np.int8), np.zeros(count, np.int8)
    groups = group_rows(table)
    _refuse_unknown(table, groups)
    # Single layers first: a block of them needs no sum over layers.
    several = (table["layers"] > 1).to_numpy()
    groups = {
        group: np.concatenate([rows[~several[rows]], rows[several[rows]]])
        for group, rows in groups.items()
        if len(rows)
    }
    cases_of = CaseArrays.of(table)
    foreign = hardware.name != own.name
    for group in groups:  # refuse before any work is done
        calibration.group_values(group)

    def one(block: tuple[Group, Array]) -> None:
        group, rows = block
        part = cases_of.take(rows)
        terms = layer_terms(part, group, hardware, calibration.constants)
        times = predict_times(calibration.group_values(group), terms, calibration.constants)
        for name, values in zip(TIMES, times, strict=True):
            out[name][rows] = values
        for name, values in terms.floors.items():
            out[FLOOR_COLUMNS[name]][rows] = values
        out["binds"][rows] = binding(terms.floors)
        out["why"][rows] = 1 if foreign else _why(calibration, part, terms)
        out["peakAllocatedGiB"][rows] = predict_memory(part, group, calibration.memory)
        flop = part.T * (part.K + part.sharedExperts) * (6.0 * part.D * part.F * part.layers)
        flop *= np.where(terms.training, 3, 1)
        out["usefulTFPerGPU"][rows] = flop / (times.iteration * 1e9)

    if count < BLOCK:  # so little that the threads would only take turns
        list(map(one, _blocks(groups)))
    else:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(one, _blocks(groups)))
    _refuse_no_link(table, out["iterationMS"], hardware)
    extrapolated = out["why"] > 0
    width = np.where(extrapolated, calibration.interval_extrapolated, calibration.interval)
    factor = np.exp(width)
    columns = {name: out[name] for name in TIMES} | {
        "iterationLowMS": out["iterationMS"] / factor,
        "iterationHighMS": out["iterationMS"] * factor,
        **{name: out[name] for name in FLOOR_COLUMNS.values()},
        "busiestBinds": pd.Categorical.from_codes(out["binds"], list(FLOORS)),
        "usefulTFPerGPU": out["usefulTFPerGPU"],
        "peakAllocatedGiB": out["peakAllocatedGiB"],
        "extrapolated": extrapolated,
        "extrapolation": pd.Categorical.from_codes(out["why"], list(REASONS)),
        "origin": pd.Categorical.from_codes(np.zeros(count, np.int8), ["predicted"]),
        "device": pd.Categorical.from_codes(np.zeros(count, np.int8), [hardware.name]),
        "calibratedOn": pd.Categorical.from_codes(np.zeros(count, np.int8), [own.name]),
    }
    kept = [n for n in table.columns if n not in METRICS and n not in columns]
    predicted = pd.DataFrame(columns, index=table.index, copy=False)
    return pd.concat([table[kept], predicted], axis=1)


_FLOORS_AND_LOAD = (*FLOOR_COLUMNS.values(), "peakAllocatedGiB", "usefulTFPerGPU")


def _blocks(groups: dict[Group, Array]) -> Iterator[tuple[Group, Array]]:
    for group, rows in groups.items():
        for first in range(0, len(rows), BLOCK):
            yield group, rows[first : first + BLOCK]


def _refuse_unknown(table: pd.DataFrame, groups: dict[Group, Array]) -> None:
    known = np.zeros(len(table), bool)
    for rows in groups.values():
        known[rows] = True
    if not known.all():
        stray = table.iloc[int(np.argmin(known))]
        found = " ".join(str(stray[name]) for name in Group._fields)
        raise InputError(f"pipeline={found} is unknown to the time model")


def _refuse_no_link(table: pd.DataFrame, times: Array, hardware: Hardware) -> None:
    lost = np.isnan(times)
    if lost.any():
        ep = int(table["ep"].to_numpy()[lost][0])
        raise InputError(
            f"ep={ep} leaves the peer-access domain of {hardware.scale_up_domain} GPUs, and "
            f"{hardware.name} has no NIC figure"
        )


def _why(calibration: "Calibration", part: CaseArrays, terms: Terms) -> Array:
    """Index into REASONS for each case of a block, 0 where records surround it."""
    why = np.full(len(part.ep), REASONS.index("mode without a record"), np.int8)
    again = (terms.minibatches > 0) | (terms.recompute > 0)
    beyond = np.add.reduceat(again, terms.start) > 0
    for known in calibration.ranges:
        if known.group != str(terms.group):
            continue
        here = terms.training == (known.mode == "training")
        shape = np.zeros(len(part.ep), bool)
        for sizes in known.shapes:
            shape |= np.logical_and.reduce(
                [getattr(part, n) == size for n, size in zip(STUDY_SHAPE, sizes, strict=True)]
            )
        checks = {
            "shape without a record": ~shape,
            "ep outside the records": ~_within(part.ep, known.ep),
            "F outside the records": ~_within(part.F, known.F),
            "load outside the records": ~_within(terms.factor, known.load),
            "more layers than in any record": part.layers > known.layers,
            "replay or recomputation without a record": beyond & (not known.replay),
        }
        found = np.select(list(checks.values()), [REASONS.index(name) for name in checks], 0)
        why = np.where(here, found, why).astype(np.int8)
    return why


def _within(values: Array, bounds: tuple[float, float]) -> Array:
    return (values >= bounds[0] * (1 - 1e-9)) & (values <= bounds[1] * (1 + 1e-9))
