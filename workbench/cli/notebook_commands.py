"""`workbench run` and `workbench report`: notebooks, headless."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.output import reported, show_parameters
from workbench.errors import InputError


def run_command(
    notebook: Annotated[Path, typer.Argument(metavar="NOTEBOOK", help="The notebook to execute.")],
    param: Annotated[
        list[str] | None,
        typer.Option(
            "--param",
            "-p",
            metavar="NAME=VALUE[,VALUE...]",
            help="Values of a parameter; may be repeated, also for the same name.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="The run's folder [default: outputs/runs/ID]."),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="[RUN_ID]",
            help="Go on with a run of this notebook (the latest, or the one in --out), leaving out "
            "points that are complete for the same notebook, parameters, input files and version. "
            "Without -p: all its points; with -p: the points asked for, beside those that it has.",
        ),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show-parameters", help="List the notebook's parameters and stop.")
    ] = False,
) -> None:
    """Execute a notebook, once for each combination of the given parameter values.

    Everything is checked before anything runs: a parameter must be declared in the notebook's cell
    tagged `parameters`, and a value must have the type of its default.

    * `-p ep=8,16 -p precision=bf16,mxfp8` makes a grid of four points.

    * `-p 'sizes=[8,16]'` is one list; so is `-p sizes=8,16` where the default of `sizes` is a list.
      `-p 'sizes=[8],[8,16]'` are two lists, hence two points.

    * `-p 'title="a, b"'` keeps a comma in a text; `none` is None where the parameter may be None.

    Each point runs in a process of its own and gets a folder with its executed notebook and
    `run.json`; the run's folder gets `index.html` and `points.json`. A point that fails does not
    stop the others; the exit code is then 1.
    """
    if show:
        show_parameters(notebook)
        return
    from workbench.runner.grid import run_grid

    try:
        folder, state = run_grid(notebook, param or [], out=out, resume=resume)
    except KeyboardInterrupt:
        print("interrupted; the same command with --resume goes on from here", file=sys.stderr)
        raise typer.Exit(130) from None
    failed = state.count("failed")
    resumed = sum(point.resumed for point in state.points)
    told = f" ({resumed} from before)" if resumed else ""
    print(
        f"{state.count('complete')} of {len(state.points)} points complete{told}, {failed} failed"
    )
    print(folder / "index.html")
    if failed:
        raise typer.Exit(1)


def report_command(
    param: Annotated[
        list[str] | None,
        typer.Option(
            "--param", "-p", metavar="NAME=VALUE", help="A parameter of the report notebook."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Where run folders go [default: outputs/runs]."),
    ] = None,
    sweep: Annotated[
        bool,
        typer.Option("--sweep", help="Also measure the local matrix on two ranks of this machine."),
    ] = False,
    show: Annotated[
        bool, typer.Option("--show-parameters", help="List the report's parameters and stop.")
    ] = False,
) -> None:
    """Write the report of the published study, or of results of your own, and print its page.

    * `-p ep=64 -p precision=mxfp8` reports on a part of the study.

    * `-p results=PATH` on a result file, a record or a folder of records.

    * `-p hardware=GB200` holds the cases against another device's peaks; `-p hardware_file=PATH`
      takes the peaks from a file of your own.
    """
    from workbench.runner.main_job import NOTEBOOK, build_report
    from workbench.runner.parameters import grid, notebook_parameters

    if show:
        show_parameters(NOTEBOOK)
        return
    points = grid(NOTEBOOK, notebook_parameters(NOTEBOOK), param or [])
    if len(points) > 1:
        raise InputError("a report has one value per parameter; `workbench run` makes grids")
    print(build_report(out, points[0], reported, sweep))
