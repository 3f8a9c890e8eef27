"""The panels of the width explorer: their numbers and traces."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from workbench.case import Case, case_table
from workbench.explore.sources import Row, System, WorkloadState, runs, system_of
from workbench.explore.system_panels import GIB, SYSTEMS_PANEL
from workbench.hardware import PEAK_FIELD, Hardware
from workbench.model.cost import cost_table
from workbench.model.prediction import FLOOR_COLUMNS
from workbench.model.roofline import attainable_tflops
from workbench.report import figures_explore as fx
from workbench.report.figures_explore import OBSERVED, Panel
from workbench.report.theme import INK, STYLES, system_name
from workbench.systems import BF16_BYTES, MXFP8_BYTES, SYSTEMS

Floats = npt.NDArray[np.float64]
ROOF = Panel(
    title="Roofline",
    x="useful FLOP per modelled HBM byte [FLOP/B]",
    y="useful rate [TFLOP/s per GPU]",
    log_x=True,
    log_y=True,
)
RATE = Panel(title="Useful rate over F", x="expert width F [1]", y="useful rate [TFLOP/s per GPU]")
TILES = Panel(title="Tiles and waves over F", x="expert width F [1]", y="share of useful work [%]")
WEIGHTS = Panel(
    title="Weight memory over F", x="expert width F [1]", y="weights of one layer [GiB]"
)
FLOORS = Panel(title="Floors of the busiest rank over F", x="expert width F [1]", y="time [ms]")
PANELS = (ROOF, RATE, TILES, WEIGHTS, FLOORS, SYSTEMS_PANEL)
NARROW, STEP, COUNT = 256, 256, 33
"""The curves over F are computed at `COUNT` multiples of a step, from `NARROW` on."""
FLOOR_COLOURS = {"compute": INK, "HBM": "#0072B2", "link": "#D55E00", "fixed": "#999999"}


class WidthState(WorkloadState):
    """`tile` is the number of output columns of one tile of the grouped product."""

    ep: int = 64
    tile: Literal[64, 128, 256] = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class Quantisation:
    """Shares of a grouped product's work that are useful, of the whole of W13 and W2, over F.

    tile      useful elements over those of whole tiles
    wave      tiles over those of whole waves; None where the device's SM count has no source
    """

    tile: Floats
    wave: Floats | None


def widths(state: WidthState) -> npt.NDArray[np.int64]:
    """Values of F for the curves: multiples of 64 from 256 to 8192 or beyond the state's F."""
    top = max(8192, int(np.ceil(1.25 * state.F / STEP)) * STEP)
    return np.unique(np.round(np.linspace(NARROW, top, COUNT) / 64).astype(np.int64) * 64)


