"""`workbench predict` and `workbench calibrate`: the time and memory model."""

import json
from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.output import print_frame


def predict_command(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="Ids of cases, as in a record.")
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(
            "--param",
            "-p",
            metavar="NAME=VALUE[,VALUE...]",
            help="A field of the case, or several values of it; may be repeated.",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", metavar="FILE", help="[default: the published GB300 study]"),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="NAME", help="The GPU [default: the calibrated one].")
    ] = "",
    hardware_file: Annotated[
        Path | None,
        typer.Option("--hardware-file", metavar="FILE", help="Take the GPU's peaks from FILE."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list, every column.")] = False,
) -> None:
    """Predict iteration, forward and backward time and peak memory of cases.

    * `workbench predict dist_moe-training-ep64-mxfp8-mega-single_layer-i4-F3072`

    * `workbench predict -p pipeline=mega,staged -p mode=training -p ep=32,64 -p F=2048`

    Times are in ms with their 90 % interval, memory in GiB. `runs` says why a case cannot run on
    the GPU, and then there is no time. A combination that is no case at all is a row with its
    reason; the exit code is 0 as long as one combination is a case. A prediction that lies outside
    the records names all that does, and has a wider interval.
    """
    from workbench.model import query
    from workbench.model.calibration import DEFAULT, load_calibration

    points = query.points_of(ids or [], param or [])
    hardware = query.query_device(device, hardware_file)
    found = query.predict_points(load_calibration(calibration or DEFAULT), points, hardware)
    if as_json:
        print(query.records(found))
        return
    query.print_predictions(found)


def calibrate_command(
    results: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RESULTS]",
            help="A result file, record or folder of records [default: the published study].",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the calibration to FILE.")
    ] = None,
    validate: Annotated[
        bool, typer.Option("--validate", help="Refit without each protocol's cases; show errors.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same as one JSON object.")] = False,
) -> None:
    """Fit the time model to measured cases and show its parameters, or how wrong it is.

    With `--validate`: mean and worst error of every protocol on cases that the fit has not seen,
    against the gates and goals that were set for the published study; exit code 1 if one of those
    gates is missed.
    """
    from workbench.model.calibrate import calibrate
    from workbench.model.calibration import parameter_table
    from workbench.model.validate import shown_protocols
    from workbench.model.validate import validate as run_protocols
    from workbench.records.results import REFERENCE, load_table

    table = load_table(results or REFERENCE)
    source = "" if results else "published GB300 study (2026-10-16)"
    if out is not None:
        calibrate(table, source=source).save(out)
    if validate:
        found = run_protocols(table)
        if as_json:
            print(found.to_json())
        else:
            print_frame(shown_protocols(found))
            print(
                f"90 % intervals: {found.coverage:.1%} covered, median width "
                f"{found.median_width:.1%}; {found.fits} fits in {found.seconds:.1f} s"
            )
        if not found.passed:
            raise typer.Exit(1)
    elif as_json:
        print(json.dumps(calibrate(table, source=source).model_dump()))
    elif out is None:
        print_frame(
            parameter_table(calibrate(table, source=source))[["parameter", "slot", "value", "unit"]]
        )
