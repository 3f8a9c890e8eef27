"""What notebook 06 calls: a sweep from a notebook."""

import html
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from workbench.bench.job import Settings, TimingProtocol
from workbench.bench.launch import Hosts
from workbench.bench.matrix import load_matrix
from workbench.bench.resume import flat, refuse_other
from workbench.bench.sweep import Progress, Sweep, open_sweep, run_sweep
from workbench.report.export import FORMATS, Format

FOLDER = "sweep"


class SweepParameters(BaseModel):
    """Parameters of notebook 06. `matrix`: local, reference or a YAML file; `ranks` 0: as many as
    the host takes; `sweep_dir`: where records go and are resumed from, empty for a folder in that
    of the run; the rest is the protocol. With `launcher` slurm the sweep is a SLURM job."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    matrix: str = "local"
    ranks: int = 0
    device: Literal["cpu", "cuda"] = "cpu"
    launcher: Literal["torchrun", "slurm"] = "torchrun"
    nnodes: int = 1
    resume: bool = True
    warmups: int = 10
    windows: int = 5
    iterations: int = 30
    seed: int = 0
    limit_s: float = 600.0
    sweep_dir: str = ""
    formats: list[Format] = list(FORMATS)
    out_dir: str = ""


def measure(p: SweepParameters, folder: Path) -> Sweep:
    """Opens and runs the sweep, with live progress in JupyterLab and plain lines under the runner,
    which gives `out_dir`. Raises InputError for input that is refused, SweepError where ranks do
    not start; cases that fail are records."""
    path = Path(p.sweep_dir) if p.sweep_dir else folder / FOLDER
    known = p.resume and (path / "sweep.json").exists()
    settings = Settings(
        protocol=TimingProtocol(warmups=p.warmups, windows=p.windows, iterations=p.iterations),
        seed=p.seed,
        device=p.device,
    )
    slurm = p.launcher == "slurm"
    sweep = open_sweep(
        path,
        load_matrix(p.matrix),
        settings=None if known else settings,
        hosts=Hosts(),
        ranks=p.ranks or None,
        limit_s=p.limit_s,
        resume=known,
        elsewhere=slurm,
    )
    if known:  # traces are the command's own matter
        refuse_other(sweep, {k: v for k, v in flat(settings).items() if k != "trace"})
    with _shown(live=not p.out_dir) as tell:
        if slurm:
            from workbench.bench.slurm import Submission, submit, watch

            job = Submission(folder=path, nnodes=p.nnodes, ranks=p.ranks or None)
            watch(sweep, submit(sweep, job), tell)
        else:
            run_sweep(sweep, tell)
    for note in sweep.notes:
        print(note)
    return sweep


@contextmanager
def _shown(live: bool) -> Iterator[Any]:
    if not live:
        yield lambda progress: progress.record and print(progress.line(), flush=True)
        return
    from IPython.display import HTML, display

    rows: list[Progress] = []
    handle = display(HTML("starting the ranks ..."), display_id=True)

    def tell(progress: Progress) -> None:
        if progress.record is not None:
            rows.append(progress)
        handle.update(HTML(live_html(progress, rows)))

    yield tell


def live_html(progress: Progress, rows: list[Progress]) -> str:
    """A bar, the case in the works, and the cases that ended, as HTML."""
    left = "" if progress.left_s is None else f", {progress.left_s:.0f} s left"
    head = (
        f"<progress value='{progress.done}' max='{progress.total}'></progress> "
        f"{progress.done} of {progress.total}, {progress.failed} failed{left}<br>"
        f"{html.escape(progress.running)}"
    )
    ended = "".join(f"<li>{html.escape(row.line())}</li>" for row in rows)
    return f"{head}<ul>{ended}</ul>"
