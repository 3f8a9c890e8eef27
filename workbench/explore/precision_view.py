"""What the precision explorer shows: a pure function of state, tensor and sources.

Errors are computed on a small real layer (see `precision_study`); times are those of the workload
at balanced load. A format whose precision no system was measured in has only its floor.
"""

import math
from typing import Any, Literal

import numpy as np
import pandas as pd

from workbench.errors import InputError
from workbench.explore.precision_study import METRICS, Study, scale_histogram, sqnr_table
from workbench.explore.sources import (
    Row,
    ShapeState,
    Sources,
    System,
    View,
    milliseconds,
    refusal,
    refused_note,
    runs,
)
from workbench.hardware import Hardware
from workbench.kernels.formats import FORMATS, FormatSpec
from workbench.model.cost import BF16_BYTES, expert_flop, experts_read, hbm_bytes
from workbench.model.roofline import link_ms
from workbench.report import figures_explore as fx
from workbench.report.figures_explore import OBSERVED, PREDICTED, Panel
from workbench.report.theme import STYLES, system_name

Data = Literal["gaussian", "student_t", "outlier_channel", "tensor"]
Metric = Literal["tensor", "gemm", "mlp", "dx", "dw13", "dw2"]
DEFAULT_FORMATS = ["bf16", "mxfp8-e4m3-rceil", "mxfp8-e4m3-floor", "mxfp4-rceil", "nvfp4"]
METRIC_NAMES = {
    "tensor": "tensor",
    "gemm": "GEMM",
    "mlp": "MLP out",
    "dx": "dX",
    "dw13": "dW13",
    "dw2": "dW2",
}
PEAKS = {"bf16": "bf16", "e4m3": "fp8", "e5m2": "fp8", "e2m1": "fp4"}
"""Element -> the peak that a product of it is held against."""
LOOKS = {
    "bf16": ("#0072B2", ""),
    "mxfp8-e4m3-rceil": ("#009E73", ""),
    "mxfp8-e4m3-floor": ("#56B4E9", "/"),
    "mxfp8-e5m2-rceil": ("#E69F00", ""),
    "mxfp8-e5m2-floor": ("#F0E442", "/"),
    "mxfp4-rceil": ("#D55E00", ""),
    "mxfp4-floor": ("#CC79A7", "/"),
    "nvfp4": ("#666666", "x"),
}
"""Format -> colour and bar pattern."""
CLEAR = "rgba(255,255,255,0)"

SQNR = Panel(
    title="Error of a small real layer",
    x="what is compared [-]",
    y="SQNR [dB]",
    category=tuple(METRIC_NAMES.values()),
)
SCALES = Panel(
    title="Scales of the tensor", x="exponent of the scale [log2]", y="blocks [1]", thousands=True
)
TRADE = Panel(title="Time against error", x="iteration time [ms]", y="SQNR [dB]", zero=False)
STORAGE = Panel(
    title="Storage against error",
    x="bits per value, scales included [bit]",
    y="SQNR [dB]",
    zero=False,
)
PANELS = (SQNR, SCALES, TRADE, STORAGE)


class PrecisionState(ShapeState):
    """`data` is the kind of activations; `metric` the error that stands against time."""

    formats: list[str] = DEFAULT_FORMATS
    data: Data = "gaussian"
    seed: int = 0
    metric: Metric = "mlp"


def format_precision(spec: FormatSpec) -> str:
    """The precision of a Case that computes in this format; "" if none does."""
    return {"bf16": "bf16", "e4m3": "mxfp8", "e5m2": "mxfp8"}.get(spec.element, "")


