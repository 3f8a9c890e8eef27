"""What the imbalance explorer shows: a pure function of state, trace and sources.

The busiest rank of each layer decides, so a load is one factor per layer: that rank's rows over
the mean. A trace brings its own rows per expert; else rank 0 is the busy one.

Legend: L layers, E experts, ep ranks; rows are routed rows of one layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from workbench.case import PROFILES, Case, check_factor
from workbench.errors import InputError
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
    plan_rows,
    refusal,
    refused_note,
    runs,
    system_of,
)
from workbench.explore.trace import Trace, placed_rows, scaled_counts
from workbench.model.prediction import FLOOR_COLUMNS
from workbench.moe import plan_arithmetic as pa
from workbench.report import figures_explore as fx
from workbench.report.figures_explore import OBSERVED, PREDICTED, Panel
from workbench.report.theme import INK, STYLES, Style, system_name
from workbench.routing import rows_by_expert

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
DEFAULT_FACTORS = list(PROFILES["A"])
Load = Literal["factor", "A", "B", "table", "trace"]
GIB = 2**30
SWEEP = 25
REPLACED = "experts re-placed"

RANKS = Panel(title="Load per rank", x="rank [index]", y="routed rows [1]", thousands=True)
LAYERS = Panel(
    title="Busiest rank by layer", x="layer [index]", y="scheduled rows [1]", thousands=True
)
TIME = Panel(title="Predicted time over imbalance", x="largest factor of any layer [1]",
             y="iteration time [ms]")  # fmt: skip
SYSTEMS = Panel(title="dist_moe against mok", x="system [-]", y="iteration time [ms]")
FLOORS = Panel(title="Floors of the busiest rank", x="floor [-]", y="time at the peaks [ms]",
               category=(*FLOOR_COLUMNS, "predicted"))  # fmt: skip
MEMORY = Panel(title="Peak memory", x="system [-]", y="peak allocated [GiB]")
PANELS = (RANKS, LAYERS, TIME, SYSTEMS, FLOORS, MEMORY)


class ImbalanceState(WorkloadState):
    """`load` says which of `factor` (one layer), a profile, `factors` (a table, one per layer) or
    the trace counts. `layer` is the one whose ranks are shown, from 1; 0 is the busiest layer."""

    load: Load = "factor"
    factor: float = 4.0
    factors: list[float] = DEFAULT_FACTORS
    layer: int = 0
    slotFactor: float = 2.5
    scratchFactor: float = 8.0


def largest_factor(state: WorkloadState) -> float:
    """The most that one rank can receive over the mean, ep*min(K, E/ep)/K."""
    return state.ep * min(state.K, state.E // state.ep) / state.K


@dataclass(frozen=True, kw_only=True, eq=False)
class Loads:
    """Rows per layer and rank, and the factors that follow.

    counts              int64 [L, ep], as the experts lie
    placed              the same with the experts placed anew; None without a trace, because a
                        factor says nothing of the rows of each expert
    factors             of each layer: as given, or the busiest rank's of a trace
    """

    counts: Ints
    placed: Ints | None
    factors: tuple[float, ...]

    @property
    def mean(self) -> int:
        return int(self.counts[0].sum()) // self.counts.shape[1]

    def largest(self, rows: Ints) -> tuple[float, ...]:
        """The busiest rank's rows over the mean, for each layer of `rows` [L, ep]."""
        return tuple((rows.max(axis=1) / self.mean).tolist())


def layer_loads(state: ImbalanceState, trace: Trace | None) -> Loads:
    """The load of a state. Raises InputError for an impossible one, naming the layer."""
    state.case(state.system)  # the shape is possible
    shape = (state.T, state.K, state.E, state.ep)
    if state.load == "trace":
        if trace is None:
            raise InputError("trace= must name a .csv or .npz file of counts, layers x experts")
        if trace.experts != state.E:
            raise InputError(f"{trace.name}: experts={trace.experts} must be E={state.E}")
        counts, placed = _of_trace(trace, *shape)
        mean = state.T * state.K
        factors = tuple((counts.max(axis=1) / mean).tolist())
        _check_factors(state, factors, f"{trace.name}: ")
        return Loads(counts=counts, placed=placed, factors=factors)
    given = {"factor": [state.factor], "table": state.factors}.get(state.load)
    factors = tuple(given if given is not None else PROFILES[state.load])
    if not factors:
        raise InputError("factors=[] must hold a factor for at least one layer")
    _check_factors(state, factors, "")
    return Loads(counts=_of_factors(factors, *shape), placed=None, factors=factors)


