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


def test_the_figure_shows_every_floor_that_is_not_bound_by_the_launch():
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
