"""`workbench kernels`: the table of compiled kernels."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from workbench.errors import InputError, check_whole


def kernels_command(
    target: Annotated[
        list[str] | None, typer.Option(help="sm_90a, sm_100a or sm_103a; may be repeated.")
    ] = None,
    op: Annotated[list[str] | None, typer.Option(help="Only this op; may be repeated.")] = None,
    T: Annotated[int, typer.Option("--T", help="Tokens per rank.")] = 2048,
    D: Annotated[int, typer.Option("--D", help="Hidden width.")] = 7168,
    F: Annotated[int, typer.Option("--F", help="Expert width.")] = 3072,
    E: Annotated[int, typer.Option("--E", help="Experts in all.")] = 384,
    K: Annotated[int, typer.Option("--K", help="Experts per token.")] = 6,
    ep: Annotated[int, typer.Option(help="Ranks that share the experts.")] = 64,
    helpers: Annotated[
        bool, typer.Option("--all", help="Helper kernels too, not only each op's main one.")
    ] = False,
    ptx: Annotated[Path | None, typer.Option(help="Write each kernel's PTX here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per row.")] = False,
) -> None:
    """Every Triton kernel as compiled for each target at the study's shapes; needs no GPU.

    Times are floors at the device's peaks (origin `predicted`). The first call compiles, which
    takes a minute or two.
    """
    from dataclasses import asdict, replace

    from workbench.bench.kernel_table import kernel_rows
    from workbench.bench.ledger import read_entries, run_text
    from workbench.kernels.aot import TARGETS
    from workbench.kernels.ops import Sizes

    for name, value in {"T": T, "D": D, "F": F, "E": E, "K": K, "ep": ep}.items():
        check_whole(name, value)
    if E % ep:
        raise InputError(f"ep={ep} must divide E={E}")
    sizes = Sizes(T=T, D=D, F=F, E=E, K=K, ep=ep)
    ledger = read_entries()
    rows = (
        replace(row, run=run_text(ledger, row.device, row.op, sizes)) if row.main else row
        for row in kernel_rows(sizes, target or tuple(TARGETS), op, ptx)
        if row.main or helpers
    )
    if as_json:
        for row in rows:
            print(json.dumps(asdict(row)), flush=True)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "op",
        "target",
        "matrix instruction",
        "TMA",
        "regs",
        "spill B",
        "smem B",
        "stages",
        "resident",
        "FLOP/tile",
        "B/tile",
        "bound by",
        "floor us",
        "run",
    )
    for row in rows:
        unit = row.instruction.split(".sync")[0].replace(".cta_group::1", "")
        table.add_row(
            row.op if row.main else f"{row.op}: {row.kernel}",
            row.target,
            unit,
            row.tma + (" (own warps)" if row.warp_specialised else ""),
            str(row.registers),
            str(row.spill_bytes),
            f"{row.shared_bytes:,}",
            str(row.stages),
            str(row.resident),
            f"{row.flop_per_tile:.3g}" if row.flop_per_tile else "-",
            f"{row.bytes_per_tile:,}",
            row.bound_by,
            f"{row.predicted_us:,.1f}",
            row.run,
        )
    Console(width=None if sys.stdout.isatty() else 220).print(table)
