"""What notebook 06 calls: a sweep from a notebook, laid beside the published and the predicted."""

import html
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from pydantic import BaseModel, ConfigDict

from workbench.bench.job import Protocol, Settings
from workbench.bench.launch import Launch
from workbench.bench.matrix import load_matrix
from workbench.bench.peaks import measured_cpu
from workbench.bench.record import export_results, load_table
from workbench.bench.resume import flat, refuse_other
from workbench.bench.stated import HIGH, LOW, STEPS, TIME_SPREAD, measured_how, protocols
from workbench.bench.sweep import Progress, Sweep, open_sweep, run_sweep
from workbench.errors import InputError
from workbench.files import write_atomic
from workbench.hardware import Hardware, load_hardware, match_device
from workbench.model.calibrate import calibrate
from workbench.model.calibration import Calibration, load_calibration
from workbench.model.parameters import Group
from workbench.report.draw import subtitle
from workbench.report.export import FORMATS, Exported, Format, export_figures
from workbench.report.figures_sweep import SWEEP_FIGURES

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
        protocol=Protocol(warmups=p.warmups, windows=p.windows, iterations=p.iterations),
        seed=p.seed, device=p.device,
    )  # fmt: skip
    slurm = p.launcher == "slurm"
    sweep = open_sweep(
        path, load_matrix(p.matrix), settings=None if known else settings, launch=Launch(),
        ranks=p.ranks or None, limit_s=p.limit_s, resume=known, elsewhere=slurm,
    )  # fmt: skip
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
        yield lambda progress: progress.record and print(line(progress), flush=True)
        return
    from IPython.display import HTML, display

    rows: list[Progress] = []
    handle = display(HTML("starting the ranks ..."), display_id=True)

    def tell(progress: Progress) -> None:
        if progress.record is not None:
            rows.append(progress)
        handle.update(HTML(live_html(progress, rows)))

    yield tell


def line(progress: Progress) -> str:
    """A case that ended, as a line: count, id, time or reason, time left."""
    record = progress.record
    assert record is not None
    found = f"{record.iterationMS:.4g} ms" if record.iterationMS else f"failed: {record.reason}"
    found += ", noisy" if record.noisy else ""
    left = f", {progress.left_s:.0f} s left" if progress.left_s else ""
    return f"{progress.done}/{progress.total} {record.id}: {found}{left}"


def live_html(progress: Progress, rows: list[Progress]) -> str:
    """A bar, the case in the works, and the cases that ended, as HTML."""
    left = "" if progress.left_s is None else f", {progress.left_s:.0f} s left"
    head = (
        f"<progress value='{progress.done}' max='{progress.total}'></progress> "
        f"{progress.done} of {progress.total}, {progress.failed} failed{left}<br>"
        f"{html.escape(progress.running)}"
    )
    ended = "".join(f"<li>{html.escape(line(row))}</li>" for row in rows)
    return f"{head}<ul>{ended}</ul>"


