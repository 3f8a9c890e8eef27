"""`index.html` of a report: one page that needs no network, no server and no other file.

plotly is embedded once and draws every figure; the executed notebook is a page within the page.
Links lead to the files beside it.
"""

import base64
import html
import logging
from importlib.metadata import files
from pathlib import Path

import nbformat
import pandas as pd
from plotly.offline import get_plotlyjs

from workbench.files import write_atomic
from workbench.records.protocols import HIGH, LOW, STEPS, measured_how
from workbench.records.results import load_table
from workbench.report import tables
from workbench.report.export import Exported, figure_html
from workbench.report.figures import FIGURES
from workbench.report.study_report import Report

_NOTEBOOK = "<!-- notebook -->"

_STYLE = """
body { font: 15px/1.5 system-ui, Arial, Helvetica, sans-serif; color: #222; margin: 0 auto;
       max-width: 1100px; padding: 0 20px 60px; }
h1 { font-size: 26px; margin: 28px 0 4px; } h2 { font-size: 19px; margin: 36px 0 8px; }
.muted { color: #555; } a { color: #0060a0; }
.numbers { display: flex; flex-wrap: wrap; gap: 14px; margin: 18px 0; }
.numbers div { border: 1px solid #bbb; border-radius: 6px; padding: 10px 14px; flex: 1 1 200px; }
.numbers b { display: block; font-size: 26px; }
.figures { display: flex; flex-wrap: wrap; gap: 28px 24px; align-items: flex-start; }
figure { margin: 0; overflow-x: auto; max-width: 100%; }
figcaption { font-size: 13px; padding: 4px 8px 0; box-sizing: border-box; }
table { border-collapse: collapse; font-size: 13px; }
th, td { text-align: right; padding: 3px 10px; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child, .facts td, .facts th { text-align: left; }
.facts td { overflow-wrap: anywhere; }
iframe { width: 100%; height: 80vh; border: 1px solid #bbb; }
.warning { border-left: 4px solid #d55e00; padding: 6px 12px; background: #fdf3ec; }
summary { cursor: pointer; }
"""

_NOTEBOOK_STYLE = """
body { font: 14px/1.5 system-ui, Arial, sans-serif; color: #222; max-width: 900px;
       margin: 0 auto; padding: 8px 16px; }
pre { background: #f6f6f6; padding: 6px 10px; overflow-x: auto; font-size: 12px; }
.jp-OutputPrompt, .jp-InputPrompt, .prompt, .anchor-link { display: none; }
table { border-collapse: collapse; font-size: 12px; border: 0; }
th, td { border: 0; text-align: right; padding: 2px 8px; border-bottom: 1px solid #ddd; }
img { max-width: 100%; }
"""


def write_index(report: Report, exported: Exported, folder: Path) -> Path:
    """Write `folder`/index.html; `add_notebook` puts executed notebooks in. Returns its path."""
    title = f"MoE Workbench report: {report.source.stem}"
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="muted">{html.escape(_subtitle(report))}</p>',
        _warning(exported.skipped),
        _numbers(report),
        "<h2>mok time over dist_moe time, by group</h2>" + _headline_table(report),
        "<h2>Figures</h2>",
        f'<div class="figures">{"".join(_figures(report, exported, folder))}</div>',
        _NOTEBOOK,
        "<h2>Data</h2>" + _links(folder),
        "<h2>Provenance</h2>" + _provenance(report),
    ]
    page = (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        '<link rel="icon" href="data:,">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head><body>{''.join(parts)}</body></html>"
    )
    path = folder / "index.html"
    write_atomic(path, page)
    return path


def add_notebook(index: Path, notebook: Path) -> None:
    """Put an executed notebook into an index page, below those that it has, with a link to it."""
    name = html.escape(notebook.relative_to(index.parent).as_posix())
    inner = html.escape(notebook_html(notebook))
    section = (
        f"<h2>Notebook {html.escape(notebook.stem.replace('_', ' '))}</h2>"
        f'<p><a href="{name}">{name}</a></p><details><summary>Show the executed notebook</summary>'
        f'<iframe title="notebook" srcdoc="{inner}"></iframe></details>'
    )
    write_atomic(
        index, index.read_text(encoding="utf-8").replace(_NOTEBOOK, section + _NOTEBOOK, 1)
    )


