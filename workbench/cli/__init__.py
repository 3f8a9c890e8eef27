"""`workbench ...`. Each command imports what it needs, so that `workbench --help` starts fast."""

import sys
from typing import Annotated

import typer

import workbench
from workbench.cli.bench_commands import bench
from workbench.cli.compare_command import compare_command
from workbench.cli.doctor_command import doctor_command
from workbench.cli.kernels_command import kernels_command
from workbench.cli.model_commands import calibrate_command, predict_command
from workbench.cli.notebook_commands import report_command, run_command
from workbench.cli.sweep_command import sweep_command
from workbench.errors import InputError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Research workbench for expert-parallel Mixture-of-Experts layers: plan, measure, model, "
    "explore. A line on stderr and exit code 2 mean that an input is wrong; exit code 1 that "
    "something which was to run has failed.",
)
app.add_typer(bench, name="bench")
for name, command in (
    ("sweep", sweep_command),
    ("compare", compare_command),
    ("run", run_command),
    ("report", report_command),
    ("predict", predict_command),
    ("calibrate", calibrate_command),
    ("kernels", kernels_command),
    ("doctor", doctor_command),
):
    app.command(name)(command)


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
    """Options of `workbench` itself; each acts as it is read."""


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
