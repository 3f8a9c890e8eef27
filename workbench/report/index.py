"""`index.html` of a report: one page that needs no network, no server and no other file.

plotly is embedded once and draws every figure; the executed notebook is a page within the page.
Links lead to the files beside it.
"""

import base64
import logging
from collections.abc import Iterator
from importlib.metadata import files
from pathlib import Path
from typing import Any

import nbformat
from plotly.offline import get_plotlyjs

from workbench.files import write_atomic
from workbench.records.protocols import HIGH, LOW, STEPS, measured_how
from workbench.records.results import load_table
from workbench.report import tables
from workbench.report.export import Exported, figure_html
from workbench.report.figures import FIGURES
from workbench.report.page import render
from workbench.report.study_report import Report

_NOTEBOOK = "<!-- notebook -->"
_DATA = {
    "data/results.json": "the cases and their pairs as a result file",
    "data/cases.csv": "the cases as a table",
    "run.json": "parameters, inputs and times of this run",
}


def write_index(report: Report, exported: Exported, folder: Path) -> Path:
    """Write `folder`/index.html; `add_notebook` puts executed notebooks in. Returns its path."""
    page = render(
        "report",
        title=f"MoE Workbench report: {report.source.stem}",
        plotly=get_plotlyjs(),
        subtitle=_subtitle(report),
        warning=exported.skipped,
        numbers=tables.key_numbers(report.table),
        headline=_headline_table(report),
        figures=list(_figures(report, exported, folder)),
        notebook=_NOTEBOOK,
        data=[(name, what) for name, what in _DATA.items() if (folder / name).is_file()],
        facts=list(_facts(report)),
    )
    path = folder / "index.html"
    write_atomic(path, page)
    return path


def add_notebook(index: Path, notebook: Path) -> None:
    """Put an executed notebook into an index page, below those that it has, with a link to it."""
    section = render(
        "notebook_section",
        title=notebook.stem.replace("_", " "),
        path=notebook.relative_to(index.parent).as_posix(),
        page=notebook_html(notebook),
    )
    _add(index, section)


def add_measured(index: Path, folder: Path) -> None:
    """Put what this machine measured into an index page: device, times and figures of a sweep that
    notebook 06 has left in `folder`."""
    table = load_table(folder / "sweep" / "records")
    times = [f"{step}MS{end}" for step in STEPS for end in ("", LOW, HIGH)]
    shown = table[["id", "noisy", *times, "usefulTFPerGPU", "meanTXGBps"]]
    files = [
        path
        for name in ("side_by_side", "slowdown")
        for path in sorted((folder / "figures").glob(f"{name}.*"))
    ]
    section = render(
        "measured_section",
        cases=len(table),
        devices=", ".join(table["device"].unique()),
        failed=(table["status"] == "failed").sum(),
        how="; ".join(measured_how(table)),
        base=folder.relative_to(index.parent).as_posix(),
        files=[path.name for path in files],
        images=[
            (path.stem, base64.b64encode(path.read_bytes()).decode())
            for path in files
            if path.suffix == ".svg"
        ],
        rows=shown.to_html(index=False, border=0, float_format="{:.4g}".format),
    )
    _add(index, section)


def _add(index: Path, section: str) -> None:
    page = index.read_text(encoding="utf-8")
    write_atomic(index, page.replace(_NOTEBOOK, section + _NOTEBOOK, 1))


def notebook_html(notebook: Path) -> str:
    """A notebook as a page of its own that loads nothing: nbconvert's full templates would fetch
    MathJax and RequireJS."""
    from nbconvert import HTMLExporter
    from pygments.formatters import HtmlFormatter

    # found through the distribution: the search path misses an environment laid over another
    packaged = [Path(str(f.locate())) for f in files("nbconvert") or () if f.name == "conf.json"]
    templates = sorted({str(path.parents[1]) for path in packaged})
    quiet = logging.getLogger("workbench.report.nbconvert")
    quiet.setLevel(logging.ERROR)  # it warns of SVG images without alt text
    exporter = HTMLExporter(
        log=quiet,
        template_name="basic",
        extra_template_basedirs=templates,
        extra_template_paths=templates,
        exclude_anchor_links=True,
    )
    body, _ = exporter.from_notebook_node(nbformat.read(notebook, as_version=4))
    colours = HtmlFormatter().get_style_defs(".highlight")
    return render("notebook_page", title=notebook.stem, colours=colours, body=body)


def _subtitle(report: Report) -> str:
    origins = ", ".join(report.table["origin"].unique())
    devices = ", ".join(report.table["device"].unique())
    told = "".join(f"; {text}" for text in report.protocols)
    return f"{len(report.table)} {origins} cases on {devices}{told}"


def _headline_table(report: Report) -> str:
    found = tables.headline(report.table)
    if found.empty:
        return ""
    names = {
        "geometricMean": "geometric mean [1]",
        "lowest": "lowest [1]",
        "highest": "highest [1]",
    }
    shown = found[["group", "pairs", *names]].rename(columns=names)
    return shown.to_html(index=False, border=0, float_format="{:.3f}".format)


def _figures(report: Report, exported: Exported, folder: Path) -> Iterator[tuple[Any, ...]]:
    """Of each figure: name, drawing, width in px, caption, and (format, path) of its files."""
    for name, fig in report.figures.items():
        drawn = figure_html(fig, full_html=False, include_plotlyjs=False, div_id=f"figure-{name}")
        files = exported.files[name]
        links = [(fmt.upper(), path.relative_to(folder).as_posix()) for fmt, path in files.items()]
        yield name, drawn, fig.layout.width, FIGURES[name].caption, links


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    for name, value in report.provenance().items():
        yield str(name), ", ".join(map(str, value)) if isinstance(value, list) else str(value)
