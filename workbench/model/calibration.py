"""A calibration: the time model's parameters for one device, with what they can be trusted for.

A calibration is a JSON file; the packaged one is that of the published GB300 study (2026-10-16).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import pandas as pd
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from workbench.case import STUDY_SHAPE, Case
from workbench.errors import InputError
from workbench.files import read_json, write_atomic
from workbench.hardware import Hardware, load_hardware
from workbench.model.coefficients import CONSTANTS, GROUPS, PARAMETERS, Group
from workbench.model.memory import MEMORY_UNITS
from workbench.model.prediction import predict_table
from workbench.records.schema import Count, fault

DEFAULT = Path(str(resources.files("workbench") / "data" / "calibration-gb300.json"))
"""The packaged calibration: the published GB300 study."""


DIVISORS = ("flop_efficiency", "link_efficiency")
CONSTANT_DIVISORS = ("reference_rows", "reference_D", "reference_F", "minibatch_rows")
SMALLEST = 1e-6
"""Values and constants that divide, and what they must reach for times to stay finite."""
_SHAPE = len(STUDY_SHAPE)

Amount = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Above0 = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]


def _known_group(name: str) -> str:
    if name not in map(str, GROUPS):
        raise ValueError(f"must be one of {', '.join(map(str, GROUPS))}")
    return name


def _same_names(place: str, found: Iterable[str], known: Iterable[str]) -> None:
    found, known = set(found), list(known)
    for name in known:
        if name not in found:
            raise ValueError(f"{place}.{name} is missing")
    for name in sorted(found.difference(known)):
        raise ValueError(f"{place}.{name} is unknown; must be one of {', '.join(known)}")


class Range(BaseModel):
    """What was measured of one group in one mode: bounds are inclusive."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    group: Annotated[str, AfterValidator(_known_group)]
    mode: Literal["inference", "training"]
    ep: tuple[Count, Count]
    F: tuple[Count, Count]
    load: tuple[Above0, Above0]
    layers: Count
    shapes: Annotated[
        tuple[Annotated[tuple[int, ...], Field(min_length=_SHAPE, max_length=_SHAPE)], ...],
        Field(min_length=1),
    ]
    replay: bool

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        for name in ("ep", "F", "load"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name}={[low, high]} must be the lower and the upper bound")
        return self


class HeldOut(BaseModel):
    """Errors on the records at one end of a feature that a fit without them made.

    ratio   from the records left to those held out, in either direction
    width   half-width of the 90 % interval of log(iterationMS) that the errors ask for
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    feature: Literal["EP", "F", "imbalance", "layers"]
    end: Literal["smallest", "largest"]
    ratio: Annotated[float, Field(ge=1, le=1e12, allow_inf_nan=False)]
    width: Amount


class Calibration(BaseModel):
    """Parameters of the time model and of peak memory for one device.

    values      parameter -> slot -> value, units in `parameters.PARAMETERS`
    constants   the model's fixed structure (`parameters.CONSTANTS`)
    memory      bytes per piece, `memory.MEMORY_UNITS`; empty if no memory was measured
    interval    half-width of the 90 % interval of log(iterationMS), from workloads held out
    held_out    how far off it was outside the records, for each feature and end of it
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str
    source: str
    cases: Count
    values: dict[str, dict[str, Amount]]
    constants: dict[str, Amount]
    memory: dict[str, Amount]
    interval: Amount
    held_out: tuple[HeldOut, ...]
    ranges: tuple[Range, ...]

    @model_validator(mode="after")
    def _entries(self) -> Self:
        """Every entry that a prediction looks up is there, none is unknown, none divides by 0."""
        _same_names("values", self.values, PARAMETERS)
        _same_names("constants", self.constants, CONSTANTS)
        if self.memory:
            _same_names("memory", self.memory, MEMORY_UNITS)
        ends = [(one.feature, one.end) for one in self.held_out]
        for end in ends:
            if ends.count(end) > 1:
                raise ValueError(f"held_out names the {end[1]} {end[0]} twice")
        measured = {r.group for r in self.ranges}
        for name, by_slot in self.values.items():
            scope = PARAMETERS[name].scope
            for slot in by_slot:
                if slot not in scope.values():
                    known = ", ".join(dict.fromkeys(scope.values()))
                    raise ValueError(f"values.{name}.{slot} is unknown; must be one of {known}")
            for group, slot in scope.items():
                if str(group) in measured and slot not in by_slot:
                    raise ValueError(f"values.{name}.{slot} is missing, which {group} needs")
        divisors = {
            f"values.{name}.{slot}": value
            for name in DIVISORS
            for slot, value in self.values[name].items()
        }
        divisors |= {f"constants.{name}": self.constants[name] for name in CONSTANT_DIVISORS}
        for place, value in divisors.items():
            if not value >= SMALLEST:
                raise ValueError(f"{place}={value:g} must be at least {SMALLEST:g}, as it divides")
        return self

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

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups that have records."""
        known = {record.group for record in self.ranges}
        return tuple(group for group in GROUPS if str(group) in known)

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
        # pydantic's own reader takes the second of two equal keys; only it makes tuples of lists
        return Calibration.model_validate_json(json.dumps(read_json(path)), strict=True)
    except ValidationError as error:
        raise fault(error, path) from None


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
