"""What notebook 02 calls: the time model against measured cases, its figures and tables."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
from pydantic import BaseModel, ConfigDict

from workbench.files import write_atomic
from workbench.model.calibrate import calibrate
from workbench.model.calibration import Calibration
from workbench.model.validate import Validation, validate
from workbench.records.protocols import protocols
from workbench.records.results import REFERENCE, load_table
from workbench.report.draw import subtitle
from workbench.report.export import FORMATS, Exported, Format, export_figures
from workbench.report.figures_timemodel import HELD_OUT, MODEL_FIGURES


class ModelReportParameters(BaseModel):
    """Parameters of notebook 02. `results`: a result file, record or folder of records to
    calibrate on; empty for the published study."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    results: str = ""
    formats: list[Format] = list(FORMATS)
    out_dir: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelReport:
    """A table of measured cases, the calibration that it gives, and how wrong that is."""

    parameters: ModelReportParameters
    source: Path
    table: pd.DataFrame
    calibration: Calibration
    validation: Validation

    @cached_property
    def figures(self) -> dict[str, go.Figure]:
        """Every figure of MODEL_FIGURES, by name."""
        told = protocols(self.validation.cases)
        return {
            name: subtitle(function(self.validation), told)
            for name, function in MODEL_FIGURES.items()
        }

    def export(self, folder: Path) -> Exported:
        """Write figures, `calibration.json`, `validation.json` and `predicted.csv` into `folder`.
        Raises InputError where it cannot be written."""
        exported = export_figures(self.figures, folder / "figures", self.parameters.formats)
        self.calibration.save(folder / "data" / "calibration.json")
        write_atomic(folder / "data" / "validation.json", self.validation.to_json() + "\n")
        predicted = self.calibration.predict(self.table)
        write_atomic(folder / "data" / "predicted.csv", predicted.to_csv(index=False))
        return exported

    def worst(self, count: int = 12) -> pd.DataFrame:
        """The cases with the largest held-out errors, in percent."""
        cases = self.validation.cases
        order = cases[HELD_OUT].abs().sort_values(ascending=False).index[:count]
        names = ["id", "iterationMS", "iterationMS_p20", "iterationMS_p80", HELD_OUT]
        shown = cases.reindex(columns=names).loc[order].dropna(axis="columns", how="all")
        return shown.assign(**{HELD_OUT: 100 * shown[HELD_OUT]}).rename(
            columns={HELD_OUT: "held-out error [%]"}
        )

    def by_group(self) -> pd.DataFrame:
        """Mean absolute error in percent of each protocol (rows) in each system (columns)."""
        rows = self.validation.by_group
        order = list(rows["protocol"].drop_duplicates())
        return (100 * rows.pivot(index="protocol", columns="group", values="mean")).loc[order]


def open_model_report(parameters: ModelReportParameters) -> ModelReport:
    """Load, calibrate, validate. Raises InputError for input that cannot be read or is too small
    to determine the parameters."""
    source = Path(parameters.results) if parameters.results else REFERENCE
    table = load_table(source)
    told = "" if parameters.results else "published GB300 study (2026-10-16)"
    return ModelReport(
        parameters=parameters,
        source=source,
        table=table,
        calibration=calibrate(table, source=told),
        validation=validate(table),
    )
