"""Every figure of the workbench: pure functions from a table to a plotly figure.

A figure takes any table of `load_table` and says so when the selection has nothing for it. To add
one, write such a function and a line in `FIGURES`. `draw.figure_data` gives what a figure shows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go

from workbench.case import CATEGORIES
from workbench.extensions import added
from workbench.hardware import Hardware
from workbench.records.protocols import protocols
from workbench.report import figures_model, figures_packing, tables
from workbench.report.draw import LOG, Axis, add, bars, empty, grid, legend, lines, rule, subtitle
from workbench.report.theme import COLUMN, DOUBLE, INK, SMALL

TIME, USEFUL = "iteration time [ms]", "useful rate [TFLOP/s per GPU]"
RATIO = "mok time / dist_moe time [1]"
IMBALANCE, WIDTH = "imbalance factor [1]", "expert width F [1]"

__all__ = ["FIGURES", "FigureSpec", "all_figures"]


def headline(table: pd.DataFrame) -> go.Figure:
    """Geometric mean of mok time over dist_moe time by group, with the range of the pairs."""
    title = "mok time over dist_moe time, by group"
    groups = tables.headline(table)
    if groups.empty:
        return empty(title, "no pair of dist_moe and mok in this selection")
    names = [f"{name} ({n})" for name, n in groups[["group", "pairs"]].itertuples(index=False)]
    span = [min(groups["lowest"].min(), 1) - 0.04, max(groups["highest"].max(), 1) + 0.04]
    y: Axis = {
        "title": "group (number of pairs) [-]",
        "categoryarray": names[::-1],
        "range": [-0.6, len(names) - 0.4],
    }
    fig = grid(
        title,
        [("", {"title": RATIO, "range": span})],
        [y],
        panel_height=26 * len(names),
        left=int(26 + 4.8 * max(map(len, names))),
    )
    rule(fig, [1, 1], [names[-1], names[0]], "equal time", dash="dash")
    add(
        fig,
        go.Scatter(
            x=groups["geometricMean"],
            y=names,
            name="geometric mean and range",
            mode="markers+text",
            text=[f"{v:.3f}" for v in groups["geometricMean"]],
            textposition="top center",
            textfont={"size": SMALL},
            marker={"color": "#0072B2", "size": 7},
            error_x={
                "type": "data",
                "symmetric": False,
                "thickness": 1.2,
                "width": 3,
                "color": INK,
                "array": groups["highest"] - groups["geometricMean"],
                "arrayminus": groups["geometricMean"] - groups["lowest"],
            },
            hovertemplate="%{y}<br>%{x:.4f}<extra></extra>",
        ),
    )
    return legend(fig, "mok over the fastest dist_moe pipeline")


def pairs(table: pd.DataFrame) -> go.Figure:
    """Each dist_moe pipeline against mok, workload by workload."""
    title = "dist_moe against mok, pair by pair"
    found = tables.pairs(table)
    if found.empty:
        return empty(title, "no pair of dist_moe and mok in this selection")
    modes = list(found["mode"].drop_duplicates())
    low, high = tables.extent(found, "ratio")
    span = [min(low, 1) - 0.03, high + 0.03]
    found["category"] = pd.Categorical(found["category"], CATEGORIES)
    order = found.sort_values(
        ["mode", "ep", "precision", "category", "F", "imbalance", "profile"], kind="stable"
    )
    labels = {
        mode: list(order.loc[order["mode"] == mode, "workload"].drop_duplicates()) for mode in modes
    }
    most = max(map(len, labels.values()))
    longest = max(len(name) for names in labels.values() for name in names)
    fig = grid(
        title,
        [(mode, {"title": RATIO, "range": span}) for mode in modes],
        [
            {
                "title": "workload [-]",
                "categoryarray": labels[mode][::-1],
                "range": [-0.7, len(labels[mode]) - 0.3],
                "tickfont": {"size": SMALL},
            }
            for mode in modes
        ],
        width=DOUBLE if len(modes) > 1 else COLUMN,
        panel_height=15 * most + 10,
        left=int(28 + 4.8 * longest),
        own_y=True,
    )
    for n, mode in enumerate(modes):
        ends = [labels[mode][-1], labels[mode][0]]
        rule(fig, [1, 1], ends, "equal time", "dash", n, n, mode)
        lines(fig, found[found["mode"] == mode], "ratio", "workload", n, n, mode, mode="markers")
    return legend(fig)


def balanced(table: pd.DataFrame) -> go.Figure:
    """Time and useful rate of one layer under balanced load, by EP and mode."""
    title = "One layer, balanced load"
    found = tables.balanced(table)
    if found.empty:
        return empty(title, "no balanced one-layer case in this selection")
    found["group"] = ep_and_mode(found)
    fig = grid(
        title,
        [("", grouped(found, "EP (mode) [ranks]"))],
        [{"title": TIME}, {"title": "useful rate [TFLOP/s]"}],
        panel_height=140,
        bottom=58,
    )
    bars(fig, found, "group", "iterationMS")
    bars(fig, found, "group", "usefulTFPerGPU", row=1)
    return legend(fig)


def imbalance(table: pd.DataFrame) -> go.Figure:
    """Time and useful rate over the load of rank 0."""
    rows = {"iterationMS": {"title": TIME, **LOG}, "usefulTFPerGPU": {"title": USEFUL, **LOG}}
    found = tables.single_layer(table)
    return _over(found, "imbalance", IMBALANCE, rows, "Imbalance: time and useful rate")


def slowdown(table: pd.DataFrame) -> go.Figure:
    """Time under imbalance over the same system's balanced time."""
    title = "Imbalance: slow-down against balanced load"
    found = tables.single_layer(table)
    found = found[found["slowdown"].notna()]
    rows: dict[str, Axis] = {"slowdown": {"title": "time / balanced time [1]"}}
    fig = _over(found, "imbalance", IMBALANCE, rows, title, close=False)
    if found.empty:
        return fig
    for n, (name, part) in enumerate(workloads(found)):
        loads = sorted({1.0, *part.loc[part["imbalance"] >= 1, "imbalance"]})
        rule(fig, loads, loads, "load of the busiest rank / mean load", "solid", n, 0, name)
    return legend(fig)


