"""Panels and traces: the little that every figure is built from, and what a figure shows as data.

A figure is a grid of panels over shared axes; each axis exists once and has a title with its unit.
Margins and heights are computed in px, so that what is exported does not depend on a browser.
"""

import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from workbench.records.protocols import HIGH, LOW, NOISE
from workbench.report.figure_data import figure_data
from workbench.report.theme import COLUMN, INK, LEGEND_TITLE, SMALL, TEMPLATE, TEXT, Style, style_of

Axis = dict[str, Any]
"""Properties of a plotly axis; `title` is a text that ends with the unit in brackets."""

_LEFT, _RIGHT, _TITLE, _PANEL_TITLE, _GAP, _BOTTOM = 50, 10, 32, 16, 16, 44
SUBTITLE_ROW = 12
_LEGEND_TITLE, _LEGEND_ROW, _LEGEND_MARK = 20, 19, 45
"""What plotly takes for the title of a legend, a row, and beside the text of an entry, px."""

_TICKS_125 = [m * 10.0**e for e in range(-4, 7) for m in (1, 2, 5)]

LOG = {"type": "log", "tickvals": _TICKS_125, "ticktext": [f"{v:g}" for v in _TICKS_125]}
NOISY = "noisy"
"""Name of the rings around cases whose windows differ by more than the record allows."""


def grid(
    title: str,
    xs: Sequence[tuple[str, Axis]],
    ys: Sequence[Axis],
    *,
    width: int = COLUMN,
    panel_height: int = 170,
    left: int = _LEFT,
    bottom: int = _BOTTOM,
    own_y: bool = False,
) -> go.Figure:
    """A figure without traces. `xs`: (panel title, x axis) per column; `ys`: y axis per row, or
    with `own_y` per column. Panel (column, row) is drawn on axes column + 1 and row + 1."""
    rows = 1 if own_y else len(ys)
    gap = left + 4 if own_y else _GAP
    longest = max(len(text) for name, axis in xs for text in (name, axis["title"]))
    narrowest = max(100, int(0.5 * TEXT * longest))
    width = max(width, left + _RIGHT + len(xs) * (narrowest + gap) - gap)
    top = _TITLE + _PANEL_TITLE * any(name for name, _ in xs)
    inner_w, inner_h = width - left - _RIGHT, rows * panel_height + (rows - 1) * _GAP
    panel_w = (inner_w - (len(xs) - 1) * gap) / len(xs)
    layout: dict[str, Any] = {
        "template": TEMPLATE,
        "title": {"text": f"<b>{title}</b>"},
        "width": width,
        "height": top + inner_h + bottom,
        "margin": {"l": left, "r": _RIGHT, "t": top, "b": bottom, "pad": 0},
        "annotations": [],
    }
    for n, (name, axis) in enumerate(xs):
        start = n * (panel_w + gap) / inner_w
        layout[f"xaxis{n + 1 if n else ''}"] = _titled(axis) | {
            "domain": [start, min(start + panel_w / inner_w, 1)],
            "anchor": f"y{n + 1 if own_y and n else rows if rows > 1 else ''}",
        }
        if name:
            layout["annotations"].append(
                {
                    "text": name,
                    "x": start + panel_w / inner_w / 2,
                    "xref": "paper",
                    "y": 1,
                    "xanchor": "center",
                    "yref": "paper",
                    "yanchor": "bottom",
                    "showarrow": False,
                    "font": {"size": TEXT},
                }
            )
    for n, axis in enumerate(ys):
        end = 1 if own_y else 1 - n * (panel_height + _GAP) / inner_h
        layout[f"yaxis{n + 1 if n else ''}"] = _titled(axis) | {
            "domain": [0 if own_y else max(end - panel_height / inner_h, 0), end],
            "anchor": f"x{n + 1 if own_y and n else ''}",
        }
    return go.Figure(layout=layout)


def _titled(axis: Axis) -> Axis:
    return axis | {"title": {"text": axis["title"]}}


def add(fig: go.Figure, trace: Any, column: int = 0, row: int = 0) -> None:
    """Draw a trace in a panel; a name gets one entry in the legend however often it is drawn."""
    seen = {old.name for old in fig.data}
    x, y = (f"{axis}{n + 1 if n else ''}" for axis, n in (("x", column), ("y", row)))
    trace.update(xaxis=x, yaxis=y, legendgroup=trace.name)
    trace.update(showlegend=trace.name not in seen and trace.showlegend is not False)
    fig.add_trace(trace)