def add_measured(index: Path, folder: Path) -> None:
    """Put what this machine measured into an index page: device, times and figures of a sweep that
    notebook 06 has left in `folder`."""
    table = load_table(folder / "sweep" / "records")
    base = folder.relative_to(index.parent).as_posix()
    times = [f"{step}MS{end}" for step in STEPS for end in ("", LOW, HIGH)]
    shown = table[["id", "noisy", *times, "usefulTFPerGPU", "meanTXGBps"]]
    rows = shown.to_html(index=False, border=0, float_format="{:.4g}".format)
    failed = table[table["status"] == "failed"]
    files = [
        path
        for name in ("side_by_side", "slowdown")
        for path in sorted((folder / "figures").glob(f"{name}.*"))
    ]
    links = ", ".join(f'<a href="{base}/figures/{f.name}">{f.name}</a>' for f in files)
    drawn = "".join(
        f'<img alt="{path.stem}" src="data:image/svg+xml;base64,'
        f'{base64.b64encode(path.read_bytes()).decode()}">'
        for path in files
        if path.suffix == ".svg"
    )
    section = (
        f"<h2>Measured on this machine</h2><p>{len(table)} cases of the local matrix at small "
        f"shapes on real ranks, on {html.escape(', '.join(table['device'].unique()))}; "
        f"{len(failed)} failed. {html.escape('; '.join(measured_how(table)))}. "
        "Not to be compared with the study's absolute times. "
        f'Records: <a href="{base}/data/results.json">{base}/data/results.json</a>. {links}</p>'
        f'<div class="figures">{drawn}</div><details><summary>Times in ms with p20 and '
        f"p80, TFLOP/s and GB/s per rank</summary>{rows}</details>"
    )
    write_atomic(
        index, index.read_text(encoding="utf-8").replace(_NOTEBOOK, section + _NOTEBOOK, 1)
    )


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
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{notebook.stem}</title>'
        f"<style>{_NOTEBOOK_STYLE}{colours}</style></head><body>{body}</body></html>"
    )


def _subtitle(report: Report) -> str:
    origins = ", ".join(report.table["origin"].unique())
    devices = ", ".join(report.table["device"].unique())
    told = "".join(f"; {text}" for text in report.protocols)
    return f"{len(report.table)} {origins} cases on {devices}{told}"


def _warning(skipped: str) -> str:
    return f'<p class="warning">{html.escape(skipped)}</p>' if skipped else ""


def _numbers(report: Report) -> str:
    cards = [
        f"<div><b>{html.escape(number)}</b>{html.escape(words)}</div>"
        for number, words in tables.key_numbers(report.table)
    ]
    return f'<div class="numbers">{"".join(cards)}</div>'


def _headline_table(report: Report) -> str:
    found = tables.headline(report.table)
    if found.empty:
        return "<p>no pair of dist_moe and mok in this selection</p>"
    names = {
        "geometricMean": "geometric mean [1]",
        "lowest": "lowest [1]",
        "highest": "highest [1]",
    }
    shown = found[["group", "pairs", *names]].rename(columns=names)
    return shown.to_html(index=False, border=0, float_format="{:.3f}".format)


def _figures(report: Report, exported: Exported, folder: Path) -> list[str]:
    parts = []
    for name, fig in report.figures.items():
        drawn = figure_html(fig, full_html=False, include_plotlyjs=False, div_id=f"figure-{name}")
        files = exported.files[name]
        links = ", ".join(
            f'<a href="{path.relative_to(folder).as_posix()}">{fmt.upper()}</a>'
            for fmt, path in files.items()
        )
        caption = html.escape(FIGURES[name].caption)
        parts.append(
            f'<figure id="{name}">{drawn}<figcaption style="width:{fig.layout.width}px">'
            f"{caption} {links}</figcaption></figure>"
        )
    return parts


def _links(folder: Path) -> str:
    items = {
        "data/results.json": "the cases and their pairs as a result file",
        "data/cases.csv": "the cases as a table",
        "run.json": "parameters, inputs and times of this run",
    }
    found = [
        f'<li><a href="{name}">{name}</a>: {what}</li>'
        for name, what in items.items()
        if (folder / name).is_file()
    ]
    return f"<ul>{''.join(found)}</ul>"


def _provenance(report: Report) -> str:
    facts = pd.Series(report.provenance()).map(
        lambda v: ", ".join(map(str, v)) if isinstance(v, list) else str(v)
    )
    rows = [
        f"<tr><th>{html.escape(str(name))}</th><td>{html.escape(value)}</td></tr>"
        for name, value in facts.items()
    ]
    return f'<table class="facts">{"".join(rows)}</table>'
