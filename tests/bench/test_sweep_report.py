"""A sweep beside the published and the predicted: figures, notebook page, commands."""

import shutil
import subprocess
import sys

import pytest

from tests import needs
from workbench.bench import matrix
from workbench.bench.sweep import Progress
from workbench.case import local_matrix
from workbench.cli.speed import bench_sweep
from workbench.records.results import load_table
from workbench.report.figure_data import figure_data
from workbench.report.index import add_measured
from workbench.report.sweep_report import open_sweep_report
from workbench.runner.notebook_sweep import SweepParameters, live_html, measure


@pytest.fixture(scope="module")
def report(local_run):
    return open_sweep_report(local_run.sweep.folder.records, ["svg"])


def test_measured_published_and_predicted_stand_in_one_figure(report, local_run):
    shown = figure_data(report.figures["slowdown"])
    published = load_table()
    one = published[(published["pipeline"] == "standard") & (published["ep"] == 32)]
    one = one[one["category"] == "single_layer"].set_index("imbalance")["iterationMS"]
    series = shown[shown["series"] == "dist_moe standard BF16, published, GB300, EP 32"]
    assert series["y"].tolist() == pytest.approx([1, one[4.0] / one[1.0], one[8.0] / one[1.0]])
    mine = shown[shown["series"] == "baseline alltoall BF16, measured, CPU, EP 2"]
    times = {
        (r.mode, r.imbalance): r.iterationMS
        for r in local_run.records.values()
        if r.pipeline == "alltoall" and r.category == "single_layer"
    }
    wanted = [times[m, 2.0] / times[m, 1.0] for m in ("inference", "training")]
    assert mine.loc[mine["x"] == 2, "y"].tolist() == pytest.approx(wanted)
    assert "dist_moe standard BF16, predicted, GB300, EP 2" in set(shown["series"])


def test_every_case_has_its_measured_and_calibrated_time_side_by_side(report, local_run):
    shown = figure_data(report.figures["side_by_side"])
    for suffix, times in (
        ("measured, CPU", {name: r.iterationMS for name, r in local_run.records.items()}),
        ("predicted, CPU", report.own_fit.set_index("id")["iterationMS"].to_dict()),
    ):
        rows = shown[shown["series"].str.endswith(suffix)]
        assert dict(zip(rows["case"], rows["x"], strict=True)) == pytest.approx(times)
    predicted = shown[shown["series"].str.endswith("predicted, GB300")]
    assert set(predicted["case"]) == {c.id for c in local_matrix() if c.pipeline == "standard"}


def test_the_time_model_is_calibrated_on_the_own_records(report):
    assert report.reason == ""
    assert report.calibration.cases == len(report.table) == len(report.fit())
    # these are single shots on whatever machine runs the tests: right order of magnitude
    assert report.fit()["ratio"].between(0.1, 10).all()
    assert report.hardware.sources["bf16_tflops"].startswith("measured here")


def test_records_that_cannot_be_calibrated_say_why(local_run, tmp_path):
    name = next(c.id for c in local_run.sweep.cases if c.ep == 2)
    shutil.copy(local_run.sweep.folder.records / f"{name}.record.json", tmp_path)
    found = open_sweep_report(tmp_path)
    assert found.calibration is None
    assert found.reason.startswith("ep=2 only: at least two values are needed")
    assert found.fit().empty


def test_the_page_gets_what_was_measured(report, local_run, tmp_path):
    needs.browser()
    folder = tmp_path / "measured"
    shutil.copytree(local_run.sweep.folder.path, folder / "sweep")
    report.export(folder)
    index = tmp_path / "index.html"
    index.write_text("<body><!-- notebook --></body>")
    add_measured(index, folder)
    page = index.read_text()
    assert "Measured on this machine" in page
    assert report.table["device"][0] in page
    assert page.count("data:image/svg+xml") == 2
    assert all(case.id in page for case in local_run.sweep.cases)
    assert (folder / "data" / "results.json").is_file()


def test_progress_as_a_line_and_as_html(local_run):
    case = local_run.sweep.cases[0]
    record = local_run.records[case.id]
    ended = Progress(done=1, total=3, failed=0, record=record, left_s=12.3)
    assert ended.line() == f"1/3 {case.id}: {record.iterationMS:.4g} ms, 12 s left"
    bad = record.model_copy(update={"iterationMS": None, "reason": "a < b"})
    failed = Progress(done=2, total=3, failed=1, record=bad)
    page = live_html(Progress(done=2, total=3, failed=1, running="next one"), [ended, failed])
    assert "value='2' max='3'" in page
    assert "2 of 3, 1 failed" in page
    assert "next one" in page
    assert "failed: a &lt; b" in page


def test_a_sweep_from_a_notebook_resumes(local_run, capsys):
    p = SweepParameters(
        sweep_dir=str(local_run.sweep.folder.path),
        ranks=2,
        out_dir="x",
        warmups=1,
        windows=2,
        iterations=2,
        limit_s=120,
    )
    assert measure(p, local_run.sweep.folder.path).left() == []
    assert capsys.readouterr().out == ""


def test_overhead_figures(monkeypatch):
    few = [c for c in local_matrix() if c.ep == 1][:2]
    monkeypatch.setitem(matrix.NAMED, "local", lambda: few)
    found = bench_sweep()
    assert found["cases"] == 2
    assert 0 < found["overhead_median_s"] <= found["overhead_worst_s"]
    assert found["start_s"] > 0


WRONG = {
    ("sweep", "lokal"): "matrix=lokal must be local or reference, or a YAML file",
    ("sweep", "reference", "--ranks=8"): "ep=16 must be at most ranks=8",
    ("sweep", "--device=tpu"): "device='tpu' must be one of cpu, cuda",
    ("sweep", "--windows=0"): "windows=0 must be an integer of at least 1",
    ("sweep", "--nnodes=2", "--rdzv=here"): "rdzv='here' must be HOST:PORT with nnodes=2",
    ("sweep", "--resume"): "holds no sweep to resume",
    ("compare", "a", "b"): "a: must be a folder with records of a sweep",
}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_bad_input_is_one_line(tmp_path, arguments):
    command = [sys.executable, "-m", "workbench.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert WRONG[arguments] in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.rglob("*.record.json"))
