"""Exported files: what they show, whether their text can be read, and what happens without a
browser."""

import json
import re

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from workbench.errors import InputError
from workbench.report import export
from workbench.report.export import PLOTLY_JS, export_figures, find_browser
from workbench.report.figure_data import figure_data
from workbench.report.figures import FIGURES
from workbench.report.theme import COLUMN, DOUBLE

TEXT_BOXES = """() => {
  const svg = document.querySelector('svg').getBoundingClientRect();
  const texts = [...document.querySelectorAll('text')].filter(t => t.textContent.trim());
  const boxes = texts.flatMap(t => {
    const lines = [...t.querySelectorAll('tspan.line')];
    return (lines.length ? lines : [t]).map(part => {
      // a rotated tspan has the box of its parent
      const b = part.getBoundingClientRect();
      return {text: part.textContent, left: b.left, right: b.right, top: b.top, bottom: b.bottom};
    });
  });
  return {width: svg.width, height: svg.height, boxes};
}"""


def text_faults(measured: dict, overlap: float = 1.0) -> list[str]:
    """Texts of an SVG that overlap by more than `overlap` px both ways, or leave the drawing."""
    boxes, faults = measured["boxes"], []
    for n, a in enumerate(boxes):
        if a["left"] < 0 or a["top"] < 0 or a["right"] > measured["width"]:
            faults.append(f"clipped: {a['text']}")
        if a["bottom"] > measured["height"]:
            faults.append(f"clipped below: {a['text']}")
        for b in boxes[n + 1 :]:
            across = min(a["right"], b["right"]) - max(a["left"], b["left"])
            down = min(a["bottom"], b["bottom"]) - max(a["top"], b["top"])
            if across > overlap and down > overlap:
                faults.append(f"overlap: {a['text']} / {b['text']} ({across:.1f} x {down:.1f} px)")
    return faults


def measure(page, svg: str) -> dict:
    page.set_content(f'<body style="margin:0">{svg}</body>')
    return page.evaluate(TEXT_BOXES)


@pytest.mark.browser
@pytest.mark.parametrize("name", FIGURES)
def test_no_text_overlaps_or_is_clipped_at_the_exported_size(name, exported, page, figures):
    measured = measure(page, exported.files[name]["svg"].read_text())
    assert measured["width"] == figures[name].layout.width
    assert measured["width"] in (COLUMN, DOUBLE)
    assert len(measured["boxes"]) > 10
    assert text_faults(measured) == []


@pytest.mark.browser
@pytest.mark.parametrize("name", FIGURES)
def test_no_text_overlaps_when_ones_own_records_lie_over_the_study(name, overlaid, page):
    measured = measure(page, overlaid.files[name]["svg"].read_text())
    assert text_faults(measured) == []


@pytest.mark.browser
def test_the_overlap_check_sees_an_overlap_and_a_clip(page):
    svg = '<svg width="100" height="50"><text x="10" y="20">one</text>{}</svg>'
    assert text_faults(measure(page, svg.format('<text x="15" y="20">two</text>')))
    assert text_faults(measure(page, svg.format('<text x="90" y="40">three</text>')))
    assert text_faults(measure(page, svg.format('<text x="60" y="20">four</text>'))) == []


@pytest.mark.parametrize("name", FIGURES)
def test_csv_equals_the_traces_of_the_html(name, exported):
    """The figure as the browser gets it, decoded here, against the CSV beside it."""
    html = exported.files[name]["html"].read_text()
    start = html.index("[", html.index("Plotly.newPlot("))
    traces, _ = json.JSONDecoder().raw_decode(html, start)
    assert isinstance(traces, list)
    csv = pd.read_csv(exported.files[name]["csv"])
    at = 0
    for trace in traces:
        x, y = decoded(trace["x"]), decoded(trace["y"])
        rows = csv.iloc[at : at + len(x)]
        at += len(x)
        assert set(rows["series"]) == {trace["name"]}
        for column, values in (("x", x), ("y", y)):
            if isinstance(values[0], str):
                assert rows[column].astype(str).tolist() == values
            else:
                np.testing.assert_array_equal(rows[column].astype(float), values)
        if "customdata" in trace:
            assert rows["case"].tolist() == list(trace["customdata"])
    assert at == len(csv)


def decoded(values):
    if not isinstance(values, dict):
        return values
    import base64

    return np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"]).tolist()


def test_html_shares_one_plotly_and_loads_nothing_else(exported):
    assert set(exported.files) == set(FIGURES)
    for files in exported.files.values():
        loads = re.findall(r'(?:src|href)="([^"]+)"', files["html"].read_text())
        assert loads == [PLOTLY_JS]
        assert (files["html"].parent / PLOTLY_JS).is_file()


@pytest.mark.browser
def test_all_formats_have_their_signature_and_size(figures, browser, tmp_path):
    done = export_figures({"headline": figures["headline"]}, tmp_path)
    files = done.files["headline"]
    assert sorted(files) == ["csv", "html", "pdf", "png", "svg"]
    assert files["pdf"].read_bytes().startswith(b"%PDF")
    png = files["png"].read_bytes()
    assert png.startswith(b"\x89PNG")
    assert int.from_bytes(png[16:20], "big") == COLUMN * export.PNG_SCALE
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in files.values()} | {PLOTLY_JS}
    bundle = done.image("headline")
    assert bundle["image/svg+xml"].startswith("<svg")


def test_without_a_browser_html_and_csv_are_written_and_the_rest_is_named(
    figures, tmp_path, monkeypatch
):
    monkeypatch.setenv("BROWSER_PATH", "/nowhere/chromium")
    done = export_figures({"headline": figures["headline"]}, tmp_path)
    assert sorted(done.files["headline"]) == ["csv", "html"]
    assert done.skipped == (
        "svg, pdf, png skipped: BROWSER_PATH=/nowhere/chromium must name a program"
    )
    assert done.skipped in done.image("headline")["text/plain"]


def test_a_browser_that_does_not_start_is_named_and_leaves_no_half_files(
    figures, tmp_path, monkeypatch
):
    broken = tmp_path / "chromium"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("BROWSER_PATH", str(broken))
    done = export_figures({"headline": figures["headline"]}, tmp_path / "out", ["svg", "csv"])
    assert sorted(done.files["headline"]) == ["csv"]
    assert done.skipped.startswith(f"headline.svg skipped: {broken} failed:")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["headline.csv"]


def test_browser_is_found_on_path(tmp_path, monkeypatch):
    program = tmp_path / "chromium"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("BROWSER_PATH", str(program))
    assert find_browser() == (str(program), "")


def test_a_failed_write_leaves_the_old_file(figures, tmp_path, monkeypatch):
    fig = {"headline": figures["headline"]}
    export_figures(fig, tmp_path, ["html"])
    before = (tmp_path / "headline.html").read_bytes()

    def fails(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(InputError, match=r"cannot be written: No space left"):
        export_figures({"headline": go.Figure()}, tmp_path, ["html"])
    assert (tmp_path / "headline.html").read_bytes() == before
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_figure_data_has_error_bars_panels_and_cases(figures):
    headline = figure_data(figures["headline"])
    total = headline[headline["y"] == "all pairs (44)"].iloc[-1]
    assert (round(total["x"], 3), round(total["x_low"], 3), round(total["x_high"], 3)) == (
        1.173,
        1.048,
        1.401,
    )
    slowdown = figure_data(figures["slowdown"])
    assert slowdown["case"].notna().sum() == 60
    assert set(slowdown["panel"]) == {
        "inference, EP 8",
        "inference, EP 16",
        "training, EP 32",
        "training, EP 64",
    }