def _check_factors(state: ImbalanceState, factors: Sequence[float], place: str) -> None:
    for layer, factor in enumerate(factors):
        try:
            check_factor(factor, ep=state.ep, E=state.E, K=state.K)
        except InputError as error:
            told = f"layer {layer + 1}: " if len(factors) > 1 else ""
            raise InputError(f"{place}{told}{error}") from None


@lru_cache(maxsize=16)
def _of_trace(trace: Trace, T: int, K: int, E: int, ep: int) -> tuple[Ints, Ints]:
    counts = scaled_counts(trace, ep * T * K)
    placed = np.array([placed_rows(tuple(row), ep) for row in counts.tolist()])
    return _by_rank(counts, ep), placed


@lru_cache(maxsize=64)
def _of_factors(factors: tuple[float, ...], T: int, K: int, E: int, ep: int) -> Ints:
    by_expert = [rows_by_expert(T=T, K=K, E=E, ep=ep, factor=f) for f in factors]
    return _by_rank(np.stack(by_expert), ep)


def _by_rank(counts: Ints, ep: int) -> Ints:
    by_rank: Ints = counts.reshape(len(counts), ep, -1).sum(axis=2)
    return by_rank


def load_case(state: ImbalanceState, system: System, factors: Sequence[float]) -> Case:
    """The state's case on a system at these layer factors.

    A single layer keeps whatever its scratch admits, as the study's do, so its slot is that large.
    """
    if len(factors) == 1:
        factors = (1.0,) if state.ep == 1 else factors
        return state.case(system, imbalance=float(factors[0]), scratchFactor=state.scratchFactor,
                          slotFactor=state.scratchFactor)  # fmt: skip
    profile = state.load if state.load in PROFILES else "own"
    return state.case(system, category="packing", profile=profile, factors=tuple(factors),
                      slotFactor=state.slotFactor, scratchFactor=state.scratchFactor)  # fmt: skip


def blend(factors: Sequence[float], peaks: Floats) -> list[tuple[float, ...]]:
    """Loads between even and beyond `factors`, scaled so that their largest factor is each of
    `peaks`; a single factor is replaced by the peak itself."""
    f = np.asarray(factors)
    if len(f) == 1 or f.max() == 1:
        return [tuple([float(peak)] * len(f)) for peak in peaks]
    scale = (peaks - 1) / (f.max() - 1)
    return [tuple(np.maximum(1 + s * (f - 1), 0).tolist()) for s in scale]


def sweep_peaks(state: ImbalanceState, factors: Sequence[float]) -> Floats:
    """Where the curves over imbalance are computed: up to 10, to the load shown, or the limit."""
    limit = largest_factor(state)
    top = min(limit, max(10.0, 1.25 * max(factors)))
    start = 0.0 if len(factors) == 1 and state.ep > 1 else 1.0
    return np.linspace(start, max(top, 1.0), SWEEP)


def curve_systems(state: ImbalanceState, sources: Sources) -> list[System]:
    """The state's system first, then the other backends' systems of its precision."""
    others = [s for s in sources.systems if s[2] == state.precision and s[0] != state.backend]
    return [state.system, *others]


