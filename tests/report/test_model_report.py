"""Notebook 02 and its figures: stored clean, complete, and showing what the validation says."""

import ast
import json
import re

import nbformat
import pytest

from workbench.errors import InputError
from workbench.model.calibration import load_calibration
from workbench.model.coefficients import PARAMETERS
from workbench.records.results import REFERENCE, load_table
from workbench.report.figure_data import figure_data
from workbench.report.figures_timemodel import MODEL_FIGURES
from workbench.report.model_report import ModelReportParameters, open_model_report
from workbench.runner.main_job import MODEL_NOTEBOOK, _calibrates
from workbench.runner.notebook import MAX_BYTES, run_notebook


@pytest.fixture(scope="module")
def report():
    return open_model_report(ModelReportParameters())


def test_notebook_is_stored_clean_and_declares_its_parameters():
    book = nbformat.read(MODEL_NOTEBOOK, as_version=4)
    nbformat.validate(book)
    source = []
    for cell in book.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
            assert len(cell.source.splitlines()) <= 15
            nodes = ast.walk(ast.parse(cell.source))
            assert not any(isinstance(n, ast.FunctionDef | ast.ClassDef) for n in nodes)
            source.append(cell.source)
    (declared,) = [c for c in book.cells if c.metadata.get("tags") == ["parameters"]]
    found = {
        node.targets[0].id: ast.literal_eval(node.value) for node in ast.parse(declared.source).body
    }
    assert found == ModelReportParameters().model_dump()
    assert set(re.findall(r'files\.show\("(\w+)"\)', "\n".join(source))) == set(MODEL_FIGURES)


def test_every_axis_has_a_unit_and_every_case_is_drawn(report):
    for name, figure in report.figures.items():
        shown = figure_data(figure)
        assert shown["x_axis"].str.endswith("]").all(), name
        assert shown["y_axis"].str.endswith("]").all(), name
    for name in ("predicted", "residuals", "memory"):
        drawn = figure_data(report.figures[name])["case"].dropna()
        assert sorted(drawn) == sorted(load_table()["id"])


def test_figures_show_the_validation(report):
    errors = report.validation.cases.set_index("id")["leave one workload out"]
    shown = figure_data(report.figures["residuals"]).dropna(subset="case").set_index("case")
    assert shown["y"].astype(float).to_numpy() == pytest.approx(
        100 * errors.loc[shown.index].to_numpy(), rel=1e-12
    )
    protocols = report.validation.protocols
    shown = figure_data(report.figures["protocols"])
    gates = shown[(shown["series"] == "gate") & (shown["panel"] == "mean")].set_index("y")["x"]
    asked = protocols[protocols["gateMean"].notna()]
    assert gates.to_dict() == pytest.approx(
        dict(zip(asked["protocol"], 100 * asked["gateMean"], strict=True))
    )
    assert gates["leave one workload out"] == pytest.approx(2.0)
    assert len(gates) == 10
    worst = report.worst(3)
    assert worst["held-out error [%]"].abs().is_monotonic_decreasing
    assert abs(worst["held-out error [%]"].iloc[0]) == pytest.approx(
        100 * protocols.set_index("protocol").loc["leave one workload out", "worst"]
    )


def test_the_study_s_report_has_the_packaged_calibration(report):
    packaged = load_calibration()
    assert len(packaged.values) == len(PARAMETERS)
    assert report.calibration.values.keys() == packaged.values.keys()
    for name, by_slot in report.calibration.values.items():
        assert by_slot == pytest.approx(packaged.values[name], rel=1e-4)


def test_notebook_runs_and_stays_small(tmp_path):
    run = run_notebook(MODEL_NOTEBOOK, tmp_path, {"formats": ["html"]})
    assert run.status == "complete"
    executed = tmp_path / MODEL_NOTEBOOK.name
    assert executed.stat().st_size < MAX_BYTES
    text = executed.read_text()
    assert "gate MISSED" not in text
    assert "every gate met and coverage between 85 and 97 %" in text
    validation = json.loads((tmp_path / "data" / "validation.json").read_text())
    assert validation["passed"]
    assert (tmp_path / "data" / "calibration.json").is_file()
    predicted = (tmp_path / "data" / "predicted.csv").read_text().splitlines()
    assert len(predicted) == 111


def test_results_that_cannot_calibrate_are_refused_or_left_out(tmp_path):
    study = json.loads(REFERENCE.read_text())
    study["cases"] = [case for case in study["cases"] if case["F"] == 3072]
    study["pairs"], study["allPipelinePairs"] = [], []
    path = tmp_path / "narrow.json"
    path.write_text(json.dumps(study))
    with pytest.raises(InputError, match="F=3072 only"):
        open_model_report(ModelReportParameters(results=str(path)))
    assert not _calibrates(str(path))
    assert _calibrates("")
