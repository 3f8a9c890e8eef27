"""What the explorers draw from beside their state: the calibration, devices, published results and
the user's own records. Every number keeps its origin.
"""

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from pydantic import BaseModel, ConfigDict

from workbench.case import STUDY_SHAPE, Case, case_table
from workbench.errors import InputError
from workbench.hardware import Hardware, known_devices, load_hardware, match_device
from workbench.model.calibration import DEFAULT, Calibration, load_calibration
from workbench.planning.case_plan import CasePlans, reserving
from workbench.records.protocols import NOISE
from workbench.records.results import REFERENCE, load_table
from workbench.report.figures_explore import ELSEWHERE, MEASURED, PUBLISHED, Spec
from workbench.report.theme import STYLES, system_name
from workbench.systems import PIPELINES, SYSTEMS

System = tuple[str, str, str]
"""(backend, pipeline, precision)."""

Row = dict[str, Any]
WORKLOAD = ("mode", "ep", "F", *STUDY_SHAPE)
"""Fields that, with the load, make a workload."""


PREDICTED_FIELDS = (
    "id",
    "iterationMS",
    "iterationLowMS",
    "iterationHighMS",
    "busiestComputeFloorMS",
    "busiestHbmFloorMS",
    "busiestLinkFloorMS",
    "busiestFixedFloorMS",
    "busiestBinds",
    "usefulTFPerGPU",
    "peakAllocatedGiB",
    "extrapolation",
    "runs",
)


class ShapeState(BaseModel):
    """A workload on a device, in the field names of Case. Frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: str = "training"
    ep: int = 32
    hardware: str = "GB300"
    F: int = 3072
    T: int = STUDY_SHAPE["T"]
    D: int = STUDY_SHAPE["D"]
    E: int = STUDY_SHAPE["E"]
    K: int = STUDY_SHAPE["K"]
    sharedExperts: int = STUDY_SHAPE["sharedExperts"]

    def case(self, system: System, **given: Any) -> Case:
        """The case of this workload on `system`. Raises InputError if it is impossible."""
        backend, pipeline, precision = system
        shared = {name: getattr(self, name) for name in WORKLOAD}
        return Case(
            **{**shared, "backend": backend, "pipeline": pipeline, "precision": precision, **given}
        )


class WorkloadState(ShapeState):
    """A workload on one system."""

    backend: str = "dist_moe"
    pipeline: str = "mega"
    precision: str = "mxfp8"

    @property
    def system(self) -> System:
        return self.backend, self.pipeline, self.precision


class ExplorerParameters(BaseModel):
    """What the explorers' notebooks have in common. `shape` has the fields that differ from the
    study's. `results`: records or a result file of one's own, a further origin in the figure.
    `calibration`, `hardware_file`: in place of the packaged ones."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: str = "training"
    ep: int = 32
    shape: dict[Literal["T", "D", "E", "K", "F", "sharedExperts"], int] = {}
    hardware: str = "GB300"
    results: str = ""
    calibration: str = ""
    hardware_file: str = ""
    out_dir: str = ""

    def workload(self) -> Row:
        """Fields of the initial state."""
        given: Row = {"mode": self.mode, "ep": self.ep, "hardware": self.hardware}
        return given | dict(self.shape)

    def sources(self) -> "Sources":
        return Sources(
            own=str(find_file(self.results)) if self.results else "",
            calibration_file=self.calibration,
            hardware_file=self.hardware_file,
        )


def split_system(text: str) -> dict[str, str]:
    """`dist_moe mega mxfp8` -> backend, pipeline, precision. Raises InputError."""
    parts = text.split()
    if tuple(parts) not in STYLES:
        known = "; ".join(" ".join(system) for system in STYLES)
        raise InputError(f"system={text!r} must be one of: {known}")
    return dict(zip(("backend", "pipeline", "precision"), parts, strict=True))


def find_file(text: str) -> Path:
    """`text` as a path; a relative one may also start at the folder above, because JupyterLab runs
    a notebook in its own folder and the command line at the top."""
    path = Path(text).expanduser()
    above = Path("..") / path
    return above if not path.exists() and above.exists() else path


@dataclass(frozen=True, kw_only=True, eq=False)
class View:
    """What an explorer shows for one state. `rows` are those of the table, `sentence` is HTML."""

    rows: list[Row]
    spec: Spec
    sentence: str
    notes: tuple[str, ...] = ()

    @property
    def table(self) -> pd.DataFrame:
        return pd.DataFrame(self.rows)

    @property
    def figure(self) -> go.Figure:
        return go.Figure(self.spec)


