"""What the command line says becomes cases; the commands print what the library finds."""

import json
import sys

import pytest

from workbench import cli
from workbench.case import Case
from workbench.errors import InputError
from workbench.model.calibration import load_calibration
from workbench.model.query import cases_of

ID = "mok-training-ep32-bf16-native-packing-A-F3072"


def run(monkeypatch, capsys, *args):
    monkeypatch.setattr(sys, "argv", ["workbench", *args])
    try:
        cli.main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    return code, *capsys.readouterr()


def test_fields_make_a_product_and_the_pipeline_gives_its_backend():
    found = cases_of([], ["pipeline=mega,staged", "mode=training", "ep=32,64", "imbalance=4.5"])
    assert [(c.pipeline, c.ep) for c in found] == [
        ("mega", 32),
        ("mega", 64),
        ("staged", 32),
        ("staged", 64),
    ]
    assert {(c.backend, c.precision, c.imbalance) for c in found} == {("dist_moe", "mxfp8", 4.5)}


def test_ids_with_changed_fields():
    assert cases_of([ID], []) == [Case.from_id(ID)]
    found = cases_of([ID], ["precision=bf16,mxfp8", "slotFactor=4"])
    assert [c.precision for c in found] == ["bf16", "mxfp8"]
    assert {(c.profile, c.layers, c.slotFactor) for c in found} == {("A", 10, 4.0)}
    (packing,) = cases_of([], ["pipeline=standard", "mode=training", "ep=8", "profile=B"])
    assert packing.category == "packing"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["colour=red"], "'colour=red' must be NAME=VALUE with one of backend, mode"),
        (["ep"], "'ep' must be NAME=VALUE"),
        (["ep=many"], "ep='many' must be int"),
        (["ep=32", "mode=training"], "backend, precision, pipeline must be given"),
        (["pipeline=native", "mode=training", "ep=32"], "precision must be given"),
        (
            ["pipeline=hyper", "mode=training", "ep=32"],
            "pipeline='hyper' must be one of standard, staged, mega, native, alltoall",
        ),
        (["pipeline=mega,megga", "mode=training", "ep=32"], "pipeline='megga' must be one of"),
        (
            ["pipeline=mega", "mode=train", "ep=8"],
            "mode='train' must be one of inference, training",
        ),
        (["pipeline=mega", "mode=training", "ep=7"], "E=384 must be divisible by ep=7"),
        (["pipeline=mega", "mode=training", "ep=8", "imbalance=9"], "imbalance=9.0 must lie"),
    ],
)
def test_what_is_no_case_is_refused(given, message):
    with pytest.raises(InputError, match=message):
        cases_of([], given)


def test_predict_prints_what_the_calibration_says(monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys, "predict", ID, "--json")
    assert (code, err) == (0, "")
    (row,) = json.loads(out)
    expected = load_calibration().predict([Case.from_id(ID)]).iloc[0]
    assert row["iterationMS"] == pytest.approx(expected["iterationMS"], rel=1e-6)
    assert row["extrapolated"] is False
    assert row["origin"] == "predicted"
    monkeypatch.setenv("COLUMNS", "200")  # what other tests or the caller have set
    code, out, _ = run(monkeypatch, capsys, "predict", ID, "--device", "GB200")
    assert code == 0
    assert "device" in out
    code, out, err = run(monkeypatch, capsys, "predict", ID, "--device", "GB1")
    assert (code, out) == (2, "")
    assert err.startswith("error: hardware=GB1 must be one of")


GRID = ["-p", "pipeline=mega", "-p", "mode=training", "-p", "ep=7,8,96"]


def test_an_impossible_combination_is_a_row_and_the_others_are_predicted(monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys, "predict", *GRID, "--json")
    assert (code, err) == (0, "")
    rows = json.loads(out)
    assert [row["ep"] for row in rows] == [7, 8, 96]
    assert [row["runs"] for row in rows] == [
        "case: E=384 must be divisible by ep=7",
        "yes",
        "domain: ep=96 leaves the peer domain of 72 GPUs",
    ]
    assert [row["iterationMS"] is None for row in rows] == [True, False, True]
    code, _, err = run(monkeypatch, capsys, "predict", *GRID[:4], "-p", "ep=7,11")
    assert code == 2
    assert err == ("error: none of 2 combinations is a case: E=384 must be divisible by ep=7\n")


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_the_table_fits_and_shows_ids_whole(monkeypatch, capsys, width):
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, _ = run(monkeypatch, capsys, "predict", *GRID, "-p", "imbalance=1,4.5")
    assert code == 0
    lines = out.splitlines()
    assert all(len(line) <= width for line in lines if not line.startswith("not shown"))
    assert {"case:", "must", "be", "divisible", "by", "ep=7"} <= set(out.split())  # a whole reason
    case = Case.from_id("dist_moe-training-ep8-mxfp8-mega-single_layer-i4.5-F3072")
    if width >= 100:
        (row,) = [line for line in lines if case.id in line]
        assert row.split()[1:5] == ["2048", "7168", "384", "6"]
    else:
        assert "..." not in out
        assert "\u2026" not in out
    assert ("extrapolation" in lines[0]) == (width == 200)


def test_a_device_from_a_file_of_ones_own(monkeypatch, capsys, tmp_path):
    path = tmp_path / "own.toml"
    entries = {
        "bf16_tflops": 2500,
        "fp8_tflops": 5000,
        "hbm_gb": 288,
        "hbm_tb_s": 4,
        "scale_up_gb_s": 900,
        "scale_up_domain": 8,
    }
    lines = [f'{k} = {{ value = {v}, source = "s" }}' for k, v in entries.items()]
    path.write_text("\n".join(["[Lab1]", *lines]))
    case = "dist_moe-inference-ep8-bf16-standard-single_layer-i1-F3072"
    code, out, _ = run(monkeypatch, capsys, "predict", case, "--hardware-file", str(path), "--json")
    assert code == 0
    (row,) = json.loads(out)
    there = load_calibration().predict([Case.from_id(case)]).iloc[0]
    assert (row["device"], row["runs"]) == ("Lab1", "yes")
    assert row["busiestHbmFloorMS"] == pytest.approx(2 * there["busiestHbmFloorMS"], rel=1e-6)
    path.write_text("\n".join(["[Lab1]", *lines, "[Lab2]", *lines]))
    code, _, err = run(monkeypatch, capsys, "predict", case, "--hardware-file", str(path))
    assert code == 2
    assert err.startswith("error: device= must be given, one of Lab1, Lab2")


def test_calibrate_writes_a_file_that_predict_reads(monkeypatch, capsys, tmp_path):
    path = tmp_path / "c.json"
    assert run(monkeypatch, capsys, "calibrate", "--out", str(path))[0] == 0
    assert load_calibration(path).device == "GB300"
    code, out, _ = run(monkeypatch, capsys, "predict", ID, "--calibration", str(path), "--json")
    assert code == 0
    assert json.loads(out)[0]["iterationMS"] == pytest.approx(102.7, rel=0.01)
    code, out, _ = run(monkeypatch, capsys, "calibrate", "--json")
    assert json.loads(out)["cases"] == 110


def test_validate_prints_every_protocol(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "calibrate", "--validate", "--json")
    assert code == 0
    assert len(json.loads(out)["protocols"]) == 11
    code, out, _ = run(monkeypatch, capsys, "calibrate", "--validate")
    assert "leave one workload out" in out
    assert "goal met" in out
    assert "MISSED" not in out