def imbalance_view(state: ImbalanceState, trace: Trace | None, sources: Sources) -> View:
    """Table, figure and sentence of a state. Raises InputError, with the reason, where the state
    is impossible."""
    if state.system not in sources.systems:
        raise InputError(f"system={system_name(state.system)} has no record in the calibration")
    loads = layer_loads(state, trace)
    systems, curves = sources.systems, curve_systems(state, sources)
    now = [load_case(state, system, loads.factors) for system in systems]
    replaced = [] if loads.placed is None else [
        load_case(state, system, loads.largest(loads.placed)) for system in systems]  # fmt: skip
    peaks = sweep_peaks(state, loads.factors)
    sweep = [load_case(state, s, f) for s in curves for f in blend(loads.factors, peaks)]
    rows = sources.predict([*now, *replaced, *sweep], state.hardware)
    current = dict(zip(systems, rows, strict=False))
    better = dict(zip(systems, rows[len(now) : len(now) + len(replaced)], strict=False))
    swept = rows[len(now) + len(replaced) :]
    for system, plan in zip(systems, plan_rows(now), strict=True):
        current[system] |= plan
    chosen = now[systems.index(state.system)]
    found = _measured(state, sources, chosen)
    traces = [
        *_ranks(state, loads, current),
        *_layers(state, current[state.system], loads),
        *_systems(current, better, [row for row in found if _same_load(row, chosen)]),
        *_time(state, loads, curves, peaks, swept, current, better, found),
        *_floors(current[state.system], STYLES[state.system]),
        *_memory(state, current, [row for row in found if _same_load(row, chosen)], sources),
    ]
    title = f"Imbalance: {system_name(state.system)}, {state.mode}, EP {state.ep}"
    categories = tuple(category_of(s) for s in STYLES if s in current or any(
        system_of(row) == s for row in found))  # fmt: skip
    axes = {SYSTEMS: categories, MEMORY: categories,
            LAYERS: tuple(str(n + 1) for n in range(chosen.layers))}  # fmt: skip
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


def _measured(state: ImbalanceState, sources: Sources, case: Case) -> list[Row]:
    """Published and own cases to lay over the prediction: the same layers, any factor if single."""
    fields: dict[str, Any] = {"layers": case.layers}
    if case.layers > 1:
        fields["factors"] = case.factors
    return sources.matching(state, **fields)


def _same_load(row: Row, case: Case) -> bool:
    return bool(np.allclose(row["factors"], case.factors, rtol=1e-9, atol=0))


def _ranks(state: ImbalanceState, loads: Loads, current: dict[System, Row]) -> list[fx.Trace]:
    at = state.layer - 1 if 1 <= state.layer <= len(loads.counts) else int(
        loads.counts.max(axis=1).argmax())  # fmt: skip
    ranks = np.arange(state.ep)
    ends = np.array([-0.5, state.ep - 0.5])
    style = STYLES[state.system]
    traces = [
        fx.bar(RANKS, f"rows of layer {at + 1}" if len(loads.counts) > 1 else "rows of a rank",
               ranks, loads.counts[at], style.colour),
        fx.rule(RANKS, REPLACED, *_where(loads, ranks, lambda placed: placed[at]), "solid", width=1,
                shape="hvh"),
        fx.rule(RANKS, "mean", ends, [loads.mean] * 2, "dot", "#777777"),
    ]  # fmt: skip
    for name, rows, dash, colour in capacity_lines(state, len(loads.counts), current):
        traces.append(fx.rule(RANKS, name, ends if rows is not None else [],
                              [rows] * 2 if rows is not None else [], dash, colour))  # fmt: skip
    return traces


def _where(loads: Loads, x: Any, y: Callable[[Ints], Any]) -> tuple[Any, Any]:
    """x and y of what is known of re-placed experts only."""
    return ([], []) if loads.placed is None else (x, y(loads.placed))


def capacity_lines(
    state: ImbalanceState, layers: int, current: dict[System, Row]
) -> list[tuple[str, float | None, str, str]]:
    """(name, rows, dash, colour) of the bounds of both backends, in the state's precision; None
    where one does not exist. The slot is drawn at the rows that fill it if every layer had them."""
    dist = state.system if state.backend == "dist_moe" else next(
        (s for s in current if s[0] == "dist_moe" and s[2] == state.precision), None)  # fmt: skip
    mok = next((s for s in current if s[0] == "mok" and s[2] == state.precision), None)
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
        ("dist_moe scratch (hard)", scratch, "solid", "#0072B2"),
        ("dist_moe slot (soft)", slot, "dash", "#0072B2"),
        ("mok retained", retained, "dash", "#D55E00"),
    ]


