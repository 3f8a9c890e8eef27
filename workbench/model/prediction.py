"""Predicted times of cases, with the floors, the 90 % interval and what it rests on.

A case that cannot run where it is asked for has a reason and no time. Cases are taken in blocks of
one group on two threads, so that a million of them stay in cache.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from workbench.case import STUDY_SHAPE, Case, case_table
from workbench.errors import InputError
from workbench.hardware import Hardware, load_hardware
from workbench.model.coefficients import Group
from workbench.model.fit import group_rows
from workbench.model.memory import GIB, predict_memory
from workbench.model.roofline import FLOORS
from workbench.model.timemodel import CaseArrays, Terms, layer_terms, predict_times
from workbench.planning import arithmetic as pa
from workbench.records.schema import METRICS
from workbench.systems import SYSTEMS

if TYPE_CHECKING:
    from workbench.model.calibration import Calibration, HeldOut

Array = npt.NDArray[Any]
BLOCK = 16_384
THREADS = 2
REFUSALS = ("yes", "precision", "domain", "scratch", "memory", "measurement", "precision", "memory")
"""First word of `runs`; of several reasons the first is told. The last two are of cases that
dist_moe's plan refuses: widths that its tiles do not divide, and more bytes than can be counted."""
UNDIVIDED, UNCOUNTED = 6, 7
FEATURES = (
    "device",
    "domain",
    "mode",
    "T",
    "D",
    "E",
    "K",
    "sharedExperts",
    "shape",
    "EP",
    "F",
    "imbalance",
    "layers",
    "replay",
)
"""What can lie outside the records; `shape` where T, D, E, K and sharedExperts do not singly, but
nothing has all of them; `replay` where backward replays or recomputes and no record did."""
DISTANT = ("EP", "F", "imbalance", "layers")
"""Features along which a calibration may have held its smallest or largest out, and knows how far
that was from the rest."""
TIMES = ("iterationMS", "forwardMS", "backwardMS")
BOUNDS = ("iterationLowMS", "iterationHighMS")
FLOOR_COLUMNS = {name: f"busiest{column}" for name, column in FLOORS.items()} | {
    "fixed": "busiestFixedFloorMS"
}
"""Bound -> its column: the roofline's floors, and the time that is spent however little there is
to do (launches, barriers, the exchange of routes)."""