def series(frame: pd.DataFrame) -> Iterator[tuple[str, Style, pd.DataFrame]]:
    """(name, look, rows) of each series of a frame made by `tables.with_series`."""
    for name, rows in frame.groupby("series", sort=False):
        first = rows.iloc[0]
        yield str(name), style_of(first["system"], int(first["variant"])), rows


def lines(
    fig: go.Figure,
    frame: pd.DataFrame,
    x: str,
    y: str,
    column: int = 0,
    row: int = 0,
    panel: str = "",
    mode: str = "lines+markers",
) -> None:
    """One line with markers, or with mode="markers" a cloud, per series."""
    for name, style, rows in series(frame[frame[y].notna()]):
        add(
            fig,
            go.Scatter(
                x=rows[x],
                y=rows[y],
                name=name,
                mode=mode,
                meta=panel,
                customdata=rows["id"],
                line={"color": style.colour, "dash": style.dash, "width": 1.5},
                marker={
                    "color": style.colour,
                    "symbol": style.symbol,
                    "size": 6,
                    "line": {"width": 1.2, "color": style.colour},
                },
                hovertemplate="%{customdata}<br>x = %{x}<br>y = %{y:.4g}<extra></extra>",
                **{
                    f"error_{axis}": bar
                    for axis, name in (("x", x), ("y", y))
                    if (bar := spread(rows, name, style.colour))
                },
            ),
            column,
            row,
        )
    rings(fig, frame[frame[y].notna()], x, y, column, row, panel)


def bars(
    fig: go.Figure,
    frame: pd.DataFrame,
    x: str,
    y: str,
    column: int = 0,
    row: int = 0,
    panel: str = "",
) -> None:
    """Grouped bars, one per series in each category of `x`."""
    for name, style, rows in series(frame[frame[y].notna()]):
        add(
            fig,
            go.Bar(
                x=rows[x],
                y=rows[y],
                name=name,
                meta=panel,
                customdata=rows["id"],
                offsetgroup=name,
                marker={
                    "color": style.colour,
                    "line": {"color": INK, "width": 0.5},
                    "pattern": {
                        "shape": style.pattern,
                        "size": 5,
                        "fgcolor": "white",
                        "fillmode": "overlay",
                        "solidity": 0.35,
                    },
                },
                hovertemplate="%{customdata}<br>%{y:.4g}<extra></extra>",
                **({"error_y": bar} if (bar := spread(rows, y, INK)) else {}),
            ),
            column,
            row,
        )
        rings(fig, rows, x, y, column, row, panel, name)


def spread(rows: pd.DataFrame, name: str, colour: str) -> dict[str, Any] | None:
    """The error bar of a column from its p20 to its p80, None where no row has them."""
    if f"{name}{LOW}" not in rows or f"{name}{HIGH}" not in rows:
        return None
    low, high = (rows[f"{name}{end}"].astype(float) for end in (LOW, HIGH))
    if low.isna().all():
        return None
    middle = rows[name].astype(float)
    cap = 2 if colour == INK else 4  # wider than a mark, within a bar
    return {
        "type": "data",
        "symmetric": False,
        "thickness": 1,
        "width": cap,
        "color": colour,
        "array": (high - middle).clip(lower=0),
        "arrayminus": (middle - low).clip(lower=0),
    }


def rings(
    fig: go.Figure,
    frame: pd.DataFrame,
    x: str,
    y: str,
    column: int,
    row: int,
    panel: str,
    bars_of: str = "",
) -> None:
    """A ring around each noisy case, over a bar of the series `bars_of` where it is given."""
    noisy = frame[frame["noisy"].eq(True).fillna(False)] if "noisy" in frame else frame[:0]
    if noisy.empty:
        return
    ring = go.Scatter(
        x=noisy[x],
        y=noisy[y],
        name=NOISY,
        mode="markers",
        meta=panel,
        customdata=noisy["id"],
        marker={"symbol": "circle-open", "size": 11, "color": INK, "line": {"width": 1.2}},
        hovertemplate="%{customdata}<br>noisy<extra></extra>",
    )
    if bars_of:
        ring.update(offsetgroup=bars_of)
        fig.update_layout(scattermode="group", scattergap=0.25)
    add(fig, ring, column, row)


