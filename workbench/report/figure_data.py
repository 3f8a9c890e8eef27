"""The numbers that a figure shows, as a table."""

import pandas as pd
import plotly.graph_objects as go

COLUMNS = [
    "series",
    "panel",
    "x_axis",
    "x",
    "x_low",
    "x_high",
    "y_axis",
    "y",
    "y_low",
    "y_high",
    "case",
]


def figure_data(fig: go.Figure) -> pd.DataFrame:
    """Exactly what a figure shows, one row per point, in the order drawn.

    Columns: series, panel, title of the x axis, x and the ends of its error bar, the same for y, id
    of the case. Cells are empty where a trace has no such value.
    """
    frames = []
    for trace in fig.data:
        axes = {a: fig.layout[getattr(trace, f"{a}axis").replace(a, f"{a}axis")] for a in "xy"}
        points = {"series": trace.name, "panel": trace.meta or ""}
        points |= {"x_axis": axes["x"].title.text, "y_axis": axes["y"].title.text}
        frame = pd.DataFrame({"x": pd.Series(trace.x), "y": pd.Series(trace.y)}).assign(**points)
        for axis, low, high in (("x", "x_low", "x_high"), ("y", "y_low", "y_high")):
            bar = getattr(trace, f"error_{axis}", None)
            if bar is not None and bar.array is not None:
                frame[low] = frame[axis] - pd.Series(bar.arrayminus)
                frame[high] = frame[axis] + pd.Series(bar.array)
        if trace.customdata is not None:
            frame["case"] = pd.Series(trace.customdata)
        frames.append(frame.astype({"x": object, "y": object}))
    if not frames:
        return pd.DataFrame(columns=COLUMNS)
    return pd.concat(frames, ignore_index=True).reindex(columns=COLUMNS)
