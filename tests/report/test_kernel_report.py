"""Notebook 07: the table of kernels as compiled, its figure, and a strict run."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest

from workbench.errors import InputError
from workbench.report.kernel_report import (
    SHOWN,
    KernelReportParameters,
    floors_figure,
    kernel_table,
)

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests/bench"))


def test_the_figure_shows_every_floor_that_is_not_bound_by_the_launch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where there is no ledger
    table = kernel_table(KernelReportParameters(ep=8, targets=["sm_90a"]))
    assert set(SHOWN) <= set(table.columns)
    assert set(table["run"]) == {"not run on a GPU"}
    (bars,) = floors_figure(table).data
    shown = dict(zip(bars.x, bars.y, strict=True))
    wanted = table[table["bound_by"] != "launch"].set_index("op")["predicted_us"]
    assert shown == wanted.to_dict()
    assert {"dispatch_w13", "swiglu"} <= set(shown)


def test_impossible_parameters_are_one_line():
    with pytest.raises(InputError, match="ep=7 must divide E=384"):
        kernel_table(KernelReportParameters(ep=7))


def test_the_notebook_runs_strictly(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "workbench.cli",
            "run",
            str(ROOT / "notebooks/07_kernels.ipynb"),
            "-p",
            "targets=[sm_100a]",
            "--out",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    (executed,) = tmp_path.rglob("07_kernels.ipynb")
    assert executed.stat().st_size < 1e6
    nbformat.validate(nbformat.read(executed, as_version=4))
    (table,) = tmp_path.rglob("kernels.csv")
    assert set(pd.read_csv(table)["target"]) == {"sm_100a"}


def test_a_measured_time_stands_where_the_ledger_has_one(tmp_path, monkeypatch):
    """One op compiled; an entry of the device beside a later one that is simulated."""
    import test_ledger
    from workbench.kernels.ops import Sizes

    from workbench.bench import kernel_table as compiled
    from workbench.bench.ledger import write_entry
    from workbench.report import kernel_report

    rows = list(compiled.kernel_rows(Sizes(), ["sm_90a"], ["dispatch_w13"]))
    monkeypatch.setattr(kernel_report, "kernel_rows", lambda *_: rows)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs/gpu"
    write_entry(test_ledger.entry(**test_ledger.SIMULATED), folder)
    p = KernelReportParameters(ep=Sizes().ep, targets=["sm_90a"])
    assert list(kernel_table(p)["run"]) == ["not run on a GPU"]
    write_entry(test_ledger.entry(), folder)
    assert list(kernel_table(p)["run"]) == ["2,000.0 us, 50% of its floor (2026-12-03)"]
