"""Figures that hold cases against a device's peaks."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from workbench.hardware import Hardware
from workbench.model.roofline import attainable_tflops
from workbench.records.protocols import HIGH, LOW
from workbench.report import tables
from workbench.report.draw import LOG, Axis, empty, grid, legend, lines, rule
from workbench.report.theme import DOUBLE

_ROOFS = {"bf16": ("BF16 roof", "solid"), "mxfp8": ("FP8 roof (for MXFP8)", "dash")}


def roofline(table: pd.DataFrame, hardware: Hardware | None) -> go.Figure:
    """Useful rate of all cases over their FLOP per modelled HBM byte, under the roofs."""
    title = "Roofline"
    if hardware is None or not table["iterationMS"].notna().any():
        return empty(title, _reason(hardware))
    found = tables.roofline(table, hardware)
    low, high = found["intensity"].min() / 1.5, found["intensity"].max() * 1.5
    peaks = {p: hardware.peak_tflops(p) for p in _ROOFS if p in set(found["precision"])}
    bottom, top = tables.extent(found, "TFLOPs")[0] / 1.6, max(peaks.values()) * 1.4
    fig = grid(
        f"{title} of {hardware.title}, cases on {_devices(found)}",
        [
            (
                "",
                {
                    "title": "useful FLOP per modelled HBM byte [FLOP/B]",
                    **LOG,
                    "range": np.log10([low, high]),
                },
            )
        ],
        [{"title": "useful rate [TFLOP/s per GPU]", **LOG, "range": np.log10([bottom, top])}],
        width=DOUBLE,
        panel_height=300,
    )
    for precision, peak in peaks.items():
        name, dash = _ROOFS[precision]
        x = np.unique([low, *np.clip([peak / hardware.hbm_tb_s], low, high), high])
        roof = attainable_tflops(x, peak_tflops=peak, hardware=hardware)
        rule(fig, list(x), list(roof), name, dash, width=1.5)
    lines(fig, found, "intensity", "TFLOPs", panel="all cases", mode="markers")
    return legend(fig)


def floors(table: pd.DataFrame, hardware: Hardware | None) -> go.Figure:
    """How much of the time the busiest rank's binding floor explains, and which floor binds."""
    title = "Floor against measured time"
    if hardware is None or not table["iterationMS"].notna().any():
        return empty(title, _reason(hardware))
    found = tables.roofline(table, hardware)
    found["percent"] = 100 * found["busiestFloorFraction"]
    for end, of in ((LOW, HIGH), (HIGH, LOW)):
        over = found["iterationMS"] / tables.time_spread(found)[of[1:]]
        found[f"percent{end}"] = found["percent"] * over
    parts = [(name, found[found["busiestBinds"] == name]) for name in ("compute", "HBM", "link")]
    parts = [(name, part) for name, part in parts if len(part)]
    shortest, longest = tables.extent(found, "iterationMS")
    span = np.log10([shortest / 1.5, longest * 1.5])
    highest = tables.extent(found, "percent")[1]
    axis: Axis = {"title": "iteration time [ms]", **LOG, "range": span}
    fig = grid(
        f"Floor on {hardware.title} against time on {_devices(found)}",
        [(f"{name} binds ({len(part)} cases)", axis) for name, part in parts],
        [{"title": "floor / time [%]", "range": [0, max(100, highest * 1.05)]}],
        width=DOUBLE,
        panel_height=220,
    )
    for n, (name, part) in enumerate(parts):
        lines(fig, part, "iterationMS", "percent", n, 0, f"{name} binds", mode="markers")
    return legend(fig)


def _devices(found: pd.DataFrame) -> str:
    return ", ".join(found["device"].unique())


def _reason(hardware: Hardware | None) -> str:
    if hardware is None:
        return "no peaks are known for the device of this selection"
    return f"no case on {hardware.name} in this selection"
