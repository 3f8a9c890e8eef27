"""Figures of the explorers: panels with axes of their own, put together as plain plotly JSON.

An explorer draws anew at every move of a slider, so its figure is a dict: cheap to make and to
compare with the one before, and validated where it is shown. The look is that of every other
figure. Traces are made by `line`, `band`, `points`, `bar` and `rule`; a trace's `meta` is its
panel, its `name` the entry in the legend.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from workbench.records.protocols import HIGH, LOW
from workbench.report.draw import LOG
from workbench.report.theme import DOUBLE, INK, SMALL, TEMPLATE, TEXT, Style

Trace = dict[str, Any]
Spec = dict[str, Any]
"""A figure as plotly takes it: {"data": [trace, ...], "layout": {...}}."""

LEFT, RIGHT, TITLE, PANEL_TITLE, COLUMN_GAP, ROW_GAP, BOTTOM = 54, 18, 34, 18, 66, 88, 72
PANEL_HEIGHT = 168
LEGEND_ROW, LEGEND_MARK = 19, 44
NARROWEST = 560
"""Width in px, in a browser, down to which the legend has room below the panels."""

PREDICTED, PUBLISHED, MEASURED = "predicted", "published", "measured (own)"
ELSEWHERE = "measured (own, other device)"
OBSERVED = (PUBLISHED, MEASURED, ELSEWHERE)
"""The origins of points that are laid over predictions."""
_ORIGIN_MARK = {PUBLISHED: ("circle", 7), MEASURED: ("star", 11), ELSEWHERE: ("star-open", 11)}


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel. Titles of axes end with the unit in brackets; `log_*` makes an axis logarithmic,
    `zero` starts the y axis at 0, `thousands` writes its ticks as 50k, `category` gives the order
    of a categorical x axis."""

    title: str
    x: str
    y: str
    log_x: bool = False
    log_y: bool = False
    zero: bool = True
    thousands: bool = False
    category: tuple[str, ...] = ()


def explorer_figure(
    title: str, panels: Sequence[Panel], traces: Sequence[Trace], barmode: str = "stack"
) -> Spec:
    """`traces` in `panels`, two to a row, with one legend below for all of them.

    The layout depends on titles and names only, never on data, so that a user's zoom and selection
    outlive a change of state: axes find their ranges themselves.
    """
    seen: set[str] = set()
    data = []
    numbers = {panel.title: n for n, panel in enumerate(panels)}
    for trace in traces:
        n = numbers[trace["meta"]]
        shown = len(trace["x"]) > 0 and trace.get("showlegend", True) and trace["name"] not in seen
        if shown:
            seen.add(trace["name"])
        axes = {"xaxis": _axis_id("x", n), "yaxis": _axis_id("y", n)}
        data.append(trace | axes | {"legendgroup": trace["name"], "showlegend": shown})
    names = tuple(trace["name"] for trace in data if trace["showlegend"])
    return {"data": data, "layout": _layout(title, tuple(panels), names, barmode)}


def _axis_id(axis: str, n: int) -> str:
    return f"{axis}{n + 1 if n else ''}"