def _layers(state: ImbalanceState, row: Row, loads: Loads) -> list[fx.Trace]:
    """Rows that rank 0 schedules in each layer: done once, and what backward does again."""
    padded, again = row["paddedRows"], row["againRows"]
    x = np.array([str(n + 1) for n in range(len(padded))])
    word = "recomputed" if state.backend == "dist_moe" else "replayed"
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


def _time(
    state: ImbalanceState, loads: Loads, curves: list[System], peaks: Floats,
    swept: list[Row], current: dict[System, Row], better: dict[System, Row],
    found: list[Row],
) -> list[fx.Trace]:  # fmt: skip
    traces = []
    for n, system in enumerate(curves):
        part = swept[n * SWEEP : (n + 1) * SWEEP]
        if n == 0:
            traces.append(fx.band(TIME, "90 % interval", peaks, [r["iterationLowMS"] for r in part],
                                  [r["iterationHighMS"] for r in part],
                                  STYLES[system].colour))  # fmt: skip
        traces.append(fx.line(TIME, system_name(system), peaks, [r["iterationMS"] for r in part],
                              STYLES[system], 2.2 if n == 0 else 1.3))  # fmt: skip
    for origin in OBSERVED:
        for system in curves:
            rows = [r for r in found if r["source"] == origin and system_of(r) == system]
            points = fx.points(TIME, origin, [max(r["factors"]) for r in rows],
                               [r["iterationMS"] for r in rows], STYLES[system].colour, origin,
                               [r["id"] for r in rows])  # fmt: skip
            traces.append(fx.with_spread(points, rows, "iterationMS"))
    here = current[state.system]
    nowhere = not any(runs(row) for row in swept)
    traces.append(fx.said_in(TIME, "no system runs at any load" if nowhere else "", peaks.mean()))
    traces.append(fx.points(TIME, "this load", [max(loads.factors)], [here["iterationMS"]],
                            INK, symbol="x-thin-open", size=11))  # fmt: skip
    x = [] if loads.placed is None else [max(loads.largest(loads.placed))]
    y = [better[state.system]["iterationMS"]] if better else []
    traces.append(fx.points(TIME, REPLACED, x, y, INK, symbol="line-ew-open"))
    return traces


def _systems(
    current: dict[System, Row], better: dict[System, Row], found: list[Row]
) -> list[fx.Trace]:
    x = [category_of(system) for system in current]
    y = [row["iterationMS"] for row in current.values()]
    traces = [
        fx.bar(SYSTEMS, PREDICTED, x, y, [STYLES[s].colour for s in current],
               low=[row["iterationLowMS"] for row in current.values()],
               high=[row["iterationHighMS"] for row in current.values()],
               text=[f"{value:.3g}" if value == value else "" for value in y])
        | {"showlegend": False},
        refused_systems(SYSTEMS, current),
        fx.points(SYSTEMS, REPLACED, x if better else [],
                  [row["iterationMS"] for row in better.values()], INK, symbol="line-ew-open"),
    ]  # fmt: skip
    return traces + origin_points(SYSTEMS, "iterationMS", found)


def refused_systems(panel: Panel, current: dict[System, Row]) -> fx.Trace:
    """A word in place of the bar of each system that does not run."""
    refused = {category_of(s): refusal(row) for s, row in current.items() if not runs(row)}
    return fx.refused(panel, list(refused), list(refused.values()))


def origin_points(panel: Panel, field: str, found: Sequence[Row]) -> list[fx.Trace]:
    """Published and own values over the systems' bars."""
    traces = []
    for origin in OBSERVED:
        rows = [r for r in found if r["source"] == origin and r[field] == r[field]]
        points = fx.points(panel, origin, [category_of(system_of(r)) for r in rows],
                           [r[field] for r in rows], "white", origin,
                           [r["id"] for r in rows])  # fmt: skip
        timed = field == "iterationMS"
        traces.append(fx.with_spread(points, rows, field) if timed else points)
    return traces


