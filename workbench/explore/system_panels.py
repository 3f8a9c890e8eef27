"""What the explorers show of all systems beside one another."""

from collections.abc import Iterable, Sequence

from workbench.explore.sources import (
    Row,
    Sources,
    System,
    WorkloadState,
    category_of,
    refusal,
    runs,
    system_of,
)
from workbench.report import figures_explore as fx
from workbench.report.figures_explore import OBSERVED, PREDICTED, Panel
from workbench.report.theme import STYLES
from workbench.systems import SYSTEMS

GIB = 2**30
SYSTEMS_PANEL = Panel(title="dist_moe against mok", x="system [-]", y="iteration time [ms]")


AGAIN = {"slot": "recomputed", "rows": "replayed"}
"""What backward does with what a layer could not keep, by how memory is set aside."""
BACKENDS = {kind: next(s.backend for s in SYSTEMS.values() if s.reserves == kind) for kind in AGAIN}
"""Whose bounds are shown where none of the systems at hand reserves so."""


def reserving_system(kind: str, state: WorkloadState, systems: Iterable[System]) -> System | None:
    """The state's system if it reserves `kind`, else the first of its precision that does."""
    found = [s for s in systems if SYSTEMS[s[1]].reserves == kind and s[2] == state.precision]
    return state.system if state.system in found else next(iter(found), None)


def curve_systems(state: WorkloadState, sources: Sources) -> list[System]:
    """The state's system first, then the other backends' systems of its precision."""
    others = [s for s in sources.systems if s[2] == state.precision and s[0] != state.backend]
    return [state.system, *others]


def time_bars(current: dict[System, Row]) -> list[fx.Trace]:
    """Predicted iteration time of each system with its interval; a word where it does not run."""
    y = [row["iterationMS"] for row in current.values()]
    bars = fx.bar(
        SYSTEMS_PANEL,
        PREDICTED,
        [category_of(system) for system in current],
        y,
        [STYLES[s].colour for s in current],
        low=[row["iterationLowMS"] for row in current.values()],
        high=[row["iterationHighMS"] for row in current.values()],
        text=[f"{value:.3g}" if value == value else "" for value in y],
    )
    return [bars | {"showlegend": False}, refused_systems(SYSTEMS_PANEL, current)]


def refused_systems(panel: Panel, current: dict[System, Row]) -> fx.Trace:
    """A word in place of the bar of each system that does not run."""
    refused = {category_of(s): refusal(row) for s, row in current.items() if not runs(row)}
    return fx.refused(panel, list(refused), list(refused.values()))


def origin_points(panel: Panel, field: str, found: Sequence[Row]) -> list[fx.Trace]:
    """Published and own values over the systems' bars."""
    traces = []
    for origin in OBSERVED:
        rows = [r for r in found if r["source"] == origin and r[field] == r[field]]
        points = fx.points(
            panel,
            origin,
            [category_of(system_of(r)) for r in rows],
            [r[field] for r in rows],
            "white",
            origin,
            [r["id"] for r in rows],
        )
        timed = field == "iterationMS"
        traces.append(fx.with_spread(points, rows, field) if timed else points)
    return traces