@lru_cache(maxsize=64)
def _layout(title: str, panels: tuple[Panel, ...], names: tuple[str, ...], barmode: str) -> Spec:
    """Margins and heights in px, as in `draw.grid`; the width is that of two columns."""
    rows = math.ceil(len(panels) / 2)
    entry = 0.56 * SMALL * max(map(len, names), default=1)
    per_row = max(1, int((NARROWEST - LEFT - RIGHT) // (entry + LEGEND_MARK)))
    below = LEGEND_ROW * math.ceil(len(names) / per_row) + 8
    inner_w = DOUBLE - LEFT - RIGHT
    inner_h = rows * (PANEL_HEIGHT + ROW_GAP) - ROW_GAP
    panel_w = (inner_w - COLUMN_GAP) / 2
    layout: Spec = {
        "template": TEMPLATE,
        "title": {"text": f"<b>{title}</b>"},
        "width": DOUBLE,
        "height": TITLE + PANEL_TITLE + inner_h + BOTTOM + below,
        "margin": {"l": LEFT, "r": RIGHT, "t": TITLE + PANEL_TITLE, "b": BOTTOM + below, "pad": 0},
        "barmode": barmode,
        "hovermode": "closest",
        "uirevision": "kept",
        "selectionrevision": "kept",
        "annotations": [],
        "legend": {
            "title": {"text": ""},
            "entrywidth": entry,
            "x": 6 / DOUBLE,
            "itemsizing": "constant",
        },
    }
    for n, panel in enumerate(panels):
        left = (n % 2) * (panel_w + COLUMN_GAP) / inner_w
        top = 1 - (n // 2) * (PANEL_HEIGHT + ROW_GAP) / inner_h
        domain = {
            "x": [left, min(left + panel_w / inner_w, 1)],
            "y": [max(top - PANEL_HEIGHT / inner_h, 0), top],
        }
        axes: dict[str, Spec] = {
            "x": {"title": {"text": panel.x}},
            "y": {"title": {"text": panel.y}},
        }
        for name, log in (("x", panel.log_x), ("y", panel.log_y)):
            axes[name] |= (
                LOG if log else {"tickformat": "~s" if name == "y" and panel.thousands else "~g"}
            )
        if panel.zero and not panel.log_y:
            axes["y"]["rangemode"] = "tozero"
        if panel.category:
            axes["x"] |= {
                "type": "category",
                "categoryorder": "array",
                "categoryarray": list(panel.category),
                "tickangle": 0,
            }
        for name, other in (("x", "y"), ("y", "x")):
            axes[name] |= {"domain": domain[name], "anchor": _axis_id(other, n)}
            layout[f"{name}axis{n + 1 if n else ''}"] = axes[name]
        layout["annotations"].append(
            {
                "text": panel.title,
                "x": left + panel_w / inner_w / 2,
                "xref": "paper",
                "y": top,
                "yref": "paper",
                "xanchor": "center",
                "yanchor": "bottom",
                "showarrow": False,
                "font": {"size": TEXT},
            }
        )
    return layout


def line(panel: Panel, name: str, x: Any, y: Any, style: Style, width: float = 1.5) -> Trace:
    """A curve of one series; it ends where `y` is NaN."""
    return _scatter(
        panel,
        name,
        x,
        np.asarray(y, np.float64),
        mode="lines",
        line={"color": style.colour, "dash": style.dash, "width": width},
    )


def band(panel: Panel, name: str, x: Any, low: Any, high: Any, colour: str) -> Trace:
    """The area between two curves over the same `x`, as far as both are known."""
    x, low, high = (np.asarray(values, np.float64) for values in (x, low, high))
    known = np.isfinite(low) & np.isfinite(high)
    x, low, high = x[known], low[known], high[known]
    return _scatter(
        panel,
        name,
        np.concatenate([x, x[::-1]]),
        np.concatenate([low, high[::-1]]),
        mode="lines",
        fill="toself",
        fillcolor=translucent(colour, 0.18),
        hoverinfo="skip",
        line={"width": 0, "color": colour},
    )


def points(
    panel: Panel,
    name: str,
    x: Any,
    y: Any,
    colour: str,
    origin: str = "",
    ids: Sequence[str] = (),
    symbol: str = "circle",
    size: int = 8,
) -> Trace:
    """Markers, where `y` is known; those of an `origin` have its symbol and a dark edge."""
    known = [n for n, value in enumerate(y) if value is not None and value == value]
    if len(known) < len(y):
        x, y, ids = [x[n] for n in known], [y[n] for n in known], [ids[n] for n in known if ids]
    symbol, size = _ORIGIN_MARK.get(origin, (symbol, size))
    edge = {"width": 1, "color": INK if origin else colour}
    hover = "%{customdata}<br>" if len(ids) else ""
    return _scatter(
        panel,
        name,
        x,
        y,
        mode="markers",
        customdata=list(ids) or None,
        marker={"color": colour, "symbol": symbol, "size": size, "line": edge},
        hovertemplate=f"{name}<br>{hover}x = %{{x}}<br>y = %{{y:.4g}}<extra></extra>",
    )


def with_spread(
    trace: Trace, rows: Sequence[Mapping[str, Any]], field: str, axis: str = "y"
) -> Trace:
    """The points of `rows` with bars from p20 to p80 of the measured time along `axis`, which shows
    `field`: a time in ms, or a rate, whose amount does not vary. As it is where no row has them."""
    times = [[row.get(f"iterationMS{end}", math.nan) for end in (LOW, "", HIGH)] for row in rows]
    low, middle, high = np.asarray(times, np.float64).reshape(-1, 3).T
    if np.isnan(low).all():
        return trace
    value = np.asarray([row[field] for row in rows], np.float64)
    if field != "iterationMS":
        low, high = middle**2 / high, middle**2 / low
    return trace | {
        f"error_{axis}": {
            "type": "data",
            "symmetric": False,
            "array": value * (high / middle - 1),
            "arrayminus": value * (1 - low / middle),
            "thickness": 1,
            "width": 4,
            "color": INK,
        }
    }


def spread_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """p20 and p80 of a measured time and whether it is noisy, for a table; empty if not known."""
    if not row.get("iterationMS_p20", math.nan) > 0:
        return {}
    return {name: row[name] for name in ("iterationMS_p20", "iterationMS_p80", "noisy")}


def bar(
    panel: Panel,
    name: str,
    x: Any,
    y: Any,
    colours: str | Sequence[str],
    pattern: str = "",
    low: Any = None,
    high: Any = None,
    text: Sequence[str] = (),
) -> Trace:
    """Bars, with the interval from `low` to `high` on top where it is given; none where `y` is
    NaN."""
    if any(value != value for value in y):
        y = np.asarray(y, np.float64)  # in a list the browser would get NaN as a text
    trace = {
        "type": "bar",
        "meta": panel.title,
        "name": name,
        "x": x,
        "y": y,
        "marker": {
            "color": colours,
            "line": {"color": INK, "width": 0.5},
            "pattern": {
                "shape": pattern,
                "size": 5,
                "fgcolor": "white",
                "fillmode": "overlay",
                "solidity": 0.35,
            },
        },
        "hovertemplate": f"{name}<br>%{{x}}<br>%{{y:.4g}}<extra></extra>",
    }
    if text:
        trace |= {
            "text": list(text),
            "textposition": "inside",
            "insidetextanchor": "start",
            "textangle": 0,
            "textfont": {"size": SMALL},
            "constraintext": "none",
        }
    if low is not None:
        y, low, high = (np.asarray(values, np.float64) for values in (y, low, high))
        trace["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": high - y,
            "arrayminus": y - low,
            "thickness": 1.2,
            "width": 3,
            "color": INK,
        }
    return trace


def rule(
    panel: Panel,
    name: str,
    x: Any,
    y: Any,
    dash: str = "dash",
    colour: str = INK,
    width: float = 1.2,
    shape: str = "linear",
) -> Trace:
    """A reference line through given points; `shape` "hvh" makes steps centred on them."""
    look = {"color": colour, "dash": dash, "width": width, "shape": shape}
    return _scatter(panel, name, x, y, mode="lines", hoverinfo="name+y", line=look)


def _scatter(panel: Panel, name: str, x: Any, y: Any, **look: Any) -> Trace:
    return {"type": "scatter", "meta": panel.title, "name": name, "x": x, "y": y, **look}


def translucent(colour: str, opacity: float) -> str:
    """`#rrggbb` as an rgba() text."""
    red, green, blue = (int(colour[n : n + 2], 16) for n in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity:g})"


def refused(panel: Panel, x: Sequence[str], words: Sequence[str]) -> Trace:
    """Words that stand where bars would, at the foot of a panel: why there is none."""
    return _scatter(
        panel,
        "does not run",
        list(x),
        [0.0] * len(x),
        mode="text",
        text=list(words),
        textposition="top center",
        showlegend=False,
        hoverinfo="skip",
        textfont={"size": SMALL, "color": "#D55E00"},
        cliponaxis=False,
    )


def said_in(panel: Panel, message: str, x: float = 0.5, y: float = 0.5) -> Trace:
    """A text in the middle of a panel that has nothing to show; "" shows nothing."""
    shown = 1 if message else 0
    return _scatter(
        panel,
        "note",
        [x] * shown,
        [y] * shown,
        mode="text",
        text=[message],
        showlegend=False,
        hoverinfo="skip",
        textfont={"size": TEXT},
    )
