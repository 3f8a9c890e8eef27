"""What the imbalance explorer shows: a pure function of state, trace and sources.

The busiest rank of each layer decides, so a load is one factor per layer: that rank's rows over
the mean. A trace brings its own rows per expert; else rank 0 is the busy one.

Legend: L layers, E experts, ep ranks; rows are routed rows of one layer.
"""

from dataclasses import replace

import numpy as np

from workbench.errors import InputError
from workbench.explore.imbalance_panels import (
    LAYERS,
    MEMORY,
    PANELS,
    floors_traces,
    layers_traces,
    measured,
    memory_traces,
    ranks_traces,
    same_load,
    systems_traces,
    time_traces,
)
from workbench.explore.loads import (
    ImbalanceState,
    Loads,
    blend,
    layer_loads,
    load_case,
    sweep_peaks,
)
from workbench.explore.sources import (
    Row,
    Sources,
    System,
    View,
    category_of,
    extrapolated,
    milliseconds,
    no_time,
    plan_rows,
    refused_note,
    runs,
    system_of,
)
from workbench.explore.system_panels import (
    AGAIN,
    BACKENDS,
    SYSTEMS_PANEL,
    curve_systems,
    reserving_system,
)
from workbench.explore.trace import Trace
from workbench.model.prediction import FLOOR_COLUMNS
from workbench.report import figures_explore as fx
from workbench.report.figures_explore import PREDICTED
from workbench.report.theme import STYLES, system_name


def imbalance_view(state: ImbalanceState, trace: Trace | None, sources: Sources) -> View:
    """Table, figure and sentence of a state. Raises InputError, with the reason, where the state
    is impossible."""
    if state.system not in sources.systems:
        raise InputError(f"system={system_name(state.system)} has no record in the calibration")
    loads = layer_loads(state, trace)
    systems, curves = sources.systems, curve_systems(state, sources)
    now = [load_case(state, system, loads.factors) for system in systems]
    replaced = (
        []
        if loads.placed is None
        else [load_case(state, system, loads.largest(loads.placed)) for system in systems]
    )
    peaks = sweep_peaks(state, loads.factors)
    sweep = [load_case(state, s, f) for s in curves for f in blend(loads.factors, peaks)]
    rows = sources.predict([*now, *replaced, *sweep], state.hardware)
    current = dict(zip(systems, rows, strict=False))
    better = dict(zip(systems, rows[len(now) : len(now) + len(replaced)], strict=False))
    swept = rows[len(now) + len(replaced) :]
    for system, plan in zip(systems, plan_rows(now), strict=True):
        current[system] |= plan
    chosen = now[systems.index(state.system)]
    found = measured(state, sources, chosen)
    traces = [
        *ranks_traces(state, loads, current),
        *layers_traces(state, current[state.system], loads),
        *systems_traces(current, better, [row for row in found if same_load(row, chosen)]),
        *time_traces(state, loads, curves, peaks, swept, current, better, found),
        *floors_traces(current[state.system], STYLES[state.system]),
        *memory_traces(state, current, [row for row in found if same_load(row, chosen)], sources),
    ]
    title = f"Imbalance: {system_name(state.system)}, {state.mode}, EP {state.ep}"
    categories = tuple(
        category_of(s) for s in STYLES if s in current or any(system_of(row) == s for row in found)
    )
    axes = {
        SYSTEMS_PANEL: categories,
        MEMORY: categories,
        LAYERS: tuple(str(n + 1) for n in range(chosen.layers)),
    }
    panels = [replace(p, category=axes[p]) if p in axes else p for p in PANELS]
    return View(
        rows=_table(state, current, better, found),
        spec=fx.explorer_figure(title, panels, traces),
        sentence=_sentence(state, loads, current, better),
        notes=tuple(
            filter(
                None,
                (
                    extrapolated(current[state.system]),
                    refused_note({s: r for s, r in current.items() if s != state.system}),
                    sources.own_note(found, state.hardware),
                ),
            )
        ),
    )


def _table(
    state: ImbalanceState, current: dict[System, Row], better: dict[System, Row], found: list[Row]
) -> list[Row]:
    """One row per system and origin."""
    rows = []
    for system, row in current.items():
        again = {}
        if system in better:
            after = better[system]["iterationMS"]
            again = {"replacedMS": after, "replacementGain": 1 - after / row["iterationMS"]}
        rows.append(
            {
                "system": system_name(system),
                "origin": PREDICTED,
                "id": row["id"],
                "iterationMS": row["iterationMS"],
                "iterationLowMS": row["iterationLowMS"],
                "iterationHighMS": row["iterationHighMS"],
                "busiestBinds": str(row["busiestBinds"]) if runs(row) else "",
                "peakAllocatedGiB": row["peakAllocatedGiB"],
                "recomputedLayers": row["recomputedLayers"],
                "totalReplayRows": row["totalReplayRows"],
                **again,
                "runs": row["runs"],
                "extrapolation": str(row["extrapolation"]),
            }
        )
    for row in found:
        rows.append(
            {
                "system": system_name(system_of(row)),
                "origin": row["source"],
                "id": row["id"],
                "iterationMS": row["iterationMS"],
                **fx.spread_columns(row),
                "peakAllocatedGiB": row["peakAllocatedGiB"],
            }
        )
    return rows


def _sentence(
    state: ImbalanceState, loads: Loads, current: dict[System, Row], better: dict[System, Row]
) -> str:
    row = current[state.system]
    if not runs(row):
        return no_time(state.system, row)
    time = f"<b>{milliseconds(row['iterationMS'])}</b> predicted (90 %: "
    time += f"{milliseconds(row['iterationLowMS'])} to {milliseconds(row['iterationHighMS'])})"
    binds = str(row["busiestBinds"])
    floor = row[FLOOR_COLUMNS[binds]]
    parts = [
        f"<b>{binds}</b> binds: its floor on the busiest rank is {milliseconds(floor)}",
        *(_again(kind, current, state) for kind in AGAIN),
    ]
    if loads.placed is not None and runs(better[state.system]):
        gain = 1 - better[state.system]["iterationMS"] / row["iterationMS"]
        busiest, to = max(loads.factors), max(loads.largest(loads.placed))
        parts.append(
            f"re-placing the experts brings the largest factor from {busiest:.3g} to "
            f"{to:.3g} and the time down by <b>{100 * gain:.1f} %</b>"
        )
    return f"{time}; {'; '.join(filter(None, parts))}."


def _again(kind: str, current: dict[System, Row], state: ImbalanceState) -> str:
    """What the system that reserves `kind` does again in backward, in the state's precision; ""
    if it does not run."""
    system = reserving_system(kind, state, current)
    words = f"{AGAIN[kind]} by {system[0] if system else BACKENDS[kind]}"
    if system is None:
        return f"nothing is {words}"
    row = current[system]
    if not runs(row):
        return ""
    named = [str(n + 1) for n in np.flatnonzero(row["againRows"])]
    if not named:
        return f"nothing is {words}"
    rows = f"{int(row['againRows'].sum()):,} rows of " if kind == "rows" else ""
    verb = "is" if kind == "slot" and len(named) == 1 else "are"
    return f"<b>{rows}layer{'s' * (len(named) > 1)} {', '.join(named)}</b> {verb} {words}"
