"""The panels of the imbalance explorer and their traces."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.case import Case
from workbench.explore.loads import SWEEP, ImbalanceState, Ints, Loads
from workbench.explore.sources import Row, Sources, System, category_of, refusal, runs, system_of
from workbench.explore.system_panels import (
    AGAIN,
    BACKENDS,
    GIB,
    SYSTEMS_PANEL,
    origin_points,
    reserving_system,
    time_bars,
)
from workbench.model.prediction import FLOOR_COLUMNS
from workbench.planning import arithmetic as pa
from workbench.report import figures_explore as fx
from workbench.report.figures_explore import OBSERVED, PREDICTED, Panel
from workbench.report.theme import INK, STYLES, Style, system_name
from workbench.systems import SYSTEMS

Floats = npt.NDArray[np.float64]
REPLACED = "experts re-placed"

RANKS = Panel(title="Load per rank", x="rank [index]", y="routed rows [1]", thousands=True)
LAYERS = Panel(
    title="Busiest rank by layer", x="layer [index]", y="scheduled rows [1]", thousands=True
)
TIME = Panel(
    title="Predicted time over imbalance",
    x="largest factor of any layer [1]",
    y="iteration time [ms]",
)
FLOORS = Panel(
    title="Floors of the busiest rank",
    x="floor [-]",
    y="time at the peaks [ms]",
    category=(*FLOOR_COLUMNS, "predicted"),
)
MEMORY = Panel(title="Peak memory", x="system [-]", y="peak allocated [GiB]")
PANELS = (RANKS, LAYERS, TIME, SYSTEMS_PANEL, FLOORS, MEMORY)


def measured(state: ImbalanceState, sources: Sources, case: Case) -> list[Row]:
    """Published and own cases to lay over the prediction: the same layers, any factor if single."""
    fields: dict[str, Any] = {"layers": case.layers}
    if case.layers > 1:
        fields["factors"] = case.factors
    return sources.matching(state, **fields)


def same_load(row: Row, case: Case) -> bool:
    return bool(np.allclose(row["factors"], case.factors, rtol=1e-9, atol=0))


def ranks_traces(state: ImbalanceState, loads: Loads, current: dict[System, Row]) -> list[fx.Trace]:
    at = (
        state.layer - 1
        if 1 <= state.layer <= len(loads.counts)
        else int(loads.counts.max(axis=1).argmax())
    )
    ranks = np.arange(state.ep)
    ends = np.array([-0.5, state.ep - 0.5])
    style = STYLES[state.system]
    traces = [
        fx.bar(
            RANKS,
            f"rows of layer {at + 1}" if len(loads.counts) > 1 else "rows of a rank",
            ranks,
            loads.counts[at],
            style.colour,
        ),
        fx.rule(
            RANKS,
            REPLACED,
            *_where(loads, ranks, lambda placed: placed[at]),
            "solid",
            width=1,
            shape="hvh",
        ),
        fx.rule(RANKS, "mean", ends, [loads.mean] * 2, "dot", "#777777"),
    ]
    for name, rows, dash, colour in capacity_lines(state, len(loads.counts), current):
        traces.append(
            fx.rule(
                RANKS,
                name,
                ends if rows is not None else [],
                [rows] * 2 if rows is not None else [],
                dash,
                colour,
            )
        )
    return traces


def _where(loads: Loads, x: Any, y: Callable[[Ints], Any]) -> tuple[Any, Any]:
    """x and y of what is known of re-placed experts only."""
    return ([], []) if loads.placed is None else (x, y(loads.placed))


def capacity_lines(
    state: ImbalanceState, layers: int, current: dict[System, Row]
) -> list[tuple[str, float | None, str, str]]:
    """(name, rows, dash, colour) of the bounds of both kinds, in the state's precision; None
    where one does not exist. The slot is drawn at the rows that fill it if every layer had them."""
    dist, mok = (reserving_system(kind, state, current) for kind in ("slot", "rows"))
    slots, rows = (
        found[0] if found else BACKENDS[kind] for kind, found in (("slot", dist), ("rows", mok))
    )
    training = state.mode == "training"
    slot = scratch = retained = None
    if dist is not None:
        scratch = float(current[dist]["scratchRows"])
        mxfp8 = state.precision == "mxfp8"
        step = 1 << 20
        nothing = int(pa.saved_bytes(state.T, state.D, state.F, state.K, 0, mxfp8))
        each = (
            int(pa.saved_bytes(state.T, state.D, state.F, state.K, step, mxfp8)) - nothing
        ) / step
        slot = (
            max(0.0, (current[dist]["slotBytes"] / layers - nothing) / each) if training else None
        )
    if mok is not None and training:
        retained = float(current[mok]["retainedRowsPerLayer"])
    return [
        (f"{slots} scratch (hard)", scratch, "solid", "#0072B2"),
        (f"{slots} slot (soft)", slot, "dash", "#0072B2"),
        (f"{rows} retained", retained, "dash", "#D55E00"),
    ]


def layers_traces(state: ImbalanceState, row: Row, loads: Loads) -> list[fx.Trace]:
    """Rows that rank 0 schedules in each layer: done once, and what backward does again."""
    padded, again = row["paddedRows"], row["againRows"]
    x = np.array([str(n + 1) for n in range(len(padded))])
    word = AGAIN["slot" if SYSTEMS[state.pipeline].keeps == "slot" else "rows"]
    shown = again > 0
    return [
        fx.bar(LAYERS, "done once", x, padded - again, STYLES[state.system].colour),
        fx.bar(LAYERS, word, x[shown], again[shown], "#F0E442", "/"),
        fx.points(
            LAYERS,
            REPLACED,
            *_where(loads, x, lambda placed: placed.max(axis=1)),
            INK,
            symbol="line-ew-open",
        ),
    ]


def time_traces(
    state: ImbalanceState,
    loads: Loads,
    curves: list[System],
    peaks: Floats,
    swept: list[Row],
    current: dict[System, Row],
    better: dict[System, Row],
    found: list[Row],
) -> list[fx.Trace]:
    traces = []
    for n, system in enumerate(curves):
        part = swept[n * SWEEP : (n + 1) * SWEEP]
        if n == 0:
            traces.append(
                fx.band(
                    TIME,
                    "90 % interval",
                    peaks,
                    [r["iterationLowMS"] for r in part],
                    [r["iterationHighMS"] for r in part],
                    STYLES[system].colour,
                )
            )
        traces.append(
            fx.line(
                TIME,
                system_name(system),
                peaks,
                [r["iterationMS"] for r in part],
                STYLES[system],
                2.2 if n == 0 else 1.3,
            )
        )
    for origin in OBSERVED:
        for system in curves:
            rows = [r for r in found if r["source"] == origin and system_of(r) == system]
            points = fx.points(
                TIME,
                origin,
                [max(r["factors"]) for r in rows],
                [r["iterationMS"] for r in rows],
                STYLES[system].colour,
                origin,
                [r["id"] for r in rows],
            )
            traces.append(fx.with_spread(points, rows, "iterationMS"))
    here = current[state.system]
    nowhere = not any(runs(row) for row in swept)
    traces.append(fx.said_in(TIME, "no system runs at any load" if nowhere else "", peaks.mean()))
    traces.append(
        fx.points(
            TIME,
            "this load",
            [max(loads.factors)],
            [here["iterationMS"]],
            INK,
            symbol="x-thin-open",
            size=11,
        )
    )
    x = [] if loads.placed is None else [max(loads.largest(loads.placed))]
    y = [better[state.system]["iterationMS"]] if better else []
    traces.append(fx.points(TIME, REPLACED, x, y, INK, symbol="line-ew-open"))
    return traces


def systems_traces(
    current: dict[System, Row], better: dict[System, Row], found: list[Row]
) -> list[fx.Trace]:
    replaced = fx.points(
        SYSTEMS_PANEL,
        REPLACED,
        [category_of(system) for system in current] if better else [],
        [row["iterationMS"] for row in better.values()],
        INK,
        symbol="line-ew-open",
    )
    return [*time_bars(current), replaced, *origin_points(SYSTEMS_PANEL, "iterationMS", found)]


def floors_traces(row: Row, style: Style) -> list[fx.Trace]:
    names = list(FLOORS.category) if runs(row) else []
    floors = [row[field] for field in FLOOR_COLUMNS.values()]
    values = [*floors, row["iterationMS"]] if names else []
    binds = str(row["busiestBinds"])
    colours = [INK if name == binds else "#bbbbbb" for name in FLOOR_COLUMNS] + [style.colour]
    bars = fx.bar(
        FLOORS,
        "floor",
        names,
        values,
        colours,
        low=[*floors, row["iterationLowMS"]][: len(names)],
        high=[*floors, row["iterationHighMS"]][: len(names)],
    )
    told = [] if names else [f"does not run: {refusal(row)}"]
    return [bars | {"showlegend": False}, fx.refused(FLOORS, ["HBM"][: len(told)], told)]


def memory_traces(
    state: ImbalanceState, current: dict[System, Row], found: list[Row], sources: Sources
) -> list[fx.Trace]:
    x = [category_of(system) for system in current]
    y = [row["peakAllocatedGiB"] for row in current.values()]
    limit = sources.hardware(state.hardware).hbm_gb * 1e9 / GIB
    beyond = np.nanmax([*y, 0.0]) > 0.5 * limit
    colours = [STYLES[s].colour if runs(row) else "#bbbbbb" for s, row in current.items()]
    return [
        fx.bar(
            MEMORY,
            PREDICTED,
            x,
            y,
            colours,
            text=[f"{value:.3g}" if value == value else "" for value in y],
        )
        | {"showlegend": False},
        *origin_points(MEMORY, "peakAllocatedGiB", found),
        fx.rule(
            MEMORY,
            "memory of the device",
            [x[0], x[-1]] if beyond else [],
            [limit, limit] if beyond else [],
            "solid",
            "#D55E00",
        ),
    ]
