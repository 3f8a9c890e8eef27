"""What the width explorer shows: a pure function of state and sources.

Balanced load; the width F of an expert is varied. Beside the model's prediction stands arithmetic
of tiles and waves, which the model does not use.

Legend: T tokens per GPU, D hidden width, F expert width, E_local local experts, K experts per
token, R routed rows of a rank.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from workbench.case import Case, case_table
from workbench.errors import InputError
from workbench.explore.imbalance_view import GIB, origin_points, refused_systems
from workbench.explore.sources import (
    Row,
    Sources,
    System,
    View,
    WorkloadState,
    category_of,
    extrapolated,
    milliseconds,
    no_time,
    refused_note,
    runs,
    system_of,
)
from workbench.hardware import PEAK_FIELD, Hardware
from workbench.model.cost import BF16_BYTES, MXFP8_BYTES, cost_table
from workbench.model.prediction import FLOOR_COLUMNS
from workbench.model.roofline import attainable_tflops
from workbench.moe import plan_arithmetic as pa
from workbench.report import figures_explore as fx
from workbench.report.figures_explore import OBSERVED, PREDICTED, Panel
from workbench.report.theme import INK, STYLES, system_name

Floats = npt.NDArray[np.float64]
ROOF = Panel(title="Roofline", x="useful FLOP per modelled HBM byte [FLOP/B]",
             y="useful rate [TFLOP/s per GPU]", log_x=True, log_y=True)  # fmt: skip
RATE = Panel(title="Useful rate over F", x="expert width F [1]", y="useful rate [TFLOP/s per GPU]")
TILES = Panel(title="Tiles and waves over F", x="expert width F [1]", y="share of useful work [%]")
WEIGHTS = Panel(
    title="Weight memory over F", x="expert width F [1]", y="weights of one layer [GiB]"
)
FLOORS = Panel(title="Floors of the busiest rank over F", x="expert width F [1]", y="time [ms]")
SYSTEMS = Panel(title="dist_moe against mok", x="system [-]", y="iteration time [ms]")
PANELS = (ROOF, RATE, TILES, WEIGHTS, FLOORS, SYSTEMS)
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


def tile_rows(backend: str) -> int:
    """Rows of a tile: what the backend pads each expert's rows to."""
    return pa.MOK_EXPERT_ROWS if backend == "mok" else pa.DIST_MOE_EXPERT_ROWS


def quantisation(state: WidthState, F: npt.ArrayLike, sm_count: int | None) -> Quantisation:
    """Tile and wave quantisation of the two forward products at balanced load, one tile per SM.

    W13 has 2F output columns and contracts D, W2 has D and contracts F, so both weigh as their
    FLOP do. Rows are spread evenly over the local experts, each in whole tiles of its own.
    """
    F = np.asarray(F, np.int64)
    E_local, rows = state.E // state.ep, state.T * state.K
    height = tile_rows(state.backend)
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


def curve_systems(state: WidthState, sources: Sources) -> list[System]:
    """The state's system first, then the other backends' systems of its precision."""
    others = [s for s in sources.systems if s[2] == state.precision and s[0] != state.backend]
    return [state.system, *others]


def width_view(state: WidthState, sources: Sources) -> View:
    """Rows, figure and sentence of a state. Raises InputError, with the reason, where the state is
    impossible."""
    if state.system not in sources.systems:
        raise InputError(f"system={system_name(state.system)} has no record in the calibration")
    hardware = sources.hardware(state.hardware)
    systems, curves, F = sources.systems, curve_systems(state, sources), widths(state)
    now = [state.case(system) for system in systems]
    sweep = [state.case(system, F=int(f)) for system in curves for f in F]
    rows = sources.predict([*now, *sweep], state.hardware)
    current = dict(zip(systems, rows, strict=False))
    swept = {
        system: rows[len(systems) + n * len(F) : len(systems) + (n + 1) * len(F)]
        for n, system in enumerate(curves)
    }
    found = [r for r in sources.matching(state, F=..., layers=1) if r["factors"] == (1.0,)]
    here = [r for r in found if r["F"] == state.F]
    possible = [runs(row) for row in swept[state.system]]
    moved = changes(F[possible], [str(r["busiestBinds"]) for r in swept[state.system] if runs(r)])
    parts = quantisation(state, F, hardware.sm_count)
    traces = [
        *_roof(state, hardware, now[systems.index(state.system)], current[state.system], found),
        *_systems(current, here),
        *_rate(state, F, curves, swept, current, found),
        *_tiles(state, F, parts),
        *_weights(state, F, hardware),
        *_floors(state, F, swept[state.system], current[state.system], moved),
    ]
    categories = tuple(category_of(s) for s in STYLES if s in current or any(
        system_of(row) == s for row in here))  # fmt: skip
    panels = [replace(p, category=categories) if p is SYSTEMS else p for p in PANELS]
    title = f"Width: {system_name(state.system)}, {state.mode}, EP {state.ep}"
    row = current[state.system]
    return View(
        rows=_table(state, current, found),
        spec=fx.explorer_figure(title, panels, traces),
        sentence=_sentence(state, hardware, row, moved),
        notes=tuple(
            filter(
                None,
                (
                    extrapolated(row),
                    refused_note({s: r for s, r in current.items() if s != state.system}),
                    sources.own_note(found, state.hardware),
                ),
            )
        ),
    )