@dataclass(frozen=True, kw_only=True)
class SweepReport:
    """A sweep's records and what they are held against. `calibration` and `hardware` are those of
    the sweep's own device, None where `reason` says why; `predicted` has the same cases as the
    packaged calibration of the published GB300 study predicts them for that device."""

    parameters: SweepParameters
    table: pd.DataFrame
    published: pd.DataFrame
    predicted: pd.DataFrame
    own_fit: pd.DataFrame
    calibration: Calibration | None
    hardware: Hardware | None
    reason: str

    @cached_property
    def figures(self) -> dict[str, go.Figure]:
        """Every figure of SWEEP_FIGURES, by name."""
        tables = [self.table, self.own_fit, self.published, self.predicted]
        joined = pd.concat([t for t in tables if len(t)], ignore_index=True)
        measured = self.table[self.table["iterationMS"].notna()]
        told = {"side_by_side": protocols(measured), "slowdown": protocols(joined)}
        return {name: subtitle(fn(joined), told[name]) for name, fn in SWEEP_FIGURES.items()}

    def export(self, folder: Path) -> Exported:
        """Write the figures, `cases.csv`, `results.json` (a result file's four keys) and the
        calibration into `folder`. Raises InputError where it cannot be written."""
        exported = export_figures(self.figures, folder / "figures", self.parameters.formats)
        write_atomic(folder / "data" / "cases.csv", self.table.to_csv(index=False))
        export_results(self.table, folder / "data" / "results.json")
        if self.calibration is not None:
            self.calibration.save(folder / "data" / "calibration.json")
        return exported

    def times(self) -> pd.DataFrame:
        """id, status, whether noisy, times in ms with p20 and p80 over windows, rates and reason
        of each case."""
        names = ["id", "status", "noisy"]
        names += [f"{step}MS{end}" for step in STEPS for end in ("", LOW, HIGH)]
        names += ["usefulTFPerGPU", "meanTXGBps", "peakAllocatedGiB", "reason"]
        return self.table[names].set_index("id")

    def protocol(self) -> str:
        """How these records were measured, as they say themselves."""
        return "; ".join(measured_how(self.table))

    def fit(self) -> pd.DataFrame:
        """Measured and calibrated time of each case in ms, and their ratio; p20 and p80 of the
        measured one."""
        names = {f"iterationMS{end}": f"measured{end}" for end in ("", LOW, HIGH)}
        both = self.table.set_index("id")[list(names)].rename(columns=names)
        if not len(self.own_fit):
            return both[:0].assign(predicted=[], ratio=[])
        both["predicted"] = self.own_fit.set_index("id")["iterationMS"]
        return both.assign(ratio=both["predicted"] / both["measured"]).dropna(subset="ratio")


def open_sweep_report(parameters: SweepParameters, records: Path) -> SweepReport:
    """Load the records of a sweep, the published study and predictions for the same cases, and
    calibrate the time model on the records, where they allow it."""
    table = load_table(records)
    published = load_table()
    packaged = load_calibration()
    known = {r.group for r in packaged.ranges}
    groups = [str(Group(*row)) for row in table[list(Group._fields)].itertuples(index=False)]
    there = table[[group in known for group in groups]]
    predicted = packaged.predict(there) if len(there) else table[:0]
    calibration, hardware, reason = _calibrated(table)
    own_fit = table[:0]
    if calibration is not None and hardware is not None:
        own_fit = calibration.predict(table[table["iterationMS"].notna()], hardware)
    return SweepReport(
        parameters=parameters, table=table, published=published[published["precision"] == "bf16"],
        predicted=_plain(predicted, table), own_fit=_plain(own_fit, table),
        calibration=calibration, hardware=hardware, reason=reason,
    )  # fmt: skip


def _calibrated(table: pd.DataFrame) -> tuple[Calibration | None, Hardware | None, str]:
    timed = table[table["iterationMS"].notna()]
    try:
        if timed.empty:
            raise InputError("no case has a time")
        device = str(timed["device"].mode()[0])
        if device.startswith("CPU "):
            hardware = measured_cpu(device, int(timed["ep"].max()))
        else:
            hardware = load_hardware(match_device(device))
        with np.errstate(divide="ignore", invalid="ignore"):  # steps of the fit out of bounds
            return calibrate(timed, hardware=hardware, source="own records"), hardware, ""
    except InputError as error:
        return None, None, str(error)


def _plain(predicted: pd.DataFrame, like: pd.DataFrame) -> pd.DataFrame:
    """Predictions with the columns of a table of records; how those were measured is not theirs."""
    frame = predicted.reindex(columns=like.columns).assign(
        protocol="",
        noisy=pd.NA,
        samples=None,
        provenance=None,
        **dict.fromkeys(TIME_SPREAD, np.nan),
    )
    for name in ("origin", "device"):
        frame[name] = frame[name].astype(object)
    return frame.assign(implementation="time model")