def format_floors(state: ShapeState, spec: FormatSpec, hardware: Hardware) -> dict[str, float]:
    """Compute, HBM and link floor in ms of the state's layer at balanced load in a format.

    The routed experts compute at the format's peak and their weights are stored in it; the shared
    expert and all gradients on the wire are BF16; inference dispatches in the format. At BF16 and
    MXFP8 E4M3 these are the floors of `roofline_table`. Raises InputError without such a peak.
    """
    training = state.mode == "training"
    passes, ways = (3, 2) if training else (1, 1)
    rows, S = state.T * state.K, state.sharedExperts
    per_value = spec.bits_per_value / 8
    routed = passes * float(expert_flop(rows, state.D, state.F))
    shared = passes * float(expert_flop(S * state.T, state.D, state.F))
    hbm = passes * hbm_bytes(
        R=rows,
        T=state.T,
        D=state.D,
        F=state.F,
        K=state.K,
        S=S,
        weight_bytes=per_value,
        experts=experts_read(rows, state.E // state.ep),
    )
    there = BF16_BYTES if training else per_value
    wire = ways * rows * (1 - 1 / state.ep) * state.D * (there + BF16_BYTES)
    peak = hardware.peak_tflops(PEAKS[spec.element])
    return {
        "compute": routed / (peak * 1e9) + shared / (hardware.peak_tflops("bf16") * 1e9),
        "HBM": float(hbm) / (hardware.hbm_tb_s * 1e9),
        "link": float(link_ms(np.array(wire), np.array(state.ep), hardware)),
    }


def precision_view(state: PrecisionState, tensor: Any, sources: Sources) -> View:
    """Rows, figure and sentence of a state; `tensor` is the user's, for data "tensor". Raises
    InputError, with the reason, where the state is impossible."""
    unknown = [name for name in state.formats if name not in FORMATS]
    if not state.formats:
        raise InputError("formats=[] must name at least one format")
    if unknown:
        raise InputError(f"formats={unknown[0]!r} must be one of {', '.join(FORMATS)}")
    if state.data == "tensor" and tensor is None:
        raise InputError("tensor= must name a .npy or .pt file for data=tensor")
    names = [name for name in FORMATS if name in state.formats]
    study = Study(
        kind=state.data, seed=state.seed, tensor=tensor if state.data == "tensor" else None
    )
    errors = sqnr_table(study, names)
    by_format = {
        name: dict(zip(part["metric"], part["sqnr_db"], strict=True))
        for name, part in errors.groupby("fmt", sort=False)
    }
    hardware = sources.hardware(state.hardware)
    times, notes = _times(state, names, hardware, sources)
    found = [r for r in sources.matching(state, layers=1) if r["factors"] == (1.0,)]
    traces = [
        *_sqnr(names, by_format),
        *_scales(study, names),
        *_trade(state, names, by_format, times, found),
        *_storage(state, names, by_format),
    ]
    exact = [FORMATS[n].label for n in names if any(map(math.isinf, by_format[n].values()))]
    if exact:
        notes.append(f"{', '.join(exact)} loses nothing somewhere: no bar there")
    title = f"Precision: {state.data.replace('_', ' ')} data, {state.mode}, EP {state.ep}"
    return View(
        rows=_table(names, errors, times),
        spec=fx.explorer_figure(title, PANELS, traces, barmode="group"),
        sentence=_sentence(state, names, by_format, times),
        notes=tuple(filter(None, (*notes, sources.own_note(found, state.hardware)))),
    )


Times = dict[str, dict[str, Any]]
"""Format -> `floor` in ms (NaN without a peak), `lacks`: why there is none, `binds`, `systems`:
system -> predicted row, and `refused`: the rows of those that do not run."""


def _times(
    state: PrecisionState, names: list[str], hardware: Hardware, sources: Sources
) -> tuple[Times, list[str]]:
    wanted = {format_precision(FORMATS[name]) for name in names}
    systems = [s for s in sources.systems if s[2] in wanted]
    state.case(systems[0] if systems else sources.systems[0])  # refuses an impossible shape
    rows = sources.predict([state.case(s) for s in systems], state.hardware) if systems else []
    times: Times = {}
    notes = []
    for name in names:
        spec = FORMATS[name]
        mine = {s: r for s, r in zip(systems, rows, strict=True) if s[2] == format_precision(spec)}
        own = {s: r for s, r in mine.items() if runs(r)}
        floors, missing = _floors(state, spec, hardware)
        notes += [f"{spec.label}: {missing}"] * bool(missing)
        if not mine and not math.isnan(floors["compute"]):
            notes.append(f"{spec.label}: no system was measured in it, only its floor is known")
        binds = max(floors, key=lambda floor: floors[floor])
        times[name] = {
            "floor": floors[binds],
            "binds": binds,
            "systems": own,
            "lacks": missing,
            "refused": {s: r for s, r in mine.items() if not runs(r)},
        }
    why = {str(row["extrapolation"]) for row in rows if runs(row)} - {""}
    refused = refused_note(dict(zip(systems, rows, strict=True)))
    return times, [f"extrapolated: {', '.join(sorted(why))}"] * bool(why) + notes + [refused]


def _floors(
    state: PrecisionState, spec: FormatSpec, hardware: Hardware
) -> tuple[dict[str, float], str]:
    """Floors of a format, or NaN and what the device lacks for them."""
    try:
        floors = format_floors(state, spec, hardware)
    except InputError:
        lacks = f"{hardware.name} has no {PEAKS[spec.element].upper()} peak"
        return {"compute": math.nan}, lacks
    if spec.element != "bf16" and not hardware.block_scaled:
        return {"compute": math.nan}, f"{hardware.name} has no block-scaled matrix units"
    return floors, ""


def _finite(values: Any) -> list[float | None]:
    return [float(v) if math.isfinite(v) else None for v in values]


def _sqnr(names: list[str], by_format: dict[str, dict[str, float]]) -> list[fx.Trace]:
    x = list(METRIC_NAMES.values())
    return [
        fx.bar(
            SQNR, FORMATS[name].label, x, _finite(by_format[name][m] for m in METRICS), *LOOKS[name]
        )
        | {"offsetgroup": name}
        for name in names
    ]


def _scales(study: Study, names: list[str]) -> list[fx.Trace]:
    counts = scale_histogram(study, names)
    traces = []
    for name in names:
        part = counts[counts["fmt"] == name]
        traces.append(
            fx.bar(
                SCALES,
                FORMATS[name].label,
                part["exponent"].to_numpy(np.int64),
                part["blocks"].to_numpy(np.int64),
                *LOOKS[name],
            )
            | {"offsetgroup": name}
        )
    labels = ", ".join(FORMATS[name].label for name in names)
    return [*traces, fx.said_in(SCALES, f"{labels} has no scales" if counts.empty else "")]


def _trade(
    state: PrecisionState,
    names: list[str],
    by_format: dict[str, dict[str, float]],
    times: Times,
    found: list[Row],
) -> list[fx.Trace]:
    """Every system of a format's precision at its predicted time, and the format's floor."""
    traces = []
    for name in names:
        error = by_format[name][state.metric]
        colour = LOOKS[name][0]
        y = _finite([error])
        floor = _finite([times[name]["floor"]])
        traces.append(
            fx.points(
                TRADE,
                "floor at the device's peaks",
                floor,
                y,
                colour,
                symbol="line-ns-open",
                size=12,
            )
        )
        for system, row in times[name]["systems"].items():
            trace = fx.points(
                TRADE,
                system_name(system),
                [row["iterationMS"]],
                y,
                colour,
                ids=[row["id"]],
                symbol=STYLES[system].symbol,
                size=8,
            )
            trace["error_x"] = {
                "type": "data",
                "symmetric": False,
                "thickness": 1,
                "width": 2,
                "array": [row["iterationHighMS"] - row["iterationMS"]],
                "arrayminus": [row["iterationMS"] - row["iterationLowMS"]],
            }
            traces.append(trace)
        for origin in OBSERVED:
            rows = [
                r
                for r in found
                if r["source"] == origin and r["precision"] == format_precision(FORMATS[name])
            ]
            measured = [r["iterationMS"] for r in rows]
            points = fx.points(
                TRADE, origin, measured, y * len(rows), CLEAR, origin, [r["id"] for r in rows]
            )
            traces.append(fx.with_spread(points, rows, "iterationMS", "x"))
    drawn = any(value is not None for trace in traces for value in trace["x"])
    lacks = dict.fromkeys(times[name]["lacks"] for name in names)
    told = "" if drawn else f"no time: {'<br>'.join(filter(None, lacks))}"
    height = [error for name in names if math.isfinite(error := by_format[name][state.metric])]
    return [*traces, fx.said_in(TRADE, told, y=sum(height) / max(len(height), 1))]


def _storage(
    state: PrecisionState, names: list[str], by_format: dict[str, dict[str, float]]
) -> list[fx.Trace]:
    return [
        fx.points(
            STORAGE,
            FORMATS[name].label,
            [FORMATS[name].bits_per_value],
            _finite([by_format[name][state.metric]]),
            LOOKS[name][0],
            size=9,
        )
        for name in names
    ]


def _table(names: list[str], errors: pd.DataFrame, times: Times) -> list[Row]:
    """One row per format, and one more for each system that computes in it."""
    rows = []
    wide = errors.pivot(index="fmt", columns="metric", values="sqnr_db")
    for name in names:
        spec, t = FORMATS[name], times[name]
        error = {f"{m}SqnrDB": float(wide.loc[name, m]) for m in METRICS}
        base = {
            "format": spec.label,
            "bitsPerValue": spec.bits_per_value,
            **error,
            "floorMS": t["floor"],
            "floorBinds": t["binds"],
        }
        if not t["systems"] and not t["refused"]:
            rows.append(base)
        for system, row in t["refused"].items():
            told = {"system": system_name(system), "origin": PREDICTED, "runs": row["runs"]}
            rows.append(base | told)
        for system, row in t["systems"].items():
            rows.append(
                base
                | {
                    "system": system_name(system),
                    "origin": PREDICTED,
                    "iterationMS": row["iterationMS"],
                    "iterationLowMS": row["iterationLowMS"],
                    "iterationHighMS": row["iterationHighMS"],
                    "runs": row["runs"],
                }
            )
    return rows


def _sentence(
    state: PrecisionState, names: list[str], by_format: dict[str, dict[str, float]], times: Times
) -> str:
    told = []
    for name in names:
        system, row = _fastest(times[name]["systems"])
        error = by_format[name][state.metric]
        refused = sorted({refusal(r) for r in times[name]["refused"].values()})
        if system:
            time = f"{milliseconds(row['iterationMS'])} ({system_name(system)})"
        elif refused:
            time = f"no time, cannot run ({', '.join(refused)})"
        elif math.isfinite(times[name]["floor"]):
            time = f"no less than {milliseconds(times[name]['floor'])}"
        else:
            time = "no time known"
        level = "nothing lost" if math.isinf(error) else f"<b>{error:.1f} dB</b>"
        told.append(f"{FORMATS[name].label}: {level}, {time}")
    what = METRIC_NAMES[state.metric]
    return f"SQNR of {what} and fastest predicted time: " + "; ".join(told) + "."


def _fastest(systems: dict[System, Row]) -> tuple[System | None, Row]:
    if not systems:
        return None, {}
    system = min(systems, key=lambda s: systems[s]["iterationMS"])
    return system, systems[system]