def width(table: pd.DataFrame) -> go.Figure:
    """Time and useful rate over the width of an expert."""
    rows: dict[str, Axis] = {
        "iterationMS": {"title": TIME, **LOG},
        "usefulTFPerGPU": {"title": USEFUL},
    }
    return _over(tables.width(table), "F", WIDTH, rows, "Width of an expert: time and useful rate")


def rates(table: pd.DataFrame) -> go.Figure:
    """Link rate as measured and HBM rate as modelled, over the load of rank 0."""
    found = tables.rates(table)
    found = found[found["category"] == "single_layer"]
    rows: dict[str, Axis] = {
        "meanTXGBps": {"title": "mean link TX [GB/s]", **LOG},
        "modeledHBMGBps": {"title": "modelled HBM [GB/s]", **LOG},
    }
    return _over(
        found, "imbalance", IMBALANCE, rows, "Link rate (measured) and HBM rate (modelled)"
    )


def memory(table: pd.DataFrame) -> go.Figure:
    """Peak memory of one layer: by EP under balanced load, and by width."""
    title = "Peak memory of one layer"
    by_ep, by_width = tables.balanced(table), tables.width(table)
    parts = [
        ("balanced load", "group", by_ep.assign(group=ep_and_mode(by_ep)), "EP (mode) [ranks]"),
        (
            "expert width",
            "group",
            by_width.assign(group=width_and_mode(by_width)),
            "F (mode, EP) [1]",
        ),
    ]
    parts = [part for part in parts if part[2]["peakAllocatedGiB"].notna().any()]
    if not parts:
        return empty(title, "no one-layer case with a memory figure in this selection")
    fig = grid(
        title,
        [(name, grouped(frame, x)) for name, _, frame, x in parts],
        [{"title": "peak allocated [GiB]"}],
        width=DOUBLE if len(parts) > 1 else COLUMN,
        bottom=70,
    )
    for n, (name, x, frame, _) in enumerate(parts):
        bars(fig, frame, x, "peakAllocatedGiB", n, 0, name)
    return legend(fig)


def _over(
    found: pd.DataFrame, x: str, x_title: str, rows: dict[str, Axis], title: str, close: bool = True
) -> go.Figure:
    """A column of panels for each mode and EP, a row for each of `rows`, a line per series."""
    found = found[found[list(rows)].notna().any(axis=1)]
    if found.empty:
        return empty(title, f"no case over {x_title.rsplit(' ', 1)[0]} in this selection")
    parts = workloads(found)
    ticks = sorted(found[x].unique())
    margin = 0.08 * (ticks[-1] - ticks[0]) or 0.5
    axis: Axis = {
        "title": x_title,
        "tickvals": ticks if len(ticks) <= 4 else None,
        "range": [ticks[0] - margin, ticks[-1] + margin],
        "tickformat": "~g",
    }
    fig = grid(
        title,
        [(name, axis) for name, _ in parts],
        list(rows.values()),
        width=DOUBLE if len(parts) > 1 else COLUMN,
        panel_height=190 if len(rows) == 1 else 160,
    )
    for n, (name, part) in enumerate(parts):
        for row, y in enumerate(rows):
            lines(fig, part, x, y, n, row, name)
    return legend(fig) if close else fig


