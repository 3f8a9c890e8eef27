"""`workbench ...`. Each command imports what it needs, so that `workbench --help` starts fast."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

import workbench
from workbench.errors import InputError, check_whole
from workbench.sweeping import compare_command, sweep_command

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Research workbench for expert-parallel Mixture-of-Experts layers: plan, measure, model, "
    "explore. A line on stderr and exit code 2 mean that an input is wrong; exit code 1 that "
    "something which was to run has failed.",
)
bench = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Measure parts of the workbench itself; a table for people, or `--json` for one line of "
    "named figures.",
)
app.add_typer(bench, name="bench")
app.command("sweep")(sweep_command)
app.command("compare")(compare_command)

Json = Annotated[bool, typer.Option("--json", help="One JSON line of named figures.")]


def print_figures(figures: Mapping[str, float | int | str], as_json: bool) -> None:
    """What a `bench` command prints: one JSON line, or a table. Names end in their unit."""
    if as_json:
        print(json.dumps(figures))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("figure", "value")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else str(value))
    Console().print(table)


@contextmanager
def reported(name: str) -> Iterator[Callable[[int, int], None]]:
    """Around one notebook: progress on stderr by the yielded `on_cell`; a failing cell is shown and
    ends the command with exit code 1, Ctrl-C with 130."""
    from workbench.notebook import NotebookError

    try:
        with _cell_progress(name) as on_cell:
            yield on_cell
    except NotebookError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(130) from None


@contextmanager
def _cell_progress(name: str) -> Iterator[Callable[[int, int], None]]:
    if not sys.stderr.isatty():
        yield lambda index, cells: None if index else print(f"{name}: started", file=sys.stderr)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=None)
        yield lambda index, cells: bar.update(task, completed=index, total=cells)
        bar.update(task, completed=1, total=1)


def _version(asked: bool) -> None:
    if asked:
        print(f"moe-workbench {workbench.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version.")
    ] = False,
) -> None:
    pass


@app.command("run")
def run_command(
    notebook: Annotated[Path, typer.Argument(metavar="NOTEBOOK", help="The notebook to execute.")],
    param: Annotated[
        list[str] | None,
        typer.Option(
            "--param", "-p", metavar="NAME=VALUE[,VALUE...]",
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
            "--resume", metavar="[RUN_ID]",
            help="Go on with a run of this notebook (the latest, or the one in --out), leaving out "
            "points that are complete for the same notebook, parameters, input files and version. "
            "Without -p: all its points; with -p: the points asked for, beside those that it has.",
        ),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show-parameters", help="List the notebook's parameters and stop.")
    ] = False,
) -> None:  # fmt: skip
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
        _show_parameters(notebook)
        return
    from workbench.grid import run_grid

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


@app.command("report")
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
    from workbench.parameters import grid, notebook_parameters
    from workbench.study import NOTEBOOK, build_report

    if show:
        _show_parameters(NOTEBOOK)
        return
    points = grid(NOTEBOOK, notebook_parameters(NOTEBOOK), param or [])
    if len(points) > 1:
        raise InputError("a report has one value per parameter; `workbench run` makes grids")
    print(build_report(out, points[0], reported, sweep))


@app.command("predict")
def predict_command(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="Ids of cases, as in a record.")
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(
            "--param", "-p", metavar="NAME=VALUE[,VALUE...]",
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
) -> None:  # fmt: skip
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


@app.command("calibrate")
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
) -> None:  # fmt: skip
    """Fit the time model to measured cases and show its parameters, or how wrong it is.

    With `--validate`: mean and worst error of every protocol on cases that the fit has not seen,
    against the gates and goals that were set for the published study; exit code 1 if one of those
    gates is missed.
    """
    from workbench.bench.record import REFERENCE, load_table
    from workbench.model.calibrate import calibrate
    from workbench.model.calibration import parameter_table
    from workbench.model.validate import shown_protocols
    from workbench.model.validate import validate as run_protocols

    table = load_table(results or REFERENCE)
    source = "" if results else "published GB300 study (2026-10-16)"
    if out is not None:
        calibrate(table, source=source).save(out)
    if validate:
        found = run_protocols(table)
        if as_json:
            print(found.to_json())
        else:
            _print_frame(shown_protocols(found))
            print(
                f"90 % intervals: {found.coverage:.1%} covered, median width "
                f"{found.median_width:.1%}; {found.fits} fits in {found.seconds:.1f} s"
            )
        if not found.passed:
            raise typer.Exit(1)
    elif as_json:
        print(json.dumps(calibrate(table, source=source).model_dump()))
    elif out is None:
        _print_frame(parameter_table(calibrate(table, source=source))[
            ["parameter", "slot", "value", "unit"]])  # fmt: skip


def _print_frame(frame: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*map(str, frame.columns))
    for row in frame.itertuples(index=False, name=None):
        table.add_row(
            *("" if v != v else f"{v:,.4g}" if isinstance(v, float) else str(v) for v in row)
        )
    console = Console()
    Console(width=None if console.is_terminal else 200).print(table)


def _show_parameters(notebook: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from workbench.parameters import notebook_parameters

    table = Table("parameter", "type", "default", "")
    for p in notebook_parameters(notebook).values():
        table.add_row(p.name, p.kind_name, repr(p.default), p.help)
    Console().print(table)


@app.command("kernels")
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
    from dataclasses import asdict

    from workbench.bench.kernel_table import kernel_rows
    from workbench.kernels.aot import TARGETS
    from workbench.kernels.ops import Sizes

    for name, value in {"T": T, "D": D, "F": F, "E": E, "K": K, "ep": ep}.items():
        check_whole(name, value)
    if E % ep:
        raise InputError(f"ep={ep} must divide E={E}")
    sizes = Sizes(T=T, D=D, F=F, E=E, K=K, ep=ep)
    rows = (
        row for row in kernel_rows(sizes, target or tuple(TARGETS), op, ptx) if row.main or helpers
    )
    if as_json:
        for row in rows:
            print(json.dumps(asdict(row)), flush=True)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("op", "target", "matrix instruction", "TMA", "regs", "spill B", "smem B",
                  "stages", "resident", "FLOP/tile", "B/tile", "bound by", "floor us",
                  "run")  # fmt: skip
    for row in rows:
        unit = row.instruction.split(".sync")[0].replace(".cta_group::1", "")
        table.add_row(
            row.op if row.main else f"{row.op}: {row.kernel}", row.target, unit,
            row.tma + (" (own warps)" if row.warp_specialised else ""), str(row.registers),
            str(row.spill_bytes), f"{row.shared_bytes:,}", str(row.stages), str(row.resident),
            f"{row.flop_per_tile:.3g}" if row.flop_per_tile else "-",
            f"{row.bytes_per_tile:,}", row.bound_by, f"{row.predicted_us:,.1f}", row.run,
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 220).print(table)


@bench.command("kernels")
def bench_kernels_command(as_json: Json = False) -> None:
    """Triton kernels against torch's grouped product, cuBLAS and `alltoall`, on a GPU.

    Ratios are of rates: above 1 ours is faster.
    """
    from workbench.bench.kernel_bench import bench_kernels

    print_figures(bench_kernels(), as_json)


@bench.command("plan")
def bench_plan_command(as_json: Json = False) -> None:
    """Time to cost and plan a table of 100,000 random cases."""
    from workbench.speed import bench_plan

    print_figures(bench_plan(), as_json)


@bench.command("predict")
def bench_predict_command(cases: int = 1_000_000, as_json: Json = False) -> None:
    """Time to predict a table of a million random cases."""
    from workbench.speed import bench_predict

    print_figures(bench_predict(cases), as_json)


@bench.command("layer")
def bench_layer_command(rounds: int = 15, transformers: bool = True, as_json: Json = False) -> None:
    """The layer on this machine's cores against the dense products it is made of, and against
    transformers' DeepSeek-V3 MoE block (pip install transformers, or --no-transformers)."""
    from workbench.bench.layer import bench_layer

    print_figures(bench_layer(rounds=rounds, transformers=transformers), as_json)