def subtitle(fig: go.Figure, told: Sequence[str]) -> go.Figure:
    """`told` in small print below the title, with what error bars and rings mean where there are
    any; the figure grows by its lines. A figure that shows nothing stays as it is."""
    cases = figure_data(fig).dropna(subset="case")
    told = [*told]
    if cases[["x_low", "y_low"]].notna().any(axis=None):
        told.append("error bars: p20 to p80 over windows")
    if cases["series"].eq(NOISY).any():
        told.append(f"rings: {NOISY}, {NOISE}")
    if not told or not fig.data:
        return fig
    fits = int((fig.layout.width - 2 * _RIGHT) / (0.45 * SMALL))
    text = [part for one in told for part in textwrap.wrap(one, fits)]
    below = SUBTITLE_ROW * len(text)
    fig.update_layout(
        title={"subtitle": {"text": "<br>".join(text), "font": {"size": SMALL, "color": INK}}},
        height=fig.layout.height + below,
        margin={"t": fig.layout.margin.t + below},
    )
    return fig


def ticks_over_bars(
    fig: go.Figure, frame: pd.DataFrame, x: str, y: str, name: str, row: int = 0, panel: str = ""
) -> None:
    """A short black line over each of the grouped bars, all under one `name` in the legend."""
    slots = frame[x].nunique() * frame["series"].nunique() / 0.7
    bar = (fig.layout.width - fig.layout.margin.l - fig.layout.margin.r) / max(slots, 1)
    for group, _, rows in series(frame[frame[y].notna()]):
        add(
            fig,
            go.Scatter(
                x=rows[x],
                y=rows[y],
                name=name,
                mode="markers",
                meta=f"{panel}, {group}",
                customdata=rows["id"],
                offsetgroup=group,
                marker={
                    "symbol": "line-ew",
                    "size": 0.6 * bar,
                    "color": INK,
                    "line": {"width": 2, "color": INK},
                },
                hovertemplate="%{customdata}<br>%{y:.4g}<extra></extra>",
            ),
            0,
            row,
        )


def rule(
    fig: go.Figure,
    x: Sequence[float],
    y: Sequence[Any],
    name: str,
    dash: str = "solid",
    column: int = 0,
    row: int = 0,
    panel: str = "",
    width: float = 1,
) -> None:
    """A reference line through given points, black, with an entry in the legend."""
    add(
        fig,
        go.Scatter(
            x=list(x),
            y=list(y),
            name=name,
            mode="lines",
            meta=panel,
            line={"color": INK, "dash": dash, "width": width},
            hoverinfo="name",
        ),
        column,
        row,
    )


def legend(fig: go.Figure, title: str = LEGEND_TITLE) -> go.Figure:
    """The legend below the panels; the figure grows by its height, and where a name is longer than
    the figure is wide also in width. Call it last."""
    names = [trace.name for trace in fig.data if trace.showlegend]
    entry = 0.56 * SMALL * max(map(len, names), default=1)
    margin = fig.layout.margin
    width = max(fig.layout.width, int(entry + _LEGEND_MARK + 12))
    per_row = max(1, int((width - margin.l - margin.r) // (entry + _LEGEND_MARK)))
    height = _LEGEND_TITLE + _LEGEND_ROW * math.ceil(len(names) / per_row)
    fig.update_layout(
        legend={"title": {"text": title}, "entrywidth": entry, "x": 6 / width},
        width=width,
        height=fig.layout.height + height,
        margin={"b": margin.b + height},
    )
    return fig


def empty(title: str, message: str) -> go.Figure:
    """A figure that says why it shows nothing."""
    fig = go.Figure(layout={"template": TEMPLATE, "width": COLUMN, "height": 140})
    return fig.update_layout(
        title={"text": f"<b>{title}</b>"},
        xaxis={"visible": False},
        yaxis={"visible": False},
        margin={"l": _RIGHT, "r": _RIGHT, "t": _TITLE, "b": _RIGHT},
        annotations=[
            {
                "text": message,
                "showarrow": False,
                "x": 0.5,
                "y": 0.5,
                "xref": "paper",
                "yref": "paper",
            }
        ],
    )