def quantisation(state: WidthState, F: npt.ArrayLike, sm_count: int | None) -> Quantisation:
    """Tile and wave quantisation of the two forward products at balanced load, one tile per SM.

    W13 has 2F output columns and contracts D, W2 has D and contracts F, so both weigh as their
    FLOP do. Rows are spread evenly over the local experts, each in whole tiles of its own.
    """
    F = np.asarray(F, np.int64)
    E_local, rows = state.E // state.ep, state.T * state.K
    height = SYSTEMS[state.pipeline].tile_rows
    each, extra = divmod(rows, E_local)
    row_tiles = extra * -(-(each + 1) // height) + (E_local - extra) * -(-each // height)
    useful, tiled, waved = np.zeros(F.shape), np.zeros(F.shape), np.zeros(F.shape)
    for columns, depth in ((2 * F, state.D), (np.full_like(F, state.D), F)):
        tiles = row_tiles * -(-columns // state.tile)
        whole = height * state.tile * np.asarray(depth, np.float64)
        useful += rows * columns * np.asarray(depth, np.float64)
        tiled += tiles * whole
        waved += (-(-tiles // sm_count) * sm_count if sm_count else tiles) * whole
    return Quantisation(tile=useful / tiled, wave=tiled / waved if sm_count else None)


def weight_gib(state: WidthState, F: npt.ArrayLike, precision: str) -> Floats:
    """Memory of one layer's weights on a rank: routed in `precision`, shared in BF16; GiB."""
    per_value = MXFP8_BYTES if precision == "mxfp8" else BF16_BYTES
    values = 3.0 * state.D * np.asarray(F, np.float64)
    routed = state.E // state.ep * values * per_value
    return (routed + state.sharedExperts * values * BF16_BYTES) / GIB


def changes(F: npt.ArrayLike, binds: list[str]) -> list[tuple[float, str, str]]:
    """(F, floor that binds below, above) where neighbouring widths differ; F is between them."""
    F = np.asarray(F, np.float64)
    return [
        (float(F[n] + F[n + 1]) / 2, binds[n], binds[n + 1])
        for n in range(len(binds) - 1)
        if binds[n] != binds[n + 1]
    ]


def roof_traces(
    state: WidthState, hardware: Hardware, case: Case, row: Row, found: list[Row]
) -> list[fx.Trace]:
    peak = hardware.peak_tflops(state.precision)
    mine = [r for r in found if r["precision"] == state.precision]
    intensity = intensities([case])
    measured = intensities([case_of(state, r) for r in mine]) if mine else np.zeros(0)
    ridge = peak / hardware.hbm_tb_s
    reach = [ridge, *intensity, *measured]
    x = np.unique([min(reach) / 2, ridge, max(reach) * 2])
    roof = attainable_tflops(x, peak_tflops=peak, hardware=hardware)
    name = "FP8 roof (for MXFP8)" if PEAK_FIELD[state.precision] == "fp8_tflops" else "BF16 roof"
    told, top = "", np.nanmax([1.0, *(r["usefulTFPerGPU"] for r in mine)])
    if state.precision != "bf16" and not hardware.block_scaled:
        x = roof = np.zeros(0)  # its units would never reach this peak
        told = f"no MXFP8 roof: {hardware.name} has no block-scaled matrix units"
    traces = [
        fx.rule(ROOF, name, x, roof, "solid", width=1.5),
        fx.said_in(ROOF, told, ridge, 1.5 * top),
    ]
    for origin in OBSERVED:
        part = np.array([r["source"] == origin for r in mine], bool)
        rows = [r for r in mine if r["source"] == origin]
        points = fx.points(
            ROOF,
            origin,
            measured[part],
            [r["usefulTFPerGPU"] for r in rows],
            "white",
            origin,
            [r["id"] for r in rows],
        )
        traces.append(fx.with_spread(points, rows, "usefulTFPerGPU"))
    traces.append(
        fx.points(
            ROOF,
            "this case",
            intensity,
            [row["usefulTFPerGPU"]],
            INK,
            symbol="x-thin-open",
            size=11,
        )
    )
    return traces


def intensities(cases: list[Case]) -> Floats:
    """Useful FLOP per modelled HBM byte, [N]."""
    cost = cost_table(case_table(cases))
    return (cost["usefulFLOP"] / cost["modeledHBMBytes"]).to_numpy()


def case_of(state: WidthState, row: Row) -> Case:
    return state.case(system_of(row), F=row["F"])


def rate_traces(
    state: WidthState,
    F: Any,
    curves: list[System],
    swept: dict[System, list[Row]],
    current: dict[System, Row],
    found: list[Row],
) -> list[fx.Trace]:
    traces = []
    for n, system in enumerate(curves):
        rows = swept[system]
        rate = np.array([r["usefulTFPerGPU"] for r in rows])
        if n == 0:
            time, low, high = (
                np.array([r[name] for r in rows])
                for name in ("iterationMS", "iterationLowMS", "iterationHighMS")
            )
            traces.append(
                fx.band(
                    RATE,
                    "90 % interval",
                    F,
                    rate * time / high,
                    rate * time / low,
                    STYLES[system].colour,
                )
            )
        traces.append(
            fx.line(RATE, system_name(system), F, rate, STYLES[system], 2.2 if n == 0 else 1.3)
        )
        for origin in OBSERVED:
            own = [r for r in found if r["source"] == origin and system_of(r) == system]
            own = [r for r in own if r["usefulTFPerGPU"] == r["usefulTFPerGPU"]]
            points = fx.points(
                RATE,
                origin,
                [r["F"] for r in own],
                [r["usefulTFPerGPU"] for r in own],
                STYLES[system].colour,
                origin,
                [r["id"] for r in own],
            )
            traces.append(fx.with_spread(points, own, "usefulTFPerGPU"))
    nowhere = not any(runs(row) for rows in swept.values() for row in rows)
    traces.append(fx.said_in(RATE, "no system runs at any width" if nowhere else "", F.mean()))
    traces.append(
        fx.points(
            RATE,
            "this case",
            [state.F],
            [current[state.system]["usefulTFPerGPU"]],
            INK,
            symbol="x-thin-open",
            size=11,
        )
    )
    return traces


def tiles_traces(state: WidthState, F: Any, parts: Quantisation) -> list[fx.Trace]:
    tile, wave = 100 * parts.tile, parts.wave
    known = wave is not None
    both = tile * wave if wave is not None else np.zeros(0)
    return [
        fx.rule(TILES, "whole tiles", F, tile, "dash", "#0072B2"),
        fx.rule(
            TILES,
            "whole waves",
            F if known else [],
            100 * wave if wave is not None else [],
            "dot",
            "#D55E00",
        ),
        fx.rule(TILES, "tiles and waves", F if known else [], both, "solid"),
        fx.said_in(TILES, "" if known else f"no SM count known for {state.hardware}"),
    ]


def weights_traces(state: WidthState, F: Any, hardware: Hardware) -> list[fx.Trace]:
    bf16, mxfp8 = (weight_gib(state, F, p) for p in ("bf16", "mxfp8"))
    limit = hardware.hbm_gb * 1e9 / GIB
    beyond = max(bf16) > 0.5 * limit
    return [
        fx.rule(WEIGHTS, "BF16 weights", F, bf16, "solid", "#0072B2"),
        fx.rule(WEIGHTS, "MXFP8 weights", F, mxfp8, "dash", "#009E73"),
        fx.rule(
            WEIGHTS,
            "memory of the device",
            [F[0], F[-1]] if beyond else [],
            [limit] * 2 if beyond else [],
            "solid",
            "#D55E00",
        ),
        fx.points(
            WEIGHTS,
            "this case",
            [state.F],
            weight_gib(state, [state.F], state.precision),
            INK,
            symbol="x-thin-open",
            size=11,
        ),
    ]


def floors_traces(
    state: WidthState, F: Any, rows: list[Row], row: Row, moved: list[tuple[float, str, str]]
) -> list[fx.Trace]:
    possible = np.array([runs(r) for r in rows])
    traces = [
        fx.rule(
            FLOORS,
            f"{name} floor",
            F[possible],
            np.array([r[field] for r in rows if runs(r)], np.float64),
            "solid",
            FLOOR_COLOURS[name],
        )
        for name, field in FLOOR_COLUMNS.items()
    ]
    traces.append(
        fx.line(
            FLOORS,
            system_name(state.system),
            F,
            [r["iterationMS"] for r in rows],
            STYLES[state.system],
            2.2,
        )
    )
    told = "" if possible.any() else f"{system_name(state.system)} cannot run"
    traces.append(fx.said_in(FLOORS, told, F.mean()))
    top = max((r["iterationMS"] for r in rows if runs(r)), default=0.0)
    x = [value for f, _, _ in moved for value in (f, f, None)]
    y = [value for _ in moved for value in (0.0, top, None)]
    traces.append(fx.rule(FLOORS, "binding floor changes", x, y, "dash", "#777777"))
    traces.append(
        fx.points(
            FLOORS, "this case", [state.F], [row["iterationMS"]], INK, symbol="x-thin-open", size=11
        )
    )
    return traces
