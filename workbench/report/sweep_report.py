"""A sweep's records laid beside the published and the predicted."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from workbench.bench.peaks import measured_cpu
from workbench.errors import InputError
from workbench.files import write_atomic
from workbench.hardware import Hardware, load_hardware, match_device
from workbench.model.calibrate import calibrate
from workbench.model.calibration import Calibration, load_calibration
from workbench.model.coefficients import Group
from workbench.records.protocols import HIGH, LOW, STEPS, TIME_SPREAD, measured_how, protocols
from workbench.records.results import export_results, load_table
from workbench.report.draw import subtitle
from workbench.report.export import FORMATS, Exported, Format, export_figures
from workbench.report.figures_sweep import SWEEP_FIGURES

FOLDER = "sweep"


@dataclass(frozen=True, kw_only=True)
class SweepReport:
    """A sweep's records and what they are held against. `calibration` and `hardware` are those of
    the sweep's own device, None where `reason` says why; `predicted` has the same cases as the
    packaged calibration of the published GB300 study predicts them for that device."""

    formats: Sequence[Format]
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
        exported = export_figures(self.figures, folder / "figures", self.formats)
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


def open_sweep_report(records: Path, formats: Sequence[Format] = FORMATS) -> SweepReport:
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
        formats=formats,
        table=table,
        published=published[published["precision"] == "bf16"],
        predicted=_plain(predicted, table),
        own_fit=_plain(own_fit, table),
        calibration=calibration,
        hardware=hardware,
        reason=reason,
    )


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
