"""What notebook 07 calls: the table of kernels as compiled, and a figure of its floors."""

from dataclasses import asdict
from typing import Literal

import pandas as pd
import plotly.graph_objects as go
from pydantic import BaseModel, ConfigDict

from workbench.bench.kernel_table import kernel_rows
from workbench.bench.ledger import read_entries, run_text
from workbench.errors import InputError
from workbench.kernels.ops import Sizes
from workbench.report.draw import LOG, add, grid, legend
from workbench.report.theme import DOUBLE

SHOWN = [
    "op",
    "target",
    "instruction",
    "tma",
    "warp_specialised",
    "registers",
    "spill_bytes",
    "shared_bytes",
    "stages",
    "resident",
    "flop_per_tile",
    "bytes_per_tile",
    "bound_by",
    "predicted_us",
    "run",
]
"""Columns for a person; the whole table has all of KernelRow."""


class KernelReportParameters(BaseModel):
    """Parameters of notebook 07. `ep`: ranks that share the study's 384 experts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ep: int = 64
    targets: list[Literal["sm_90a", "sm_100a", "sm_103a"]] = ["sm_90a", "sm_100a", "sm_103a"]
    out_dir: str = ""


def kernel_table(p: KernelReportParameters) -> pd.DataFrame:
    """KernelRow's fields, one row per op's main kernel and target; `run` is what the ledger has of
    it. Compiles; raises InputError."""
    if p.ep < 1 or Sizes().E % p.ep:
        raise InputError(f"ep={p.ep} must divide E={Sizes().E}")
    sizes, ledger = Sizes(ep=p.ep), read_entries()
    rows = [row for row in kernel_rows(sizes, p.targets) if row.main]
    runs = [run_text(ledger, row.device, row.op, sizes) for row in rows]
    return pd.DataFrame([asdict(row) for row in rows]).assign(run=runs)


def floors_figure(table: pd.DataFrame) -> go.Figure:
    """Each kernel's floor at the device's peaks, by op and target, in microseconds."""
    long = table[table["bound_by"] != "launch"]
    fig = grid(
        "Floors of the kernels at the devices' peaks, not measured",
        [("", {"title": "kernel", "type": "category"})],
        [{"title": "floor [us]", **LOG}],
        width=DOUBLE,
        panel_height=300,
    )
    for target, rows in long.groupby("target", sort=False):
        name = f"{rows['device'].iloc[0]} ({target})"
        add(fig, go.Bar(x=rows["op"], y=rows["predicted_us"], name=name))
    return legend(fig, "device whose peaks bound the kernel")