def _floors(row: Row, style: Style) -> list[fx.Trace]:
    names = list(FLOORS.category) if runs(row) else []
    floors = [row[field] for field in FLOOR_COLUMNS.values()]
    values = [*floors, row["iterationMS"]] if names else []
    binds = str(row["busiestBinds"])
    colours = [INK if name == binds else "#bbbbbb" for name in FLOOR_COLUMNS] + [style.colour]
    bars = fx.bar(FLOORS, "floor", names, values, colours,
                  low=[*floors, row["iterationLowMS"]][: len(names)],
                  high=[*floors, row["iterationHighMS"]][: len(names)])  # fmt: skip
    told = [] if names else [f"does not run: {refusal(row)}"]
    return [bars | {"showlegend": False}, fx.refused(FLOORS, ["HBM"][: len(told)], told)]


def _memory(state: ImbalanceState, current: dict[System, Row], found: list[Row],
            sources: Sources) -> list[fx.Trace]:  # fmt: skip
    x = [category_of(system) for system in current]
    y = [row["peakAllocatedGiB"] for row in current.values()]
    limit = sources.hardware(state.hardware).hbm_gb * 1e9 / GIB
    beyond = np.nanmax([*y, 0.0]) > 0.5 * limit
    colours = [STYLES[s].colour if runs(row) else "#bbbbbb" for s, row in current.items()]
    return [
        fx.bar(MEMORY, PREDICTED, x, y, colours,
               text=[f"{value:.3g}" if value == value else "" for value in y])
        | {"showlegend": False},
        *origin_points(MEMORY, "peakAllocatedGiB", found),
        fx.rule(MEMORY, "memory of the device", [x[0], x[-1]] if beyond else [],
                [limit, limit] if beyond else [], "solid", "#D55E00"),
    ]  # fmt: skip


def _table(state: ImbalanceState, current: dict[System, Row], better: dict[System, Row],
           found: list[Row]) -> list[Row]:  # fmt: skip
    """One row per system and origin."""
    rows = []
    for system, row in current.items():
        again = {}
        if system in better:
            after = better[system]["iterationMS"]
            again = {"replacedMS": after, "replacementGain": 1 - after / row["iterationMS"]}
        rows.append({
            "system": system_name(system), "origin": PREDICTED, "id": row["id"],
            "iterationMS": row["iterationMS"], "iterationLowMS": row["iterationLowMS"],
            "iterationHighMS": row["iterationHighMS"],
            "busiestBinds": str(row["busiestBinds"]) if runs(row) else "",
            "peakAllocatedGiB": row["peakAllocatedGiB"],
            "recomputedLayers": row["recomputedLayers"], "totalReplayRows": row["totalReplayRows"],
            **again, "runs": row["runs"], "extrapolation": str(row["extrapolation"]),
        })  # fmt: skip
    for row in found:
        rows.append({
            "system": system_name(system_of(row)), "origin": row["source"], "id": row["id"],
            "iterationMS": row["iterationMS"], **fx.spread_columns(row),
            "peakAllocatedGiB": row["peakAllocatedGiB"],
        })  # fmt: skip
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
        _again("recomputed by dist_moe", "dist_moe", current, state),
        _again("replayed by mok", "mok", current, state),
    ]
    if loads.placed is not None and runs(better[state.system]):
        gain = 1 - better[state.system]["iterationMS"] / row["iterationMS"]
        busiest, to = max(loads.factors), max(loads.largest(loads.placed))
        parts.append(f"re-placing the experts brings the largest factor from {busiest:.3g} to "
                     f"{to:.3g} and the time down by <b>{100 * gain:.1f} %</b>")  # fmt: skip
    return f"{time}; {'; '.join(filter(None, parts))}."


def _again(words: str, backend: str, current: dict[System, Row], state: ImbalanceState) -> str:
    """What a backend does again in backward, in the state's precision; "" if it does not run."""
    of_precision = (s for s in current if s[0] == backend and s[2] == state.precision)
    system = state.system if state.backend == backend else next(of_precision, None)
    if system is None:
        return f"nothing is {words}"
    row = current[system]
    if not runs(row):
        return ""
    named = [str(n + 1) for n in np.flatnonzero(row["againRows"])]
    if not named:
        return f"nothing is {words}"
    rows = f"{int(row['againRows'].sum()):,} rows of " if backend == "mok" else ""
    verb = "is" if backend == "dist_moe" and len(named) == 1 else "are"
    return f"<b>{rows}layer{'s' * (len(named) > 1)} {', '.join(named)}</b> {verb} {words}"