@dataclass(frozen=True, kw_only=True, eq=False)
class Sources:
    """`own` is the path of the user's records or result file, empty for none; its cases appear
    as a further origin. `hardware_file` replaces the packaged peaks."""

    own: str = ""
    calibration_file: str = ""
    hardware_file: str = ""
    _devices: dict[str, Hardware] = field(default_factory=dict)

    @cached_property
    def calibration(self) -> Calibration:
        return load_calibration(self.calibration_file or DEFAULT)

    @cached_property
    def systems(self) -> tuple[System, ...]:
        """The systems that the calibration knows, and those of the user's own, of which it may give
        no time; in the legend's order."""
        known = {r.group for r in self.calibration.ranges}
        return tuple(
            s for s in STYLES if f"{s[0]} {s[2]} {s[1]}" in known or SYSTEMS[s[1]].external
        )

    def pipelines(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """PIPELINES cut down to `systems`."""
        kept: dict[str, dict[str, tuple[str, ...]]] = {}
        for backend, by_pipeline in PIPELINES.items():
            for pipeline, precisions in by_pipeline.items():
                found = tuple(p for p in precisions if (backend, pipeline, p) in self.systems)
                if found:
                    kept.setdefault(backend, {})[pipeline] = found
        return kept

    @cached_property
    def devices(self) -> tuple[str, ...]:
        return known_devices(self.hardware_file or None)

    def hardware(self, name: str) -> Hardware:
        if name not in self._devices:
            self._devices[name] = load_hardware(name, self.hardware_file or None)
        return self._devices[name]

    @cached_property
    def rows(self) -> list[Row]:
        """Published and own cases that have a time, each with its `source` (the origin shown) and
        `peaks` (its device's name in the hardware file, "" if unknown)."""
        found = [_published()]
        if self.own:
            path = Path(self.own)
            found.append([row | {"source": MEASURED} for row in _timed(load_table(path))])
        rows = [row for rows in found for row in rows]
        named = {device: self._matched(device) for device in {row["device"] for row in rows}}
        return [row | {"peaks": named[row["device"]]} for row in rows]

    def _matched(self, device: str) -> str:
        try:
            return match_device(device, self.hardware_file or None)
        except InputError:
            return ""

    @property
    def own_rows(self) -> list[Row]:
        return [row for row in self.rows if row["source"] == MEASURED]

    def matching(self, state: ShapeState, **fields: Any) -> list[Row]:
        """Cases of the state's mode, EP and shape, and of `fields`; published ones only where the
        state's device is the one that they were measured on, own ones of other devices as such."""
        wanted = {name: getattr(state, name) for name in WORKLOAD} | fields
        wanted = {name: value for name, value in wanted.items() if value is not ...}
        found = []
        for row in self.rows:
            if any(row[name] != value for name, value in wanted.items()):
                continue
            if row["peaks"] == state.hardware:
                found.append(row)
            elif row["source"] == MEASURED:
                found.append(row | {"source": ELSEWHERE})
        return found

    def own_note(self, shown: Sequence[Row], hardware: str) -> str:
        """How many of the user's records the figure shows, what the others are, on which device
        they were measured if it is not `hardware`, and by which protocol."""
        own = self.own_rows
        if not own:
            return ""
        mine = [row for row in shown if row["source"] != PUBLISHED]
        told = f"{len(mine)} of {len(own)} records of {Path(self.own).name} have this workload"
        if len(mine) < len(own):
            others = "; ".join(workload_name(row) for row in self.own_workloads())
            told += f"; the file has {others}"
        elsewhere = sorted({str(row["device"]) for row in mine if row["source"] == ELSEWHERE})
        if elsewhere:
            told += f"; measured on {', '.join(elsewhere)}, while the prediction is for {hardware}"
        ran = sorted({str(row["protocol"]) for row in mine if row["protocol"]})
        told += "".join(f"; measured by {protocol}" for protocol in ran)
        noisy = sum(row["noisy"] is True for row in mine)
        return told + (f"; {noisy} noisy: {NOISE}" if noisy else "")

    def own_workloads(self) -> list[Row]:
        """One of the user's rows for each distinct workload."""
        return list({tuple(row[n] for n in WORKLOAD): row for row in self.own_rows}.values())

    def predict(self, cases: Sequence[Case], hardware: str) -> list[Row]:
        """PREDICTED_FIELDS of `Calibration.predict` for each case on a device."""
        device = self.hardware(hardware)
        predicted = self.calibration.predict(case_table(cases), device)
        names = PREDICTED_FIELDS
        return [
            dict(zip(names, row, strict=True))
            for row in zip(*(predicted[name].tolist() for name in names), strict=True)
        ]


def runs(row: Row) -> bool:
    """Whether a predicted case can run, so that it has a time."""
    return bool(row["runs"] == "yes")


def refusal(row: Row) -> str:
    """The first word of why a case does not run: domain, precision, scratch, memory, ..."""
    return str(row["runs"]).split(":")[0]


def extrapolated(row: Row) -> str:
    """What of a predicted case lies outside the records; "" for nothing, or where it has no
    time."""
    return f"extrapolated: {row['extrapolation']}" if row["extrapolation"] and runs(row) else ""


def no_time(system: System, row: Row) -> str:
    """The sentence of a case that does not run."""
    told = html.escape(_reason(system, row))
    return f"<b>No time: {system_name(system)} cannot run</b>: {told}."


def _reason(system: System, row: Row) -> str:
    """Why a system does not run, without its name, which stands before."""
    backend, pipeline, precision = system
    return str(row["runs"]).removesuffix(f" ({backend} {precision} {pipeline})")


def refused_note(rows: Mapping[System, Row]) -> str:
    """Which systems do not run, and why; "" if all do."""
    by_reason: dict[str, list[str]] = {}
    for system, row in rows.items():
        if not runs(row):
            by_reason.setdefault(_reason(system, row), []).append(system_name(system))
    told = (f"{', '.join(names)} cannot run: {why}" for why, names in by_reason.items())
    return "; ".join(told)


def plan_rows(cases: Sequence[Case]) -> list[Row]:
    """Bounds of each case, as in `plan_table` (NaN where there is none), and two arrays over its
    layers: `paddedRows` that rank 0 schedules, and `againRows`, those of them that backward
    recomputes or replays. Raises InputError for what cannot be planned."""
    table = case_table(cases)
    plans = CasePlans(table=table)
    padded, again = plans.padded(plans.rows.rank0), np.zeros_like(plans.rows.rank0)
    found = [dict.fromkeys(PLANNED_FIELDS, math.nan) for _ in cases]
    for reserves, chosen in reserving(table["pipeline"]).items():
        part = CasePlans(table=table.iloc[chosen])
        layers = part.rows.rank0.shape[1]
        again[chosen, :layers] = (
            padded[chosen, :layers] * part.saved[2] if reserves == "slot" else part.replay_rows
        )
        bounds = part.bounds(reserves)
        for k, n in enumerate(chosen):
            found[n] |= {name: float(bounds[name][k]) for name in PLANNED_FIELDS if name in bounds}
    return [
        bounds | {"paddedRows": padded[n, : case.layers], "againRows": again[n, : case.layers]}
        for n, (case, bounds) in enumerate(zip(cases, found, strict=True))
    ]


PLANNED_FIELDS = (
    "slotBytes",
    "scratchRows",
    "recomputedLayers",
    "retainedRowsPerLayer",
    "totalReplayRows",
    "busiestPaddedRows",
)


@lru_cache(maxsize=1)
def _published() -> list[Row]:
    return [row | {"source": PUBLISHED} for row in _timed(load_table(REFERENCE))]


def _timed(table: pd.DataFrame) -> Iterator[Row]:
    for row in table[table["iterationMS"].notna()].to_dict("records"):
        yield {str(k): v for k, v in row.items()}


def system_of(row: Row) -> System:
    return row["backend"], row["pipeline"], row["precision"]


def workload_name(row: Row) -> str:
    """`inference EP 4, T=64 D=128 E=8 K=2 F=64`."""
    shape = " ".join(f"{name}={row[name]}" for name in ("T", "D", "E", "K", "F"))
    return f"{row['mode']} EP {row['ep']}, {shape}"


def category_of(system: System) -> str:
    """A system's name on a categorical axis: one line for each part."""
    backend, pipeline, _ = system
    return f"{backend}<br>{pipeline}<br>{system_name(system).rsplit(' ', 1)[1]}"


def milliseconds(value: float) -> str:
    """Three or four digits: `0.412 ms`, `41.2 ms`."""
    return f"{value:.3g} ms" if value < 100 else f"{value:,.0f} ms"