def workloads(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """(name, rows) for each mode and EP, in that order."""
    groups = frame.groupby(["mode", "ep"], sort=True)
    return [(f"{mode}, EP {ep}", rows) for (mode, ep), rows in groups]


def ep_and_mode(frame: pd.DataFrame) -> "pd.Series[str]":
    """Category of a grouped bar: EP with the mode below it."""
    return frame["ep"].astype(str) + "<br>" + frame["mode"]


def width_and_mode(frame: pd.DataFrame) -> "pd.Series[str]":
    """Category of a grouped bar: F with mode and EP below it."""
    return (
        frame["F"].astype(str)
        + "<br>"
        + frame["mode"].str[:5]
        + ".<br>EP "
        + frame["ep"].astype(str)
    )


def grouped(frame: pd.DataFrame, title: str) -> Axis:
    """The category axis of grouped bars, in the order of mode, EP and F."""
    order = frame.sort_values(["mode", "ep", "F"], kind="stable")["group"].drop_duplicates()
    return {"title": title, "type": "category", "categoryarray": list(order)}


@dataclass(frozen=True, kw_only=True)
class FigureSpec:
    """A figure of the report. `function` takes a table, and where `needs_hardware` also a Hardware
    (or None) that the cases are held against."""

    title: str
    function: Callable[..., go.Figure]
    caption: str
    needs_hardware: bool = False
    timed: bool = True
    """Whether it shows times or rates: then the protocol that ran stands below its title."""


_OURS = {
    "headline": FigureSpec(
        title="Headline",
        function=headline,
        caption="Time of mok over the time of dist_moe's fastest pipeline: geometric mean by group "
        "with its lowest and highest pair. Above 1, dist_moe is faster.",
    ),
    "pairs": FigureSpec(
        title="Pair by pair",
        function=pairs,
        caption="Time of mok over the time of each dist_moe pipeline on the same workload: "
        "i4 is imbalance 4, F1536 an expert width, A and B are load profiles over 10 layers.",
    ),
    "balanced": FigureSpec(
        title="Balanced load",
        function=balanced,
        caption="One layer, every rank with the same number of rows.",
    ),
    "imbalance": FigureSpec(
        title="Imbalance",
        function=imbalance,
        caption="Rank 0 receives so many times the mean load. Useful FLOP do not change with it, "
        "so the useful rate falls as the time grows.",
    ),
    "slowdown": FigureSpec(
        title="Slow-down",
        function=slowdown,
        caption="Time over the same system's balanced time. All ranks wait for the busiest one; "
        "below the black line part of the balanced time does not grow with the load.",
    ),
    "width": FigureSpec(
        title="Expert width", function=width, caption="Balanced load, experts of different width F."
    ),
    "packing_load": FigureSpec(
        title="Packing: load",
        function=figures_packing.load,
        caption="mok pads each expert to 256 rows, keeps a fixed number of rows per layer and "
        "replays the rest in backward; dist_moe's scratch is a hard bound.",
        timed=False,
    ),
    "packing_slot": FigureSpec(
        title="Packing: slot and scratch",
        function=figures_packing.slot,
        caption="Bytes of the fullest rank (bars), and what is reserved (lines). What does not fit "
        "the slot is recomputed in backward; what does not fit the scratch is fatal.",
        timed=False,
    ),
    "packing_time": FigureSpec(
        title="Packing: time",
        function=figures_packing.time,
        caption="Forward and backward over all layers of a profile.",
    ),
    "packing_memory": FigureSpec(
        title="Packing: memory",
        function=figures_packing.memory,
        caption="Peak memory allocated (bars) and reserved by the allocator (lines).",
        timed=False,
    ),
    "roofline": FigureSpec(
        title="Roofline",
        function=figures_model.roofline,
        caption="Mean rank. An imbalanced case lies below its balanced one, because the mean rank "
        "waits. No MXFP8 peak is published; the FP8 peak stands in for it.",
        needs_hardware=True,
    ),
    "floors": FigureSpec(
        title="Floors",
        function=figures_model.floors,
        caption="Compute, HBM and link time of each layer's busiest rank at the device's peaks; "
        "the largest binds. 100 % would be the peak.",
        needs_hardware=True,
    ),
    "rates": FigureSpec(
        title="Link and HBM rates",
        function=rates,
        caption="Link TX from counters, mean over ranks; HBM bytes from the study's model.",
    ),
    "memory": FigureSpec(
        title="Peak memory",
        function=memory,
        caption="One layer: weights, buffers and activations.",
        timed=False,
    ),
}


FIGURES: dict[str, FigureSpec] = added("FIGURES", _OURS, FigureSpec)
"""Every figure of a report, by name; those of the user's own come last."""


def all_figures(
    table: pd.DataFrame,
    hardware: Hardware | None = None,
    hardware_file: str | None = None,
    names: Sequence[str] = tuple(FIGURES),
    every_device: bool = False,
) -> dict[str, go.Figure]:
    """The named figures of a table. Those that need a device show the cases measured on it, or
    with `every_device` hold all cases against it."""
    own = table
    if hardware is not None and not every_device:
        own = tables.on_device(table, hardware.name, hardware_file)
    found = {}
    for name in names:
        spec = FIGURES[name]
        shown = own if spec.needs_hardware else table
        fig = spec.function(shown, hardware) if spec.needs_hardware else spec.function(shown)
        found[name] = subtitle(fig, protocols(shown)) if spec.timed else fig
    return found
