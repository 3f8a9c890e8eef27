"""`workbench sweep`. Progress is a bar on a terminal and plain lines elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.errors import InputError

Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="The sweep's folder [default: outputs/runs/ID]."),
]


RESUMED = (
    "device",
    "domain",
    "graphs",
    "warmups",
    "windows",
    "iterations",
    "seed",
    "limit_s",
    "trace",
)
"""Options that a resumed sweep takes from its folder; given all the same, they must be equal."""


def sweep_command(
    ctx: typer.Context,
    matrix: Annotated[
        str, typer.Argument(metavar="MATRIX", help="`local`, `reference`, or a YAML file.")
    ] = "local",
    out: Out = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the sweep in --out, or with the latest, with the "
            "cases and options that it was started with.",
        ),
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option(help="Ranks there are in all [default: GPUs, or cores, of the hosts]."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    graphs: Annotated[
        bool, typer.Option("--graphs/--no-graphs", help="On a GPU, time CUDA graphs of the steps.")
    ] = True,
    domain: Annotated[
        str,
        typer.Option(
            help="Which ranks reach each other's memory: auto (what the driver says, else the"
            " host), host (each host its own) or job (all of them)."
        ),
    ] = "auto",
    warmups: Annotated[int, typer.Option(help="Iterations before the first window.")] = 10,
    windows: Annotated[int, typer.Option(help="Windows of each case.")] = 5,
    iterations: Annotated[int, typer.Option(help="Iterations of a window.")] = 30,
    seed: Annotated[int, typer.Option(help="Seed of routing, tokens and weights.")] = 0,
    limit_s: Annotated[float, typer.Option(help="Seconds that a case may take.")] = 600.0,
    trace: Annotated[
        bool, typer.Option("--trace", help="A trace per rank and case, in traces/ of the folder.")
    ] = False,
    nnodes: Annotated[int, typer.Option(help="Hosts; run the command on each of them.")] = 1,
    rdzv: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the hosts' torchrun agents meet.")
    ] = "",
    local_addr: Annotated[
        str, typer.Option(help="This host's address, where its name does not resolve.")
    ] = "",
    beside: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Measure a second run B into DIR, turn by turn with this one."
        ),
    ] = None,
    beside_env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="What is different in B's environment."),
    ] = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Submit as a SLURM job on --nnodes and watch it.")
    ] = False,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="An option for sbatch, such as --partition=gpu."),
    ] = None,
    in_job: Annotated[bool, typer.Option("--in-job", hidden=True)] = False,
) -> None:
    """Measure the cases of a matrix on real ranks, by default with the published study's protocol.

    A case whose slowest window takes more than 1.25 times its median one is measured again, up to
    three times as the limit allows, and marked `noisy` where it stays so.

    * `workbench sweep local` runs on any machine: two ranks on CPU cores, small shapes.

    * `workbench sweep my.yaml --ranks 8 --device cuda` measures cases of your own.

    * `workbench sweep --resume --out DIR` goes on with a sweep that was stopped, however it was.

    * `workbench sweep my.yaml --out DIR --nnodes 2 --rdzv node0:29400`, on each of two hosts with a
    common DIR; `--slurm` has SLURM do it on one node.

    * `workbench sweep local --out A --beside B --beside-env NAME=VALUE`, then `workbench compare A
    B`.
    """
    from workbench.bench.job import Settings, TimingProtocol
    from workbench.bench.launch import Hosts
    from workbench.bench.matrix import load_matrix
    from workbench.bench.resume import refuse_other
    from workbench.bench.sweep import open_sweep
    from workbench.runner.notebook import new_run_dir
    from workbench.runtime import find_runtime

    find_runtime(device)
    if slurm and beside:
        raise InputError("--beside cannot be measured with --slurm")
    if sbatch and not slurm:
        raise InputError("--sbatch needs --slurm")
    if beside_env and beside is None:
        raise InputError("--beside-env needs --beside")
    environment = tuple(_setting(text) for text in beside_env or ())
    folder = out or (_latest() if resume else new_run_dir("sweep"))
    settings = Settings(
        protocol=TimingProtocol(
            warmups=warmups, windows=windows, iterations=iterations, graphs=graphs
        ),
        seed=seed,
        device=device,
        domain=domain,
        trace_dir=str(folder / "traces") if trace else "",
    )
    prefix: tuple[str, ...] = ()
    if in_job:
        prefix = ("srun", f"--nodes={nnodes}", "--ntasks-per-node=1", "--cpu-bind=none")
    hosts = Hosts(nnodes=nnodes, rdzv=rdzv, prefix=prefix, local_addr=local_addr)
    follower = nnodes > 1 and not in_job and not slurm
    there = _holds_sweep(folder)
    if resume and not there:
        raise InputError(f"out={folder} holds no sweep to resume")
    if beside is not None:
        if beside.resolve() == folder.resolve():
            raise InputError(f"beside={beside} must be another folder than --out")
        if resume and not _holds_sweep(beside) and any(folder.glob("records/*")):
            raise InputError(f"beside={beside} holds no sweep to resume")
    known = there and (resume or follower)
    given = [
        name
        for name, value in ctx.params.items()
        if str(getattr(ctx.get_parameter_source(name), "name", "")) != "DEFAULT"
    ]
    cases = load_matrix(matrix) if not known or "matrix" in given else []
    opened = open_sweep(
        folder,
        cases,
        settings=None if known else settings,
        hosts=Hosts() if slurm else hosts,
        ranks=ranks,
        limit_s=None if known else limit_s,
        resume=resume or follower,
        elsewhere=slurm,
    )
    if known:
        refuse_other(opened, {name: ctx.params[name] for name in RESUMED if name in given})
    if slurm:
        from workbench.bench.slurm import Submission, submit, watch

        job = Submission(folder=folder, nnodes=nnodes, ranks=ranks, options=tuple(sbatch or ()))
        with _told(opened) as tell:
            watch(opened, submit(opened, job), tell)
        _summary(opened)
        return
    with _told(opened, beside) as tell:
        if beside is None:
            from workbench.bench.sweep import run_sweep

            run_sweep(opened, tell)
        else:
            from workbench.bench.interleave import run_pair

            other = open_sweep(
                beside,
                opened.cases,
                settings=opened.settings,
                ranks=ranks,
                limit_s=opened.limit_s,
                hosts=Hosts(environment=environment),
                resume=resume,
            )
            run_pair(opened, other, lambda name, progress: tell(progress, name))
    _summary(opened)


@contextmanager
def _told(sweep: Any, beside: Path | None = None) -> Iterator[Callable[..., None]]:
    """Progress as it comes; Ctrl-C ends with exit code 130, ranks that do not start with 1."""
    from workbench.bench.sweep import SweepError

    print(sweep.folder.path, flush=True)
    try:
        if sys.stderr.isatty():
            with _bar(len(sweep.cases)) as tell:
                yield tell
        else:
            yield _line
    except SweepError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        command = f"workbench sweep --resume --out {sweep.folder.path}"
        command += "" if beside is None else f" --beside {beside}"
        print(f"interrupted; {command} goes on from here", file=sys.stderr)
        raise typer.Exit(130) from None


def _line(progress: Any, name: str = "") -> None:
    if progress.record is not None:
        print(f"{name + ' ' * bool(name)}{progress.line()}", file=sys.stderr, flush=True)


@contextmanager
def _bar(total: int) -> Iterator[Callable[..., None]]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        tasks: dict[str, Any] = {}

        def tell(progress: Any, name: str = "") -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            if progress.record is not None:
                bar.console.print(f"{name} {progress.line()}".strip(), highlight=False)
            bar.update(
                tasks[name],
                completed=progress.done,
                description=f"{name} {progress.running}".strip(),
            )

        yield tell


def _summary(sweep: Any) -> None:
    for note in sweep.notes:
        print(note, file=sys.stderr)
    left, failed = len(sweep.left()), sweep.failed()
    print(f"{len(sweep.cases) - left} of {len(sweep.cases)} cases measured, {failed} failed")
    if left:
        raise typer.Exit(1)


def _holds_sweep(folder: Path) -> bool:
    return (folder / "sweep.json").exists()


def _latest() -> Path:
    from workbench.runner.notebook import runs_dir

    found = sorted(path.parent for path in runs_dir().glob("*/sweep.json"))
    if not found:
        raise InputError(f"{runs_dir()}: holds no sweep to resume")
    return found[-1]


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise InputError(f"beside-env={text!r} must be NAME=VALUE")
    return name, value
