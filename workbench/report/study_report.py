"""The report of a result file: its parameters, its selection, its files. A notebook calls these."""

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import plotly.graph_objects as go
from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

import workbench
from workbench.errors import InputError
from workbench.files import sha256, write_atomic
from workbench.hardware import Hardware, known_devices, load_hardware, match_device
from workbench.records.protocols import measured_how
from workbench.records.results import REFERENCE, export_results, load_table
from workbench.report.export import FORMATS, Exported, Format, export_figures
from workbench.report.figures import all_figures
from workbench.systems import TRIPLES

FILTERS = ("ep", "mode", "backend", "precision", "category")


class ReportParameters(BaseModel):
    """Parameters of the report notebook. An empty list selects everything.

    `results`: a result file, a record file or a folder with records; empty for the published
    study. `hardware`: the device whose peaks all cases are held against; empty for the device of
    the most cases, which then holds only its own. `hardware_file`: peaks of one's own in place of
    the packaged ones.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    results: str = ""
    ep: list[int] = []
    mode: list[Literal["inference", "training"]] = []
    backend: list[str] = []
    precision: list[str] = []
    category: list[Literal["single_layer", "width", "packing"]] = []
    formats: list[Format] = list(FORMATS)
    hardware: str = ""
    hardware_file: str = ""
    out_dir: str = ""

    @field_validator("backend", "precision")
    @classmethod
    def _known(cls, values: list[str], field: ValidationInfo) -> list[str]:
        at = 0 if field.field_name == "backend" else 2
        known = dict.fromkeys(system[at] for system in TRIPLES)
        for value in values:
            if value not in known:
                raise ValueError(f"{value!r} must be one of {', '.join(known)}")
        return values


@dataclass(frozen=True, kw_only=True)
class Report:
    """A selection of cases and what is made of it. `input_sha256` is that of `source`, or of the
    names and contents of the records in a folder."""

    parameters: ReportParameters
    source: Path
    input_sha256: str
    table: pd.DataFrame
    hardware: Hardware | None

    @cached_property
    def figures(self) -> dict[str, go.Figure]:
        """Every figure of `FIGURES`, by name."""
        chosen = self.parameters
        return all_figures(
            self.table,
            self.hardware,
            chosen.hardware_file or None,
            every_device=bool(chosen.hardware),
        )

    @property
    def protocols(self) -> list[str]:
        """How the cases were measured, as their records or their file say."""
        return measured_how(self.table)

    def export(self, folder: Path) -> Exported:
        """Write the figures into `folder`/figures and the cases into `folder`/data: `cases.csv`,
        and `results.json` with the four keys of a result file. Raises InputError."""
        exported = export_figures(self.figures, folder / "figures", self.parameters.formats)
        write_atomic(folder / "data" / "cases.csv", self.table.to_csv(index=False))
        if not self.table["id"].duplicated().any():  # ids of two sources may coincide
            export_results(self.table, folder / "data" / "results.json")
        return exported

    def provenance(self) -> dict[str, Any]:
        """What is needed to make this report again."""
        packages = ("plotly", "pandas", "numpy", "kaleido")
        return {
            "made": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
            "input": self.source.name,
            "input SHA-256": self.input_sha256,
            "cases": f"{len(self.table)} on {', '.join(self.table['device'].unique())}",
            "origin": ", ".join(self.table["origin"].unique()),
            "peaks": self.hardware.title if self.hardware else "none known for this device",
            **{k: v for k, v in self.parameters.model_dump().items() if v and k != "out_dir"},
            "moe-workbench": workbench.__version__,
            "Python": platform.python_version(),
            **{name: version(name) for name in packages},
        }


def open_report(parameters: ReportParameters) -> Report:
    """Load what the parameters name, select, and find the device's peaks.

    Raises InputError for input that cannot be read, an unknown device, or a selection without a
    case that has a time.
    """
    source = Path(parameters.results) if parameters.results else REFERENCE
    table = load_table(source)
    chosen: Mapping[str, list[Any]] = {
        name: given for name in FILTERS if (given := getattr(parameters, name))
    }
    for name, values in chosen.items():
        table = table[table[name].isin(values)]
    if not table["iterationMS"].notna().any():
        said = ", ".join(f"{name}={values}" for name, values in chosen.items()) or "no filter"
        raise InputError(f"{source}: no case with a time for {said}")
    return Report(
        parameters=parameters,
        source=source,
        input_sha256=_fingerprint(source),
        table=table,
        hardware=_hardware(table, parameters.hardware, parameters.hardware_file or None),
    )


def _hardware(table: pd.DataFrame, name: str, path: str | None) -> Hardware | None:
    if name:
        return load_hardware(name, path)
    known_devices(path)  # a file that cannot be read is an error, an unknown device is not
    try:
        return load_hardware(match_device(table["device"].mode()[0], path), path)
    except InputError:
        return None


def _fingerprint(source: Path) -> str:
    if source.is_file():
        return sha256(source)
    digest = hashlib.sha256()
    for file in sorted(source.rglob("*.record.json")):
        digest.update(f"{file.relative_to(source)}\0".encode() + file.read_bytes())
    return digest.hexdigest()
