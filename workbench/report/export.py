"""Figures as files: HTML, SVG, PDF, PNG, and beside each the CSV of exactly what it shows.

All static files of a batch come from one browser. Without one there are HTML and CSV, and
`Exported.skipped` says what is missing and why. Every file appears under its name when complete.
"""

import base64
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import plotly.graph_objects as go
from plotly.io import to_html
from plotly.offline import get_plotlyjs

from workbench.files import write_atomic
from workbench.report.figure_data import figure_data

Format = Literal["html", "svg", "pdf", "png"]
STATIC: tuple[Format, ...] = ("svg", "pdf", "png")
FORMATS: tuple[Format, ...] = ("html", *STATIC)
PNG_SCALE = 3
"""Image pixels to a CSS pixel: 288 dpi at column width."""
PLOTLY_JS = "plotly.min.js"
BUTTONS = 24
"""Height in px of plotly's row of buttons."""

_TABS = 2
_SECONDS_PER_FILE = 60


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Files of a batch: figure name -> format or "csv" -> path, and why any were left out."""

    files: Mapping[str, Mapping[str, Path]]
    skipped: str = ""
    errors: tuple[str, ...] = field(default=())

    def image(self, name: str) -> dict[str, str]:
        """A figure as a MIME bundle for a notebook: the SVG, else the PNG, else only text."""
        files = self.files[name]
        if "svg" in files:
            return {"image/svg+xml": _slim(files["svg"].read_text())}
        if "png" in files:
            return {"image/png": base64.b64encode(files["png"].read_bytes()).decode()}
        return {"text/plain": f"{name}: no static image ({self.skipped or 'not asked for'})"}

    def show(self, name: str) -> None:
        """Display a figure in a notebook."""
        from IPython.display import display

        display(self.image(name), raw=True)


def _slim(svg: str) -> str:
    """An SVG without the style properties that state their default, a fifth of its size."""
    svg = re.sub(r"(?:fill-|stroke-)?opacity: 1; ?|vector-effect: none; ?", "", svg)
    return re.sub(
        r"rgb\((\d+), (\d+), (\d+)\)", lambda m: "#" + bytes(map(int, m.groups())).hex(), svg
    )


def find_browser() -> tuple[str | None, str]:
    """(path of a Chrome or Chromium, "") or (None, why there is none).

    `BROWSER_PATH` counts alone where it is set; else PATH, the usual places, and the Chrome that
    `plotly_get_chrome` downloads.
    """
    given = os.environ.get("BROWSER_PATH")
    if given:
        found = shutil.which(given)
        return found, "" if found else f"BROWSER_PATH={given} must name a program"
    from choreographer.browsers.chromium import Chromium

    found = Chromium.find_browser(skip_local=False)
    reason = "" if found else "no Chrome or Chromium found (set BROWSER_PATH, or install one)"
    return found, reason


def figure_html(fig: go.Figure, **options: Any) -> str:
    """A figure for a browser, which draws its row of buttons over the figure's upper edge: the
    title is that much lower than on paper. `options` are plotly's."""
    title = fig.layout.title.pad.t or fig.layout.template.layout.title.pad.t or 0
    shown = go.Figure(fig).update_layout(
        height=fig.layout.height + BUTTONS,
        margin={"t": fig.layout.margin.t + BUTTONS},
        title={"pad": {"t": title + BUTTONS}},
    )
    return to_html(shown, config={"displaylogo": False}, **options)


def export_figures(
    figures: Mapping[str, go.Figure], folder: Path, formats: Sequence[str] = FORMATS
) -> Exported:
    """Write `figures` into `folder` as `<name>.<format>` and `<name>.csv`.

    HTML files share `plotly.min.js` in the folder. Raises InputError where the folder cannot be
    written; without a working browser the static formats are skipped, and `skipped` says so.
    """
    files: dict[str, dict[str, Path]] = {name: {} for name in figures}
    if "html" in formats:
        write_atomic(folder / PLOTLY_JS, get_plotlyjs())
    for name, fig in figures.items():
        files[name]["csv"] = folder / f"{name}.csv"
        write_atomic(files[name]["csv"], figure_data(fig).to_csv(index=False))
        if "html" in formats:
            files[name]["html"] = folder / f"{name}.html"
            write_atomic(files[name]["html"], figure_html(fig, include_plotlyjs=PLOTLY_JS))
    wanted = [fmt for fmt in STATIC if fmt in formats]
    if not wanted:
        return Exported(files=files)
    browser, reason = find_browser()
    if browser is None:
        return Exported(files=files, skipped=f"{', '.join(wanted)} skipped: {reason}")
    with tempfile.TemporaryDirectory(prefix="figures-") as scratch:
        errors = _render(figures, wanted, Path(scratch), browser)
        for name in figures:
            for fmt in wanted:
                made = Path(scratch) / f"{name}.{fmt}"
                if made.is_file() and made.stat().st_size:
                    files[name][fmt] = folder / made.name
                    write_atomic(files[name][fmt], made.read_bytes())
    missing = [f"{n}.{fmt}" for n in figures for fmt in wanted if fmt not in files[n]]
    told = f"{', '.join(missing)} skipped: {browser} failed: {errors[0] if errors else ''}"
    return Exported(files=files, skipped=told if missing else "", errors=tuple(errors))


def _render(
    figures: Mapping[str, go.Figure], formats: Sequence[str], folder: Path, browser: str
) -> list[str]:
    """Render all figures in one browser; returns what went wrong, in words."""
    import kaleido

    jobs: list[Any] = [
        {
            "fig": fig,
            "path": str(folder / f"{name}.{fmt}"),
            "opts": {"format": fmt, "scale": PNG_SCALE if fmt == "png" else 1},
        }
        for name, fig in figures.items()
        for fmt in formats
    ]
    # mathjax=False: kaleido would otherwise load it over the network
    options = {"n": _TABS, "mathjax": False, "path": browser, "timeout": _SECONDS_PER_FILE}
    for name in ("kaleido", "choreographer"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        failed = kaleido.write_fig_from_object_sync(jobs, kopts=options)
    except Exception as error:  # a browser that is there but does not start raises many kinds
        return [f"{type(error).__name__}: {error}"]
    return [f"{type(error).__name__}: {error}" for error in failed or ()]