def _roof(state: WidthState, hardware: Hardware, case: Case, row: Row,
          found: list[Row]) -> list[fx.Trace]:  # fmt: skip
    peak = hardware.peak_tflops(state.precision)
    mine = [r for r in found if r["precision"] == state.precision]
    intensity = intensities([case])
    measured = intensities([_case(state, r) for r in mine]) if mine else np.zeros(0)
    ridge = peak / hardware.hbm_tb_s
    reach = [ridge, *intensity, *measured]
    x = np.unique([min(reach) / 2, ridge, max(reach) * 2])
    roof = attainable_tflops(x, peak_tflops=peak, hardware=hardware)
    name = "FP8 roof (for MXFP8)" if PEAK_FIELD[state.precision] == "fp8_tflops" else "BF16 roof"
    told, top = "", np.nanmax([1.0, *(r["usefulTFPerGPU"] for r in mine)])
    if state.precision != "bf16" and not hardware.block_scaled:
        x = roof = np.zeros(0)  # its units would never reach this peak
        told = f"no MXFP8 roof: {hardware.name} has no block-scaled matrix units"
    traces = [fx.rule(ROOF, name, x, roof, "solid", width=1.5),
              fx.said_in(ROOF, told, ridge, 1.5 * top)]  # fmt: skip
    for origin in OBSERVED:
        part = np.array([r["source"] == origin for r in mine], bool)
        rows = [r for r in mine if r["source"] == origin]
        points = fx.points(ROOF, origin, measured[part], [r["usefulTFPerGPU"] for r in rows],
                           "white", origin, [r["id"] for r in rows])  # fmt: skip
        traces.append(fx.with_spread(points, rows, "usefulTFPerGPU"))
    traces.append(fx.points(ROOF, "this case", intensity, [row["usefulTFPerGPU"]], INK,
                            symbol="x-thin-open", size=11))  # fmt: skip
    return traces


def intensities(cases: list[Case]) -> Floats:
    """Useful FLOP per modelled HBM byte, [N]."""
    cost = cost_table(case_table(cases))
    return (cost["usefulFLOP"] / cost["modeledHBMBytes"]).to_numpy()


def _case(state: WidthState, row: Row) -> Case:
    return state.case(system_of(row), F=row["F"])


def _systems(current: dict[System, Row], here: list[Row]) -> list[fx.Trace]:
    x = [category_of(system) for system in current]
    y = [row["iterationMS"] for row in current.values()]
    bars = fx.bar(SYSTEMS, PREDICTED, x, y, [STYLES[s].colour for s in current],
                  low=[row["iterationLowMS"] for row in current.values()],
                  high=[row["iterationHighMS"] for row in current.values()],
                  text=[f"{value:.3g}" if value == value else "" for value in y])  # fmt: skip
    return [bars | {"showlegend": False}, refused_systems(SYSTEMS, current),
            *origin_points(SYSTEMS, "iterationMS", here)]  # fmt: skip


def _rate(state: WidthState, F: Any, curves: list[System], swept: dict[System, list[Row]],
          current: dict[System, Row], found: list[Row]) -> list[fx.Trace]:  # fmt: skip
    traces = []
    for n, system in enumerate(curves):
        rows = swept[system]
        rate = np.array([r["usefulTFPerGPU"] for r in rows])
        if n == 0:
            time, low, high = (np.array([r[name] for r in rows]) for name in (
                "iterationMS", "iterationLowMS", "iterationHighMS"))  # fmt: skip
            traces.append(fx.band(RATE, "90 % interval", F, rate * time / high, rate * time / low,
                                  STYLES[system].colour))  # fmt: skip
        traces.append(fx.line(RATE, system_name(system), F, rate, STYLES[system],
                              2.2 if n == 0 else 1.3))  # fmt: skip
        for origin in OBSERVED:
            own = [r for r in found if r["source"] == origin and system_of(r) == system]
            own = [r for r in own if r["usefulTFPerGPU"] == r["usefulTFPerGPU"]]
            points = fx.points(RATE, origin, [r["F"] for r in own],
                               [r["usefulTFPerGPU"] for r in own], STYLES[system].colour,
                               origin, [r["id"] for r in own])  # fmt: skip
            traces.append(fx.with_spread(points, own, "usefulTFPerGPU"))
    nowhere = not any(runs(row) for rows in swept.values() for row in rows)
    traces.append(fx.said_in(RATE, "no system runs at any width" if nowhere else "", F.mean()))
    traces.append(fx.points(RATE, "this case", [state.F], [current[state.system]["usefulTFPerGPU"]],
                            INK, symbol="x-thin-open", size=11))  # fmt: skip
    return traces


