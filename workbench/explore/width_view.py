"""What the width explorer shows: a pure function of state and sources.

Balanced load; the width F of an expert is varied. Beside the model's prediction stands arithmetic
of tiles and waves, which the model does not use.

Legend: T tokens per GPU, D hidden width, F expert width, E_local local experts, K experts per
token, R routed rows of a rank.
"""

from dataclasses import replace

from workbench.errors import InputError
from workbench.explore.sources import (
    Row,
    Sources,
    System,
    View,
    category_of,
    extrapolated,
    milliseconds,
    no_time,
    refused_note,
    runs,
    system_of,
)
from workbench.explore.system_panels import SYSTEMS_PANEL, curve_systems, origin_points, time_bars
from workbench.explore.width_panels import (
    PANELS,
    WidthState,
    changes,
    floors_traces,
    quantisation,
    rate_traces,
    roof_traces,
    tiles_traces,
    weight_gib,
    weights_traces,
    widths,
)
from workbench.hardware import Hardware
from workbench.model.prediction import FLOOR_COLUMNS
from workbench.report import figures_explore as fx
from workbench.report.figures_explore import PREDICTED
from workbench.report.theme import STYLES, system_name


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
        *roof_traces(
            state, hardware, now[systems.index(state.system)], current[state.system], found
        ),
        *time_bars(current),
        *origin_points(SYSTEMS_PANEL, "iterationMS", here),
        *rate_traces(state, F, curves, swept, current, found),
        *tiles_traces(state, F, parts),
        *weights_traces(state, F, hardware),
        *floors_traces(state, F, swept[state.system], current[state.system], moved),
    ]
    categories = tuple(
        category_of(s) for s in STYLES if s in current or any(system_of(row) == s for row in here)
    )
    panels = [replace(p, category=categories) if p is SYSTEMS_PANEL else p for p in PANELS]
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


def _table(state: WidthState, current: dict[System, Row], found: list[Row]) -> list[Row]:
    """One row per system and origin."""
    rows = []
    for system, row in current.items():
        rows.append(
            {
                "system": system_name(system),
                "origin": PREDICTED,
                "F": state.F,
                "id": row["id"],
                "iterationMS": row["iterationMS"],
                "iterationLowMS": row["iterationLowMS"],
                "iterationHighMS": row["iterationHighMS"],
                "usefulTFPerGPU": row["usefulTFPerGPU"],
                "busiestBinds": str(row["busiestBinds"]) if runs(row) else "",
                "runs": row["runs"],
                "weightsGiB": float(weight_gib(state, state.F, system[2])),
                "extrapolation": str(row["extrapolation"]),
            }
        )
    for row in found:
        rows.append(
            {
                "system": system_name(system_of(row)),
                "origin": row["source"],
                "F": row["F"],
                "id": row["id"],
                "iterationMS": row["iterationMS"],
                **fx.spread_columns(row),
                "usefulTFPerGPU": row["usefulTFPerGPU"],
            }
        )
    return rows


def _sentence(
    state: WidthState, hardware: Hardware, row: Row, moved: list[tuple[float, str, str]]
) -> str:
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
        told += [
            f"at F of about {f:,.0f} the binding floor changes from {old} to {new}"
            for f, old, new in moved
        ]
    else:
        told.append("no other floor binds at any width shown")
    filled = f"tiles are {100 * parts.tile[0]:.0f} % useful"
    if parts.wave is not None:
        filled += f", waves of {hardware.sm_count} SMs {100 * parts.wave[0]:.0f} % full"
    return "; ".join([*told, filled]) + "."
