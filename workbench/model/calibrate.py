"""Calibrate the time model: fit a table of measured cases, and hold workloads out for intervals."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from workbench.case import STUDY_SHAPE
from workbench.errors import InputError
from workbench.hardware import Hardware, load_hardware, match_device
from workbench.model.calibration import Calibration, HeldOut, Range
from workbench.model.coefficients import CONSTANTS, PARAMETERS, Group
from workbench.model.fit import WEIGHTS, Problem, group_rows
from workbench.model.memory import fit_memory
from workbench.model.timemodel import Terms

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
COVERAGE = 0.9
WIDER = 2.0
"""An extrapolated prediction's interval is at least this many times the ordinary one."""


def calibrate(
    table: pd.DataFrame, *, hardware: Hardware | None = None, source: str = ""
) -> Calibration:
    """Fit the model to the cases of a table that have times.

    `hardware` is looked up from the table's `device` if not given. Raises InputError that says
    which parameter lacks what, for a table that is empty, too small or of several devices.
    """
    table = measured_cases(table)
    check_enough(table)
    hardware = hardware or device_of(table)
    problem = Problem.of(table, hardware, CONSTANTS)
    values = problem.fit(np.ones(len(table), bool))
    held_out = hold_out(problem, workloads(table))["iterationMS"]
    interval = quantile(held_out)
    named: dict[str, dict[str, float]] = {name: {} for name in PARAMETERS}
    for (name, slot), value in zip(problem.slots, values.tolist(), strict=True):
        named[name][slot] = value
    return Calibration(
        device=hardware.name,
        source=source or _source(table),
        cases=len(table),
        values=named,
        constants=dict(CONSTANTS),
        memory=fit_memory(table),
        interval=interval,
        held_out=tuple(
            HeldOut(
                feature=away.feature,
                end=away.end,
                ratio=away.ratio,
                width=max(WIDER * interval, quantile(hold_out(problem, away.folds)["iterationMS"])),
            )
            for away in beyond(table)
        ),
        ranges=tuple(_ranges(table, problem.terms, problem.rows)),
    )


def measured_cases(table: pd.DataFrame) -> pd.DataFrame:
    """The rows that have an iterationMS, renumbered. Raises InputError if there are none."""
    timed = table[table["iterationMS"].notna()] if "iterationMS" in table else table[:0]
    if timed.empty:
        raise InputError("calibration needs measured cases; the table has none with iterationMS")
    return timed.reset_index(drop=True)


def check_enough(table: pd.DataFrame) -> None:
    """Raise InputError if a parameter cannot be told from the others by these cases."""
    groups = {group: rows for group, rows in group_rows(table).items() if len(rows)}
    strays = np.ones(len(table), bool)
    for rows in groups.values():
        strays[rows] = False
    if strays.any():
        stray = table[strays].iloc[0]
        found = " ".join(stray[name] for name in Group._fields)
        raise InputError(f"pipeline={found} is unknown to the time model")
    needs = {
        "ep": "weight_exposed, grad_bytes and expert_walk, which grow with the local experts",
        "F": "layer_ms, link_efficiency and link_fill_ms, which do not grow with F",
    }
    for column, parameters in needs.items():
        known = sorted(table[column].unique())
        if len(known) < 2:
            raise InputError(
                f"{column}={known[0]} only: at least two values are needed to find {parameters}"
            )
    for group, rows in groups.items():
        cases = table.iloc[rows]
        if cases["factors"].nunique() < 2:
            raise InputError(
                f"{group}: imbalance={cases['factors'].iloc[0][0]:g} only: at least two loads "
                "are needed to tell flop_efficiency from layer_ms"
            )
        times = int(cases[list(WEIGHTS)].notna().to_numpy().sum())
        own = [name for name, p in PARAMETERS.items() if p.scope.get(group) == str(group)]
        if times < len(own):
            raise InputError(
                f"{group}: {times} times cannot determine {len(own)} parameters: {', '.join(own)}"
            )


def workloads(table: pd.DataFrame) -> list[Mask]:
    """Cases [N] of each workload: mode, EP, F, loads and layers, in every system and category."""
    keys = table.groupby(["mode", "ep", "F", "factors"], sort=False).ngroup().to_numpy()
    return [keys == key for key in range(keys.max() + 1)]


