"""Figures that lay what was measured, published and predicted side by side.

Each takes one table whose rows differ in `origin` and `device`.
"""

from collections.abc import Callable

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from workbench.report import tables
from workbench.report.draw import LOG, empty, grid, legend, lines
from workbench.report.theme import DOUBLE, SMALL, system_name

TIME = "iteration time [ms]"
LOAD = "imbalance factor [1]"
SLOWDOWN = "time over the time at balanced load [1]"


def side_by_side(table: pd.DataFrame) -> go.Figure:
    """Iteration time of each workload that was measured: as measured, as the model calibrated on
    these records gives it, and as predicted for the published device."""
    title = "Measured and predicted, case by case"
    own = table[(table["origin"] == "measured") & table["iterationMS"].notna()]
    found = _named(tables.with_series(table[table["id"].isin(own["id"]) & _of(table, own)]))
    if own.empty or found.empty:
        return empty(title, "no case was measured")
    found["workload"] = [
        f"{tables.workload_label(row, with_F=True)} slot {row['slotFactor']:g}"
        if row["category"] == "packing"
        else tables.workload_label(row, with_F=True)
        for row in found.to_dict("records")
    ]
    modes = list(found["mode"].drop_duplicates())
    most = found.groupby("mode")["workload"].nunique().max()
    low, high = tables.extent(found, "iterationMS")
    span = np.log10([low / 1.6, high * 1.6])
    labels = {
        mode: list(dict.fromkeys(found.loc[found["mode"] == mode, "workload"])) for mode in modes
    }
    longest = max(len(name) for names in labels.values() for name in names)
    fig = grid(
        title,
        [(mode, {"title": TIME, **LOG, "range": span}) for mode in modes],
        [
            {
                "title": "workload [-]",
                "categoryarray": labels[mode][::-1],
                "range": [-0.7, len(labels[mode]) - 0.3],
                "tickfont": {"size": SMALL},
            }
            for mode in modes
        ],
        width=DOUBLE,
        panel_height=18 * most + 20,
        left=int(28 + 4.8 * longest),
        own_y=True,
    )
    for n, mode in enumerate(modes):
        part = found[found["mode"] == mode]
        lines(fig, part, "iterationMS", "workload", n, n, mode, mode="markers")
    return legend(fig, "system (backend, pipeline, precision), origin and device")


def slowdown(table: pd.DataFrame) -> go.Figure:
    """How much slower one layer is when rank 0 receives more: a ratio, so that devices and shapes
    can stand beside one another."""
    title = "Slow-down by load: measured, published, predicted"
    found = tables.single_layer(table)
    found = found[found["slowdown"].notna() & (found["ep"] > 1)]
    measured = set(found.loc[found["origin"] == "measured", "system"])
    found = found[found["system"].isin(measured)]
    if found.empty:
        return empty(title, "no one-layer case that was measured beside its balanced one")
    found = _named(found, with_ep=True)
    found = found.sort_values(["series", "imbalance"], kind="stable")
    modes = list(found["mode"].drop_duplicates())
    fig = grid(
        title,
        [(mode, {"title": LOAD, "range": [0, found["imbalance"].max() * 1.05]}) for mode in modes],
        [{"title": SLOWDOWN, "range": [0, tables.extent(found, "slowdown")[1] * 1.08]}],
        width=DOUBLE,
        panel_height=240,
    )
    for n, mode in enumerate(modes):
        lines(fig, found[found["mode"] == mode], "imbalance", "slowdown", n, 0, mode)
    return legend(fig, "system, origin, device and EP")


def _named(found: pd.DataFrame, with_ep: bool = False) -> pd.DataFrame:
    """Series told apart by system, origin and device (and EP); shapes are on the axes."""
    names = [
        f"{system_name(row['system'])}, {row['origin']}, {_short(str(row['device']))}"
        + f", EP {row['ep']}" * with_ep
        for row in found.to_dict("records")
    ]
    named = found.assign(series=names)
    # per system, so that the first keeps the system's own marks
    codes = named.groupby("system", sort=False)["series"].transform(lambda s: pd.factorize(s)[0])
    return named.assign(variant=codes.astype(int))


def _short(device: str) -> str:
    return "CPU" if device.startswith("CPU ") else device.removeprefix("NVIDIA ")


def _of(table: pd.DataFrame, own: pd.DataFrame) -> "pd.Series[bool]":
    """Rows whose shape is one that was measured."""
    keys = ["T", "D", "E", "K"]
    shapes = set(own[keys].itertuples(index=False, name=None))
    rows = list(table[keys].itertuples(index=False, name=None))
    return pd.Series([row in shapes for row in rows], table.index)


SWEEP_FIGURES: dict[str, Callable[[pd.DataFrame], go.Figure]] = {
    "side_by_side": side_by_side,
    "slowdown": slowdown,
}
"""Name -> figure of a table of measured, published and predicted cases."""
