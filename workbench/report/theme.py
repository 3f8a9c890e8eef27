"""One look for every figure: colours, marks, sizes and wording.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart. Each system also has
a marker, a dash and a bar pattern of its own, so that a figure survives grey print. Sizes are CSS
pixels (96 to the inch): a figure exported at `COLUMN` or `DOUBLE` needs no scaling in a paper.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import plotly.graph_objects as go

from workbench.systems import TRIPLES

COLUMN = 336
"""Width of one column of a paper, 3.5 in or 89 mm, in px."""
DOUBLE = 688
"""Width of two columns, 7.17 in or 182 mm, in px."""

FONT = "Arial, Helvetica, Liberation Sans, DejaVu Sans, sans-serif"
TEXT, SMALL, LARGE = 10, 9, 12
"""Font sizes in px: axis titles and legend; tick labels; figure title."""
INK, FAINT = "#222222", "#dddddd"


@dataclass(frozen=True, kw_only=True)
class Style:
    """How one system looks: plotly names for marker symbol, line dash and bar pattern."""

    colour: str
    symbol: str
    dash: str
    pattern: str


_LOOKS: Mapping[tuple[str, str, str], Style] = {
    ("dist_moe", "standard", "bf16"): Style(
        colour="#0072B2", symbol="circle", dash="solid", pattern=""
    ),
    ("dist_moe", "staged", "mxfp8"): Style(
        colour="#56B4E9", symbol="square-open", dash="5px,3px", pattern="/"
    ),
    ("dist_moe", "mega", "mxfp8"): Style(
        colour="#009E73", symbol="diamond", dash="2px,2px", pattern="\\"
    ),
    ("mok", "native", "bf16"): Style(
        colour="#D55E00", symbol="triangle-up", dash="8px,2px,2px,2px", pattern="x"
    ),
    ("mok", "native", "mxfp8"): Style(
        colour="#E69F00", symbol="triangle-down-open", dash="10px,3px", pattern="."
    ),
    ("baseline", "alltoall", "bf16"): Style(
        colour="#CC79A7", symbol="cross", dash="longdashdot", pattern="+"
    ),
}
_OTHER_SYMBOLS = ("star", "hexagram-open", "pentagon", "bowtie-open", "hourglass", "hexagon-open")
_OTHER_COLOURS = ("#117733", "#882255", "#332288", "#999933")


def _other(n: int) -> Style:
    """The look of the n-th system that has none of its own above."""
    colour = _OTHER_COLOURS[n % len(_OTHER_COLOURS)]
    symbol = _OTHER_SYMBOLS[n % len(_OTHER_SYMBOLS)]
    return Style(colour=colour, symbol=symbol, dash="3px,1px", pattern="|")


_OTHERS = [system for system in TRIPLES if system not in _LOOKS]
STYLES: Mapping[tuple[str, str, str], Style] = {
    system: _LOOKS[system] if system in _LOOKS else _other(_OTHERS.index(system))
    for system in TRIPLES
}
"""(backend, pipeline, precision) -> its look, the same in every figure; also the legend's order."""

PRECISIONS: Mapping[str, str] = {"bf16": "BF16", "mxfp8": "MXFP8"}
LEGEND_TITLE = "system (backend, pipeline, precision)"


def style_of(system: tuple[str, str, str], variant: int = 0) -> Style:
    """The look of a system; of its further series (`variant` 1, 2 ...: another device, origin or
    shape in the same figure) the colour stays and the marks change."""
    style = STYLES[system]
    if variant == 0:
        return style
    symbol = _OTHER_SYMBOLS[(variant - 1) % len(_OTHER_SYMBOLS)]
    return replace(style, symbol=symbol, dash="longdashdot", pattern="-")


def system_name(system: tuple[str, str, str]) -> str:
    """`dist_moe mega MXFP8`."""
    backend, pipeline, precision = system
    return f"{backend} {pipeline} {PRECISIONS.get(precision, precision)}"


_AXIS = {
    "showline": True,
    "mirror": "all",
    "linecolor": INK,
    "linewidth": 1,
    "ticks": "",
    "tickfont": {"size": SMALL},
    "gridcolor": FAINT,
    "zeroline": False,
    "automargin": False,
    "title": {"font": {"size": TEXT}, "standoff": 4},
}

TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": FONT, "size": TEXT, "color": INK},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "colorway": [style.colour for style in STYLES.values()],
        "title": {
            "font": {"size": LARGE},
            "x": 0.0,
            "xref": "container",
            "xanchor": "left",
            "y": 1,
            "yanchor": "top",
            "pad": {"l": 8, "t": 8},
        },
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "bargap": 0.25,
        "bargroupgap": 0.05,
        "legend": {
            "orientation": "h",
            "xref": "container",
            "xanchor": "left",
            "y": 0,
            "yref": "container",
            "yanchor": "bottom",
            "font": {"size": SMALL},
            "title": {"side": "top", "font": {"size": SMALL}},
            "traceorder": "normal",
            "tracegroupgap": 0,
            "entrywidthmode": "pixels",
        },
    }
)
