"""Figures of layers that share their activation memory: load, capacity, time, memory."""

import pandas as pd
import plotly.graph_objects as go

from workbench.report import tables
from workbench.report.draw import Axis, add, bars, empty, grid, legend, rule, ticks_over_bars
from workbench.report.theme import COLUMN, DOUBLE, INK

_NONE = "no packing cases in this selection"


def load(table: pd.DataFrame) -> go.Figure:
    """Rows of rank 0 by layer: what mok keeps and replays, and the bounds of both systems."""
    title = "Packing: load of rank 0 by layer"
    layers = tables.packing_layers(table)
    if layers.empty:
        return empty(title, _NONE)
    layers["kept"] = layers["scheduledRows"].fillna(layers["rows"]) - layers["replayedRows"].fillna(
        0
    )
    parts = list(layers.groupby("workload", sort=False))
    most = int(layers["layer"].max())
    axis: Axis = {"title": "layer [index]", "range": [0.3, most + 0.7], "dtick": 3, "tick0": 1}
    fig = grid(
        title,
        [(str(name), axis) for name, _ in parts],
        [{"title": "rows of rank 0 [1]", "rangemode": "tozero"}],
        width=DOUBLE if len(parts) > 1 else COLUMN,
        panel_height=210,
    )
    for n, (panel, part) in enumerate(parts):
        for name, column, colour, pattern in (
            ("scheduled and kept (mok)", "kept", "#56B4E9", ""),
            ("scheduled and replayed (mok)", "replayedRows", "#D55E00", "/"),
        ):
            if part["scheduledRows"].isna().all():
                continue
            add(
                fig,
                go.Bar(
                    x=part["layer"],
                    y=part[column],
                    name=name,
                    meta=panel,
                    marker={
                        "color": colour,
                        "line": {"color": INK, "width": 0.5},
                        "pattern": {
                            "shape": pattern,
                            "fgcolor": "white",
                            "size": 5,
                            "fillmode": "overlay",
                            "solidity": 0.35,
                        },
                    },
                ),
                n,
            )
        add(
            fig,
            go.Scatter(
                x=part["layer"],
                y=part["rows"],
                name="routed to rank 0",
                meta=panel,
                mode="markers",
                marker={"symbol": "circle-open", "color": INK, "size": 5},
            ),
            n,
        )
        for name, column, dash in (
            ("retained per layer (mok)", "retainedRows", "dash"),
            ("scratch takes (dist_moe)", "scratchRows", "dot"),
        ):
            bound = part[column].max()
            if pd.notna(bound):
                rule(fig, [0.5, most + 0.5], [bound, bound], name, dash, n, 0, panel, width=1.5)
    fig.update_layout(barmode="stack")
    return legend(fig, "rows [1]")


def slot(table: pd.DataFrame) -> go.Figure:
    """Activation slot and scratch of dist_moe: used on the fullest rank, and reserved."""
    title = "Packing: slot and scratch of dist_moe"
    found = tables.packing_plan(table)
    found = found[found["scratchBytes"].notna()]
    if found.empty:
        return empty(title, "no packing cases of dist_moe in this selection")
    names = ["slotBytes", "maxSavedRankBytes", "scratchBytes", "scratchUsedBytes"]
    found = found.assign(**{name: found[name] / tables.GIB for name in names})
    fig = grid(
        title,
        [("", _x(found))],
        [{"title": "slot [GiB]"}, {"title": "scratch [GiB]"}],
        panel_height=130,
        bottom=58,
    )
    for row, (used, reserved, panel) in enumerate(
        [
            ("maxSavedRankBytes", "slotBytes", "slot"),
            ("scratchUsedBytes", "scratchBytes", "scratch"),
        ]
    ):
        bars(fig, _grouped(found), "group", used, row=row, panel=panel)
        ticks_over_bars(fig, _grouped(found), "group", reserved, "reserved", row, panel)
    fig.update_layout(scattermode="group", scattergap=0.25)
    return legend(fig, "used on the fullest rank, and reserved")


def time(table: pd.DataFrame) -> go.Figure:
    """Time and useful rate of an iteration over all layers."""
    title = "Packing: time and useful rate"
    found = _grouped(tables.packing(table))
    if found.empty:
        return empty(title, _NONE)
    fig = grid(
        title,
        [("", _x(found))],
        [{"title": "iteration time [ms]"}, {"title": "useful rate [TFLOP/s]"}],
        panel_height=130,
        bottom=58,
    )
    bars(fig, found, "group", "iterationMS")
    bars(fig, found, "group", "usefulTFPerGPU", row=1)
    return legend(fig)


def memory(table: pd.DataFrame) -> go.Figure:
    """Peak memory over all layers: allocated, and reserved by the allocator."""
    title = "Packing: peak memory"
    found = _grouped(tables.packing(table))
    if found["peakAllocatedGiB"].isna().all():
        return empty(title, _NONE)
    found["reserved"] = found["peakReservedBytes"].astype("Float64").astype(float) / tables.GIB
    fig = grid(title, [("", _x(found))], [{"title": "peak memory [GiB]"}], bottom=58)
    bars(fig, found, "group", "peakAllocatedGiB")
    ticks_over_bars(fig, found, "group", "reserved", "reserved by the allocator")
    fig.update_layout(scattermode="group", scattergap=0.25)
    return legend(fig)


def _grouped(found: pd.DataFrame) -> pd.DataFrame:
    group = found["profile"].astype(str) + "<br>EP " + found["ep"].astype(str)
    return found.assign(group=group)


def _x(found: pd.DataFrame) -> Axis:
    order = _grouped(found).sort_values(["ep", "profile"])["group"].drop_duplicates()
    return {"title": "profile and EP [ranks]", "type": "category", "categoryarray": list(order)}
