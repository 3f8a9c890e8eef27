"""`workbench compare`: the verdict on two runs."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def compare_command(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="A folder with records.")],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="What is held against it.")],
    metric: Annotated[str, typer.Option(help="iteration, forward or backward.")] = "iteration",
    margin: Annotated[
        float, typer.Option(help="Times within this ratio of one another are the same.")
    ] = 0.02,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line per case.")] = False,
) -> None:
    """Say of each case whether RUN_B is faster, slower, the same, or that it cannot be told.

    The verdict is that of the 95 % interval of the ratio of times, from the windows' samples.
    """
    from workbench.bench.compare import compare

    found = compare(run_a, run_b, metric, margin)
    if as_json:
        for row in found.to_dict("records"):
            print(json.dumps({k: None if v != v else v for k, v in row.items()}))
        return
    import pandas as pd
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "case", "A [ms]", "p20 to p80", "B [ms]", "p20 to p80", "B / A", "95 % interval", "B is", ""
    )
    for row in found.itertuples():
        known = row.ratio == row.ratio and row.ratio is not None
        sides = ((row.aMS, row.aMS_p20, row.aMS_p80), (row.bMS, row.bMS_p20, row.bMS_p80))
        numbers = [
            text
            for middle, low, high in sides
            for text in (
                (f"{middle:.4g}", f"{low:.4g} to {high:.4g}") if pd.notna(middle) else ("-", "-")
            )
        ]
        span = [f"{row.ratio:.3f}", f"{row.low:.3f} to {row.high:.3f}"] if known else ["-", "-"]
        table.add_row(row.id, *numbers, *span, row.verdict, row.why or "")
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    counts = found["verdict"].value_counts()
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