def predict_table(
    calibration: "Calibration", cases: pd.DataFrame | Sequence[Case], device: Hardware | None = None
) -> pd.DataFrame:
    """The cases' own columns and, for each case:

    runs                                    "yes", or why it cannot: a word of REFUSALS, a colon and
                                            the reason; then all times and rates are NaN
    iterationMS, forwardMS, backwardMS      ms; backward NaN in inference
    iterationLowMS, iterationHighMS         the 90 % interval. Outside the records along EP, F,
                                            imbalance or layers it is as wide as the errors were
                                            when the calibration held measurements out at that end,
                                            summed over these features, but only as far out as was
                                            held out (a ratio: F of 12288 beside records up to 6144
                                            where 6144 was held out from 3072). Farther out, and
                                            along any other feature, it is from the floor to what
                                            the least efficient calibrated group would take
    busiest...FloorMS, busiestBinds         floors of the busiest rank at the device's peaks (NaN
                                            without the peak or the NIC), the fixed time, and the
                                            largest of them
    usefulTFPerGPU                          useful FLOP over iterationMS
    peakAllocatedGiB                        NaN if the calibration has no memory
    extrapolated, extrapolation             whether, and in which of FEATURES, a case lies outside
                                            the records
    origin, device, calibratedOn            "predicted", the device predicted for, whose records

    A device without calibration has its own floors and the calibrated device's efficiencies.
    Raises InputError for a pipeline that the model does not know.
    """
    table = cases if isinstance(cases, pd.DataFrame) else case_table(list(cases))
    # a device of one's own is in no file: it comes with the call
    its_own = device is not None and device.name == calibration.device
    own = device if its_own and device is not None else load_hardware(calibration.device)
    hardware = device or own
    count = len(table)
    out: dict[str, Array] = {name: np.full(count, np.nan) for name in _NUMBERS}
    out |= {name: np.zeros(count, np.int8) for name in ("binds", "runs", "group")}
    out["outside"] = np.zeros(count, np.int16)
    groups = group_rows(table)
    _refuse_unknown(table, groups)
    # Single layers first: a block of them needs no sum over layers.
    several = (table["layers"] > 1).to_numpy()
    groups = {
        group: np.concatenate([rows[~several[rows]], rows[several[rows]]])
        for group, rows in groups.items()
        if len(rows)
    }
    for number, rows in enumerate(groups.values()):
        out["group"][rows] = number
    cases_of = CaseArrays.of(table)
    measured = {group: calibration.group_values(group) for group in calibration.groups}

    def one(block: tuple[Group, Array]) -> None:
        group, rows = block
        undivided = _undivided(cases_of, group, rows)
        of_rows(group, rows[undivided], UNDIVIDED)
        planned(group, rows[~undivided])

    def planned(group: Group, rows: Array) -> None:
        try:
            of_rows(group, rows, 0)
        except pa.PlanError:
            if len(rows) == 1:
                of_rows(group, rows, UNCOUNTED)
            else:
                planned(group, rows[: len(rows) // 2])
                planned(group, rows[len(rows) // 2 :])

    def of_rows(group: Group, rows: Array, refused: int) -> None:
        if not len(rows):
            return
        part = cases_of.take(rows)
        terms = layer_terms(part, group, hardware, calibration.constants, plan=not refused)
        if refused:
            memory, runs = np.full(len(rows), np.nan), np.full(len(rows), refused)
        else:
            memory = predict_memory(part, group, calibration.memory)
            runs = _runs(part, terms, memory, hardware, group in measured)
        bounds = dict(terms.floors)
        out["runs"][rows], out["peakAllocatedGiB"][rows] = runs, memory
        if group in measured:
            outside, width, unseen = _outside(calibration, part, terms, hardware, own)
            times = predict_times(measured[group], terms, calibration.constants)
            bounds["fixed"] = times.fixed
            limits = _interval(calibration, terms, times.iteration, width, unseen, measured)
            yes = runs == 0
            for name, values in zip((*TIMES, *BOUNDS), (*times[:3], *limits), strict=True):
                out[name][rows] = np.where(yes, values, np.nan)
            out["outside"][rows] = outside
        for name, values in bounds.items():
            out[FLOOR_COLUMNS[name]][rows] = values
        known = np.stack([bounds[name] for name in FLOOR_COLUMNS if name in bounds])
        out["binds"][rows] = np.where(np.isnan(known), -np.inf, known).argmax(axis=0)
        flop = part.T * (part.K + part.sharedExperts) * (6.0 * part.D * part.F * part.layers)
        flop *= np.where(terms.training, 3, 1)
        out["usefulTFPerGPU"][rows] = flop / (out["iterationMS"][rows] * 1e9)

    if count < BLOCK:  # so little that the threads would only take turns
        list(map(one, _blocks(groups)))
    else:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(one, _blocks(groups)))
    columns = {
        "runs": _reasons(table, out, list(groups), hardware, calibration),
        **{name: out[name] for name in (*TIMES, *BOUNDS, *FLOOR_COLUMNS.values())},
        "busiestBinds": pd.Categorical.from_codes(out["binds"], list(FLOOR_COLUMNS)),
        "usefulTFPerGPU": out["usefulTFPerGPU"],
        "peakAllocatedGiB": out["peakAllocatedGiB"],
        "extrapolated": out["outside"] > 0,
        "extrapolation": _named(out["outside"]),
        "origin": pd.Categorical.from_codes(np.zeros(count, np.int8), ["predicted"]),
        "device": pd.Categorical.from_codes(np.zeros(count, np.int8), [hardware.name]),
        "calibratedOn": pd.Categorical.from_codes(np.zeros(count, np.int8), [own.name]),
    }
    kept = [n for n in table.columns if n not in METRICS and n not in columns]
    predicted = pd.DataFrame(columns, index=table.index, copy=False)
    return pd.concat([table[kept], predicted], axis=1)


_NUMBERS = (*TIMES, *BOUNDS, *FLOOR_COLUMNS.values(), "peakAllocatedGiB", "usefulTFPerGPU")


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


def _multiple(group: Group) -> int:
    return SYSTEMS[group.pipeline].hidden_multiple if group.pipeline else 1


def _undivided(cases: CaseArrays, group: Group, rows: Array) -> Array:
    """Whether a system refuses the widths of cases, [N]."""
    system, D, F = SYSTEMS[group.pipeline], cases.D[rows], cases.F[rows]
    bad = D % system.hidden_multiple != 0
    if system.hidden_multiple > 1 and group.precision == "mxfp8":
        bad = bad | (D % pa.MX_BLOCK != 0) | (F % pa.MX_BLOCK != 0)
    return np.asarray(bad)


def _runs(
    part: CaseArrays, terms: Terms, memory: Array, hardware: Hardware, measured: bool
) -> Array:
    """Index into REFUSALS for each case of a block, [N]."""
    group = terms.group
    no_units = group.precision != "bf16" and not (
        hardware.block_scaled and np.isfinite(hardware.peak_or_nan(group.precision))
    )
    beyond = part.ep > hardware.scale_up_domain
    if not SYSTEMS[group.pipeline].peer_memory and hardware.nic_gbit_s is not None:
        beyond = np.zeros_like(beyond)
    overflow = np.zeros_like(beyond)
    if SYSTEMS[group.pipeline].reserves == "slot":
        capacity = pa.dist_moe_rows(
            part.T,
            part.K,
            part.E // part.ep,
            part.ep,
            part.scratchFactor,
            group.precision == "mxfp8",
        )
        overflow = terms.scratch_rows > capacity
    full = memory * GIB > hardware.hbm_gb * 1e9
    found = np.where(full, 4, np.int8(0 if measured else 5))
    found = np.where(overflow, 3, found)
    found = np.where(beyond, 2, found)
    return np.full_like(found, 1) if no_units else found


def _reasons(
    table: pd.DataFrame,
    out: dict[str, Array],
    groups: list[Group],
    hardware: Hardware,
    calibration: "Calibration",
) -> pd.Categorical:
    """`runs` in words. Only what a reason names is told apart, so that there are few of them."""
    words, codes = ["yes"], np.zeros(len(table), np.int32)
    keys = {2: table["ep"], 3: table["scratchFactor"]}
    for refusal in range(1, len(REFUSALS)):
        rows = np.flatnonzero(out["runs"] == refusal)
        key = keys[refusal].to_numpy()[rows] if refusal in keys else out["group"][rows]
        values, which = np.unique(key, return_inverse=True)
        codes[rows] = len(words) + which
        for value in values.tolist():
            group = groups[value] if refusal not in keys else Group("", "", "")
            no_nic = "" if hardware.nic_gbit_s else f", and {hardware.name} has no NIC figure"
            words.append(
                f"{REFUSALS[refusal]}: "
                + {
                    1: f"{hardware.name} has no block-scaled matrix units for {group.precision} "
                    f"that hardware.toml or hardware_file names ({group})",
                    2: f"ep={value} leaves the peer domain of {hardware.scale_up_domain} "
                    f"GPU{'s' * (hardware.scale_up_domain > 1)}{no_nic}",
                    3: f"the busiest rank receives more rows than scratchFactor={value} reserves, "
                    "where dist_moe stops",
                    4: f"{group} needs more than the {hardware.hbm_gb:g} GB of {hardware.name}",
                    5: f"no record of {group} in the calibration, only of "
                    + ", ".join(map(str, calibration.groups)),
                    UNDIVIDED: f"{group} needs D divisible by {_multiple(group)}"
                    + (f", and D and F by {pa.MX_BLOCK}" if group.precision == "mxfp8" else ""),
                    UNCOUNTED: "needs more than 2**53 bytes",
                }[refusal]
            )
    # two groups may share a reason, and a category is named once
    names = list(dict.fromkeys(words))
    return pd.Categorical.from_codes(np.array([names.index(w) for w in words])[codes], names)


def _outside(
    calibration: "Calibration", part: CaseArrays, terms: Terms, hardware: Hardware, own: Hardware
) -> tuple[Array, Array, Array]:
    """Of a block's cases, each [N]: a bit of each of FEATURES that lies outside the group's
    records; the interval's half-width in log; whether nothing like the case was ever held out."""
    bit = {name: np.int16(1 << n) for n, name in enumerate(FEATURES)}
    everywhere = np.int16(bit["device"] if hardware.name != own.name else 0)
    found = np.full(len(part.ep), everywhere, np.int16)
    found |= (part.ep > hardware.scale_up_domain) * bit["domain"]
    recorded = np.zeros(len(part.ep), bool)
    shown: dict[tuple[str, str], HeldOut] = {
        (one.feature, one.end): one for one in calibration.held_out
    }
    width, unseen = np.zeros(len(part.ep)), np.zeros(len(part.ep), bool)
    again = (terms.minibatches > 0) | (terms.recompute > 0)
    replays = np.add.reduceat(again, terms.start) > 0
    for known in calibration.ranges:
        if known.group != str(terms.group):
            continue
        here = terms.training == (known.mode == "training")
        recorded |= here
        bits = (replays & (not known.replay)) * bit["replay"]
        for name, values, (low, high) in (
            ("EP", part.ep, known.ep),
            ("F", part.F, known.F),
            ("imbalance", terms.factor, known.load),
            ("layers", part.layers, (1, known.layers)),
        ):
            for end, ratio in (("smallest", low / values), ("largest", values / high)):
                beyond = here & (ratio > 1 + 1e-9)
                if not beyond.any():
                    continue
                bits |= beyond * bit[name]
                held = shown.get((name, end))
                if held:  # what each of them showed adds up
                    width += beyond * held.width
                unseen |= beyond & (ratio > (held.ratio if held else 1) * (1 + 1e-9))
        singly = np.zeros(len(part.ep), bool)
        for name, sizes in zip(STUDY_SHAPE, zip(*known.shapes, strict=True), strict=True):
            far = ~_within(getattr(part, name), (min(sizes), max(sizes)))
            bits |= far * bit[name]
            singly |= far
        together = np.zeros(len(part.ep), bool)
        for shape in known.shapes:
            together |= np.logical_and.reduce(
                [getattr(part, n) == size for n, size in zip(STUDY_SHAPE, shape, strict=True)]
            )
        bits |= (~together & ~singly) * bit["shape"]
        found |= np.where(here, bits, 0).astype(np.int16)
    found |= ~recorded * bit["mode"]
    unseen |= (found & ~np.int16(sum(bit[name] for name in DISTANT))) > 0
    return found, np.maximum(width, calibration.interval), unseen


def _within(values: Array, bounds: tuple[float, float]) -> Array:
    return (values >= bounds[0] * (1 - 1e-9)) & (values <= bounds[1] * (1 + 1e-9))


def _named(outside: Array) -> pd.Categorical:
    """The features of the bits, by commas; "" where there is none."""
    present = np.flatnonzero(np.bincount(outside, minlength=1))
    code = np.zeros(1 << len(FEATURES), np.int32)
    code[present] = np.arange(len(present))
    names = [
        ", ".join(name for n, name in enumerate(FEATURES) if bits >> n & 1)
        for bits in present.tolist()
    ]
    return pd.Categorical.from_codes(code[outside], names)


def _interval(
    calibration: "Calibration",
    terms: Terms,
    iteration: Array,
    width: Array,
    unseen: Array,
    measured: dict[Group, dict[str, float]],
) -> tuple[Array, Array]:
    """Bounds of the 90 % interval of a block's times, [N], of half-width `width` in log."""
    floor = np.fmax.reduce(list(terms.floors.values()))
    low, high = iteration * np.exp(-width), iteration * np.exp(width)
    if unseen.any():
        worst = high
        for values in measured.values():
            worst = np.maximum(worst, predict_times(values, terms, calibration.constants).iteration)
        low, high = np.where(unseen, floor, low), np.where(unseen, worst, high)
    return np.maximum(low, floor), high
