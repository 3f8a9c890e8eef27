"""Figures of the time model against what was measured: pure functions of a `Validation`."""

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from workbench.model.validate import Validation
from workbench.report import tables
from workbench.report.draw import LOG, add, grid, legend, lines, rule
from workbench.report.theme import DOUBLE

HELD_OUT = "leave one workload out"
ERROR = "predicted / measured - 1 [%]"
TIME = "measured iteration time [ms]"


def predicted(validation: Validation) -> go.Figure:
    """Predicted over measured iterationMS, each case predicted without its workload."""
    found = _held_out(validation)
    low, high = tables.extent(found, "iterationMS")
    span = [low / 1.3, high * 1.3]
    fig = grid(
        "Predicted against measured, workload held out",
        [("", {"title": TIME, **LOG, "range": np.log10(span)})],
        [{"title": "predicted iteration time [ms]", **LOG, "range": np.log10(span)}],
        width=DOUBLE,
        panel_height=340,
    )
    rule(fig, span, span, "equal", "solid", width=1)
    for factor, name in ((1.05, "5 % more"), (1 / 1.05, "5 % less")):
        rule(fig, span, [s * factor for s in span], name, "dot", width=1)
    lines(fig, found, "iterationMS", "predictedMS", panel="all cases", mode="markers")
    return legend(fig)


def residuals(validation: Validation) -> go.Figure:
    """Signed held-out error by category, over the measured time."""
    found = _held_out(validation)
    panels = list(found["category"].drop_duplicates())
    low, high = tables.extent(found, "iterationMS")
    span = np.log10([low / 1.3, high * 1.3])
    largest = float(found["percent"].abs().max()) * 1.15
    fig = grid(
        "Error of the prediction, workload held out",
        [(name, {"title": TIME, **LOG, "range": span}) for name in panels],
        [{"title": ERROR, "range": [-largest, largest]}],
        width=DOUBLE,
        panel_height=230,
    )
    ends = [float(10**v) for v in span]
    for n, name in enumerate(panels):
        rule(fig, ends, [0, 0], "no error", "solid", n, 0, name, width=1)
        part = found[found["category"] == name]
        lines(fig, part, "iterationMS", "percent", n, 0, name, mode="markers")
    return legend(fig)


def protocols(validation: Validation) -> go.Figure:
    """Mean and worst absolute error of each protocol beside its gate and goal."""
    rows = validation.protocols[validation.protocols["cases"] > 0]
    names = rows["protocol"].tolist()
    panels = [("mean", "gateMean", "goalMean"), ("worst", "gateWorst", "goalWorst")]
    y = {"title": "protocol [-]", "categoryarray": names[::-1], "range": [-0.6, len(names) - 0.4]}
    fig = grid(
        "Errors on held-out cases, against gates and goals",
        [
            (f"{kind} absolute error", {"title": "error [%]", **_from_zero(rows, kind, gate)})
            for kind, gate, _ in panels
        ],
        [y],
        width=DOUBLE,
        panel_height=24 * len(names),
        left=210,
    )
    marks = (
        ("error", "circle", "#0072B2"),
        ("gate", "line-ns-open", "#D55E00"),
        ("goal", "line-ns-open", "#009E73"),
    )
    for n, columns in enumerate(panels):
        for column, (label, symbol, colour) in zip(columns, marks, strict=True):
            known = rows[rows[column].notna()]
            add(
                fig,
                go.Scatter(
                    x=100 * known[column].astype(float),
                    y=known["protocol"],
                    name=label,
                    mode="markers",
                    meta=columns[0],
                    marker={
                        "symbol": symbol,
                        "color": colour,
                        "size": 8,
                        "line": {"width": 2, "color": colour},
                    },
                    hovertemplate="%{y}<br>%{x:.2f} %<extra></extra>",
                ),
                n,
                0,
            )
    return legend(fig, "absolute error of predicted over measured")


def groups(validation: Validation) -> go.Figure:
    """Mean held-out error of each system, by protocol of time."""
    rows = validation.by_group
    rows = rows[(rows["cases"] > 0) & ~rows["protocol"].str.contains("memory")]
    names = list(rows["protocol"].drop_duplicates())
    fig = grid(
        "Mean held-out error by system",
        [("", {"title": "mean absolute error [%]", **_from_zero(rows, "mean", "mean")})],
        [
            {
                "title": "protocol [-]",
                "categoryarray": names[::-1],
                "range": [-0.6, len(names) - 0.4],
            }
        ],
        width=DOUBLE,
        panel_height=26 * len(names),
        left=210,
    )
    shown = rows.assign(percent=100 * rows["mean"], id=rows["group"])
    parts = shown["group"].str.split(" ", expand=True)
    systems = list(zip(parts[0], parts[2], parts[1], strict=True))
    shown["system"] = pd.Series(systems, shown.index, dtype=object)
    shown["series"], shown["variant"] = shown["group"], 0
    lines(fig, shown, "percent", "protocol", mode="markers")
    return legend(fig)


def memory(validation: Validation) -> go.Figure:
    """Predicted over measured peak memory, each case predicted without its workload."""
    found = tables.with_series(validation.cases)
    name = "peak memory, leave one workload out"
    found = found[found[name].notna()]
    found["predictedGiB"] = found["peakAllocatedGiB"] * (1 + found[name])
    span = [0.0, float(found["peakAllocatedGiB"].max()) * 1.06]
    fig = grid(
        "Peak memory, workload held out",
        [("", {"title": "measured peak memory [GiB]", "range": span})],
        [{"title": "predicted peak memory [GiB]", "range": span}],
        width=DOUBLE,
        panel_height=280,
    )
    rule(fig, span, span, "equal", "solid", width=1)
    lines(fig, found, "peakAllocatedGiB", "predictedGiB", panel="all cases", mode="markers")
    return legend(fig)


MODEL_FIGURES: Mapping[str, Callable[[Validation], go.Figure]] = {
    "predicted": predicted,
    "residuals": residuals,
    "protocols": protocols,
    "groups": groups,
    "memory": memory,
}
"""Name of the file -> the figure's function."""


def _held_out(validation: Validation) -> pd.DataFrame:
    found = tables.with_series(validation.cases)
    found = found[found[HELD_OUT].notna()]
    found["percent"] = 100 * found[HELD_OUT]
    found["predictedMS"] = found["iterationMS"] * (1 + found[HELD_OUT])
    return found


def _from_zero(rows: pd.DataFrame, *columns: str) -> dict[str, list[float]]:
    largest = float(np.nanmax(rows[list(columns)].astype(float).to_numpy()))
    return {"range": [0.0, 108 * largest]}


__all__ = ["MODEL_FIGURES"]