class Beyond(NamedTuple):
    """What is held out to see errors of extrapolation: an end of a feature, how far the rest is
    from it at least (a ratio), and the cases [N] of each fold."""

    feature: Literal["EP", "F", "imbalance", "layers"]
    end: Literal["smallest", "largest"]
    ratio: float
    folds: list[Mask]


def beyond(table: pd.DataFrame) -> list[Beyond]:
    """The cases with the smallest and the largest EP, F and single-layer load, one fold for each
    of these six, where others of at least two sizes remain; and of each system the cases with the
    most layers, where it has others."""
    single = table["profile"].isna().to_numpy()
    # below 1 it is the other ranks that have the largest load, a little above the mean
    load = np.where(single, np.maximum(table["imbalance"].to_numpy(np.float64), 1), np.nan)
    sizes_of: dict[Literal["EP", "F", "imbalance"], Array] = {
        "EP": table["ep"].to_numpy(),
        "F": table["F"].to_numpy(),
        "imbalance": load,
    }
    found = []
    for feature, values in sizes_of.items():
        sizes = np.unique(values[~np.isnan(values)])
        if len(sizes) > 2:
            found += [
                Beyond(feature, "smallest", float(sizes[1] / sizes[0]), [values == sizes[0]]),
                Beyond(feature, "largest", float(sizes[-1] / sizes[-2]), [values == sizes[-1]]),
            ]
    layers, folds, ratios = table["layers"].to_numpy(), [], []
    for rows in group_rows(table).values():
        sizes = np.unique(layers[rows])
        if len(sizes) > 1:
            folds.append(np.isin(np.arange(len(table)), rows) & (layers == sizes[-1]))
            ratios.append(float(sizes[-1] / sizes[-2]))
    if folds:
        found.append(Beyond("layers", "largest", min(ratios), folds))
    return found


def hold_out(problem: Problem, folds: Sequence[Mask]) -> dict[str, Array]:
    """log(predicted / measured) of each time [N] when the fit has not seen the case's fold.

    NaN for cases in no fold, and for a fold that would leave nothing.
    """
    found = {name: np.full(len(problem.measured[name]), np.nan) for name in WEIGHTS}
    for fold in folds:
        if fold.all():
            continue
        ratios = problem.log_ratios(problem.fit(~fold)[None])
        for name, ratio in ratios.items():
            found[name][fold] = ratio[0, fold]
    return found


def quantile(ratios: Array, coverage: float = COVERAGE) -> float:
    """Half-width that covers the next log ratio with that chance: the conformal quantile of the
    absolute held-out ones, the largest where they are too few. 0 if there are none."""
    known = np.sort(np.abs(ratios[np.isfinite(ratios)]))
    if not len(known):
        return 0.0
    return float(known[min(int(np.ceil((len(known) + 1) * coverage)), len(known)) - 1])


def device_of(table: pd.DataFrame) -> Hardware:
    """The one device of a table's records. Raises InputError for several, or an unknown one."""
    names = {match_device(str(name)) for name in table["device"].unique()}
    if len(names) > 1:
        raise InputError(f"device={', '.join(sorted(names))} must be one: calibrate each alone")
    return load_hardware(names.pop())


def _source(table: pd.DataFrame) -> str:
    origins = ", ".join(sorted(map(str, table["origin"].unique()))) if "origin" in table else ""
    return f"{len(table)} {origins} cases".replace("  ", " ")


def _ranges(table: pd.DataFrame, terms: Sequence[Terms], rows: Sequence[Array]) -> Iterable[Range]:
    for group, of_group in zip(terms, rows, strict=True):
        cases = table.iloc[of_group]
        replays = np.add.reduceat(group.minibatches, group.start) > 0
        for mode in sorted(cases["mode"].unique()):
            in_mode = (cases["mode"] == mode).to_numpy()
            chosen = cases[in_mode]
            shapes = chosen[list(STUDY_SHAPE)].drop_duplicates().itertuples(index=False, name=None)
            yield Range(
                group=str(group.group),
                mode=mode,
                ep=_span(chosen["ep"]),
                F=_span(chosen["F"]),
                load=_span(group.factor[in_mode]),
                layers=int(chosen["layers"].max()),
                shapes=tuple(sorted(tuple(map(int, shape)) for shape in shapes)),
                replay=bool(replays[in_mode].any()),
            )


def _span(values: Any) -> tuple[Any, Any]:
    found = np.asarray(values)
    return found.min().item(), found.max().item()