@bench.command("explore")
def bench_explore_command(changes: int = 200, as_json: Json = False) -> None:
    """Time from a control's change to the updated figure, for each explorer, in the kernel."""
    from workbench.speed import bench_explore

    print_figures(bench_explore(changes), as_json)


@bench.command("runner")
def bench_runner(repeats: int = 3, as_json: Json = False) -> None:
    """Time from call to return for a notebook that does nothing: what the runner itself costs."""
    import statistics
    import tempfile
    import time

    import nbformat

    from workbench.notebook import run_notebook

    cell = nbformat.v4.new_code_cell("n = 1", metadata={"tags": ["parameters"]})
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "empty.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
        for repeat in range(repeats):
            began = time.perf_counter()
            run_notebook(path, Path(folder) / str(repeat), {"n": repeat})
            seconds.append(time.perf_counter() - began)
    median, worst = statistics.median(seconds), max(seconds)
    figures: dict[str, Any] = {"median_s": median, "max_s": worst, "repeats": repeats}
    print_figures(figures, as_json)


@bench.command("sweep")
def bench_sweep_command(as_json: Json = False) -> None:
    """Time that the harness of a sweep adds to a case, on the local matrix."""
    from workbench.sweeping import bench_sweep

    print_figures(bench_sweep(), as_json)


def main() -> None:
    """The `workbench` command. Bad input is one line on stderr and exit code 2."""
    import signal

    def terminated(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt  # a run that is told to end closes its records like one at Ctrl-C

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, terminated)
    try:
        app(args=_bare_resume(sys.argv[1:]), standalone_mode=True)
    except (InputError, OSError) as error:
        if isinstance(error, OSError):
            if error.filename is None:
                raise
            # A path that the file system refuses: too long, not ours, on a disk that is full.
            error = InputError(f"{error.filename}: {error.strerror}")
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _bare_resume(args: list[str]) -> list[str]:
    """`--resume` without a run id means the latest run; typer has no option with optional value."""
    if "--resume" not in args or args[:1] != ["run"]:
        return args
    at = args.index("--resume")
    value = args[at + 1 : at + 2]
    if value and not value[0].startswith("-") and not value[0].endswith(".ipynb"):
        return args
    return [*args[: at + 1], "latest", *args[at + 1 :]]


if __name__ == "__main__":
    main()
