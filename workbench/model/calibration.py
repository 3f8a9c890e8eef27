"""A calibration: the time model's parameters for one device, with what they can be trusted for.

A calibration is a JSON file; the packaged one is that of the published GB300 study (2026-10-16).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError

from workbench.case import Case
from workbench.errors import InputError
from workbench.files import write_atomic
from workbench.hardware import Hardware, load_hardware
from workbench.model.parameters import PARAMETERS, Group
from workbench.model.prediction import predict_table

DEFAULT = Path(str(resources.files("workbench") / "data" / "calibration-gb300.json"))
"""The packaged calibration: the published GB300 study."""


class Range(BaseModel):
    """What was measured of one group in one mode: bounds are inclusive."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    group: str
    mode: str
    ep: tuple[int, int]
    F: tuple[int, int]
    load: tuple[FiniteFloat, FiniteFloat]
    layers: int
    shapes: tuple[tuple[int, ...], ...]
    replay: bool


class Calibration(BaseModel):
    """Parameters of the time model and of peak memory for one device.

    values      parameter -> slot -> value, units in `parameters.PARAMETERS`
    constants   the model's fixed structure (`parameters.CONSTANTS`)
    memory      bytes per piece, `memory.MEMORY_UNITS`; empty if no memory was measured
    interval    half-width of the 90 % interval of log(iterationMS), from workloads held out
    interval_extrapolated      the same where nothing near was measured
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str
    source: str
    cases: int
    values: dict[str, dict[str, FiniteFloat]]
    constants: dict[str, FiniteFloat]
    memory: dict[str, FiniteFloat]
    interval: FiniteFloat
    interval_extrapolated: FiniteFloat
    ranges: tuple[Range, ...]

    def save(self, path: str | Path) -> None:
        """Write the JSON file, whole or not at all."""
        write_atomic(Path(path), json.dumps(self.model_dump(), indent=1) + "\n")

    def predict(
        self, cases: pd.DataFrame | Sequence[Case], device: Hardware | None = None
    ) -> pd.DataFrame:
        """Times, floors, intervals and peak memory of cases: see `prediction.predict_table`.

        `device` is the GPU to predict for; without it the calibrated one.
        """
        return predict_table(self, cases, device)

    def group_values(self, group: Group) -> dict[str, float]:
        """Every parameter's value for one group. Raises InputError if it was not measured."""
        if not any(r.group == str(group) for r in self.ranges):
            known = ", ".join(dict.fromkeys(r.group for r in self.ranges))
            raise InputError(f"pipeline={group} has no record in the calibration, only {known}")
        return {
            name: self.values[name][parameter.scope[group]]
            if group in parameter.scope
            else parameter.otherwise
            for name, parameter in PARAMETERS.items()
        }


def load_calibration(path: str | Path = DEFAULT) -> Calibration:
    """The calibration in a file. Raises InputError, one line, naming the place and the rule."""
    try:
        return Calibration.model_validate_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise InputError(f"{path}: {where}: {first['msg']}") from None


def nearest(calibrations: Iterable[Calibration], device: Hardware) -> Calibration:
    """The calibration of `device`, or of the device most like it in BF16 FLOP, HBM bandwidth and
    link per second, by the sum of absolute log ratios."""

    def distance(calibration: Calibration) -> float:
        other = load_hardware(calibration.device)
        names = ("bf16_tflops", "hbm_tb_s", "scale_up_gb_s")
        ratios = [getattr(other, name) / getattr(device, name) for name in names]
        return float(np.abs(np.log(ratios)).sum()) + (other.name != device.name)

    return min(calibrations, key=distance)


def parameter_table(calibration: Calibration) -> pd.DataFrame:
    """One row per fitted value: parameter, slot, value, unit, meaning."""
    rows: list[Mapping[str, Any]] = [
        {
            "parameter": name,
            "slot": slot,
            "value": value,
            "unit": PARAMETERS[name].unit,
            "meaning": PARAMETERS[name].meaning,
        }
        for name, by_slot in calibration.values.items()
        for slot, value in by_slot.items()
    ]
    return pd.DataFrame(rows)