def _tiles(state: WidthState, F: Any, parts: Quantisation) -> list[fx.Trace]:
    tile, wave = 100 * parts.tile, parts.wave
    known = wave is not None
    both = tile * wave if wave is not None else np.zeros(0)
    return [
        fx.rule(TILES, "whole tiles", F, tile, "dash", "#0072B2"),
        fx.rule(TILES, "whole waves", F if known else [], 100 * wave if wave is not None else [],
                "dot", "#D55E00"),
        fx.rule(TILES, "tiles and waves", F if known else [], both, "solid"),
        fx.said_in(TILES, "" if known else f"no SM count known for {state.hardware}"),
    ]  # fmt: skip


def _weights(state: WidthState, F: Any, hardware: Hardware) -> list[fx.Trace]:
    bf16, mxfp8 = (weight_gib(state, F, p) for p in ("bf16", "mxfp8"))
    limit = hardware.hbm_gb * 1e9 / GIB
    beyond = max(bf16) > 0.5 * limit
    return [
        fx.rule(WEIGHTS, "BF16 weights", F, bf16, "solid", "#0072B2"),
        fx.rule(WEIGHTS, "MXFP8 weights", F, mxfp8, "dash", "#009E73"),
        fx.rule(WEIGHTS, "memory of the device", [F[0], F[-1]] if beyond else [],
                [limit] * 2 if beyond else [], "solid", "#D55E00"),
        fx.points(WEIGHTS, "this case", [state.F], weight_gib(state, [state.F], state.precision),
                  INK, symbol="x-thin-open", size=11),
    ]  # fmt: skip


def _floors(state: WidthState, F: Any, rows: list[Row], row: Row,
            moved: list[tuple[float, str, str]]) -> list[fx.Trace]:  # fmt: skip
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
    traces.append(fx.line(FLOORS, system_name(state.system), F, [r["iterationMS"] for r in rows],
                          STYLES[state.system], 2.2))  # fmt: skip
    told = "" if possible.any() else f"{system_name(state.system)} cannot run"
    traces.append(fx.said_in(FLOORS, told, F.mean()))
    top = max((r["iterationMS"] for r in rows if runs(r)), default=0.0)
    x = [value for f, _, _ in moved for value in (f, f, None)]
    y = [value for _ in moved for value in (0.0, top, None)]
    traces.append(fx.rule(FLOORS, "binding floor changes", x, y, "dash", "#777777"))
    traces.append(fx.points(FLOORS, "this case", [state.F], [row["iterationMS"]], INK,
                            symbol="x-thin-open", size=11))  # fmt: skip
    return traces


def _table(state: WidthState, current: dict[System, Row], found: list[Row]) -> list[Row]:
    """One row per system and origin."""
    rows = []
    for system, row in current.items():
        rows.append({
            "system": system_name(system), "origin": PREDICTED, "F": state.F, "id": row["id"],
            "iterationMS": row["iterationMS"], "iterationLowMS": row["iterationLowMS"],
            "iterationHighMS": row["iterationHighMS"], "usefulTFPerGPU": row["usefulTFPerGPU"],
            "busiestBinds": str(row["busiestBinds"]) if runs(row) else "", "runs": row["runs"],
            "weightsGiB": float(weight_gib(state, state.F, system[2])),
            "extrapolation": str(row["extrapolation"]),
        })  # fmt: skip
    for row in found:
        rows.append({
            "system": system_name(system_of(row)), "origin": row["source"], "F": row["F"],
            "id": row["id"], "iterationMS": row["iterationMS"], **fx.spread_columns(row),
            "usefulTFPerGPU": row["usefulTFPerGPU"],
        })  # fmt: skip
    return rows


def _sentence(state: WidthState, hardware: Hardware, row: Row,
              moved: list[tuple[float, str, str]]) -> str:  # fmt: skip
    if not runs(row):
        return no_time(state.system, row)
    binds = str(row["busiestBinds"])
    peak = hardware.peak_tflops(state.precision)
    parts = quantisation(state, [state.F], hardware.sm_count)
    told = [
        f"<b>{row['usefulTFPerGPU']:,.0f} TFLOP/s</b> useful, "
        f"{100 * row['usefulTFPerGPU'] / peak:.0f} % of the peak, in "
        f"{milliseconds(row['iterationMS'])} (90 %: {milliseconds(row['iterationLowMS'])} to "
        f"{milliseconds(row['iterationHighMS'])})",
        f"<b>{binds}</b> binds: its floor is {milliseconds(row[FLOOR_COLUMNS[binds]])}",
    ]
    if moved:
        told += [f"at F of about {f:,.0f} the binding floor changes from {old} to {new}"
                 for f, old, new in moved]  # fmt: skip
    else:
        told.append("no other floor binds at any width shown")
    filled = f"tiles are {100 * parts.tile[0]:.0f} % useful"
    if parts.wave is not None:
        filled += f", waves of {hardware.sm_count} SMs {100 * parts.wave[0]:.0f} % full"
    return "; ".join([*told, filled]) + "."
