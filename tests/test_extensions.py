"""A metric, a figure and an explorer of the user's own, each one file that nothing here names."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from workbench.case import case_table, reference_matrix

METRIC = """
METRICS = {"rowsPerExpert": lambda work: work.balanced_rows / work.shape["E_local"]}
"""

FIGURE = """
import plotly.graph_objects as go

from workbench.report.draw import add, grid
from workbench.report.figures import FigureSpec
from workbench.model.cost import cost_table


def rows(table):
    fig = grid("Rows of an expert", [("", {"title": "EP [1]"})], [{"title": "rows [1]"}])
    add(fig, go.Scatter(x=table["ep"], y=cost_table(table)["rowsPerExpert"], name="rows"))
    return fig


FIGURES = {"rows": FigureSpec(title="Rows", function=rows, caption="Balanced rows per expert.")}
"""

EXPLORER = """
from pydantic import BaseModel

from workbench.explore.controls import dropdown
from workbench.explore.explorer import Explorer
from workbench.explore.sources import Sources, View
from workbench.report import figures_explore as fx

PANEL = fx.Panel(title="Rows", x="EP [1]", y="rows [1]")


class State(BaseModel):
    ep: int = 8


class RowsExplorer(Explorer):
    name = "rows"

    def __init__(self):
        super().__init__(State(), Sources())

    def build(self, state):
        self.controls = {"ep": dropdown("EP", [8, 16], state.ep)}
        return self.controls

    @property
    def state(self):
        return State(ep=self.controls["ep"].value)

    def compute(self, state):
        rows = 2048 * 6 * state.ep / 384
        bar = fx.bar(PANEL, "rows", [state.ep], [rows], "#0072B2")
        spec = fx.explorer_figure("Rows", [PANEL], [bar])
        return View(rows=[{"ep": state.ep, "rows": rows}], spec=spec, sentence=f"{rows:g} rows.")

    def constrain(self):
        pass
"""


def ask(folder: Path, code: str, **environment: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", f"import json\n{code}"],
        env={**os.environ, "PYTHONPATH": str(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_metric(tmp_path: Path) -> None:
    (tmp_path / "my_metric.py").write_text(METRIC)
    code = """
from workbench.case import case_table, reference_matrix
from workbench.model.cost import cost_table
print(json.dumps(cost_table(case_table(reference_matrix()))["rowsPerExpert"].tolist()))"""
    found = ask(tmp_path, code, WORKBENCH_METRICS="my_metric")
    assert found == (case_table(reference_matrix())["ep"] * 2048 * 6 / 384).tolist()


def test_a_figure_is_in_the_report_with_its_data_and_caption(tmp_path: Path) -> None:
    (tmp_path / "my_metric.py").write_text(METRIC)
    (tmp_path / "my_figure.py").write_text(FIGURE)
    code = f"""
from pathlib import Path
from workbench.report.export import export_figures
from workbench.report.figures import FIGURES
from workbench.report.study_report import ReportParameters, open_report
report = open_report(ReportParameters(mode=["inference"]))
exported = export_figures({{"rows": report.figures["rows"]}}, Path({str(tmp_path)!r}), ["html"])
print(json.dumps([list(FIGURES)[-1], FIGURES["rows"].caption,
                  (Path({str(tmp_path)!r}) / "rows.csv").read_text()]))"""
    last, caption, data = ask(
        tmp_path, code, WORKBENCH_METRICS="my_metric", WORKBENCH_FIGURES="my_figure"
    )
    assert (last, caption) == ("rows", "Balanced rows per expert.")
    shown = {tuple(line.split(",")) for line in data.splitlines()[1:]}
    assert {float(y) for row in shown for y in row if y in ("256.0", "512.0")} == {256.0, 512.0}
    assert (tmp_path / "rows.html").stat().st_size > 1000


def test_an_explorer(tmp_path: Path) -> None:
    (tmp_path / "my_explorer.py").write_text(EXPLORER)
    code = """
from my_explorer import RowsExplorer
explorer = RowsExplorer()
explorer.widget()
explorer.set(ep=16)
shown = explorer.figure()
print(json.dumps([explorer.table()["rows"].tolist(), explorer.sentence(),
                  [float(v) for v in shown.data[0].y]]))"""
    assert ask(tmp_path, code) == [[512.0], "512 rows.", [512.0]]


def test_a_metric_does_not_replace_one_of_ours(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("METRICS = {'wireBytes': lambda work: work.wire}")
    code = """
from workbench.case import case_table, reference_matrix
from workbench.model.cost import cost_table
try:
    cost_table(case_table(reference_matrix()))
except ValueError as error:
    print(json.dumps(str(error)))"""
    told = ask(tmp_path, code, WORKBENCH_METRICS="mine")
    assert told == "WORKBENCH_METRICS: 'wireBytes' must not be there already"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("METRICS = {'mine': 1}", "'mine' must be a function"),
        ("METRICS = 3", "mine.METRICS must be a mapping of names"),
        ("METRICS = 1 / 0", "'mine' must be a module with a constant METRICS (ZeroDivisionError"),
    ],
)
def test_what_cannot_be_added_is_one_line(tmp_path: Path, text: str, rule: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "workbench.cli", "predict", "-p", "pipeline=mega"],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "WORKBENCH_METRICS": "mine"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert rule in done.stderr
    assert len(done.stderr.splitlines()) == 1
