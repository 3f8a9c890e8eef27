"""One record schema: what was published, what this project measures, what the model predicts.

A record carries the field names of the published GB300 study (2026-10-16). Ours adds `origin`,
`implementation`, `device`, the raw `samples` and `provenance`. A file holds four keys: `meta`,
`cases`, `pairs`, `allPipelinePairs`. What a case in a file leaves out it takes from `meta`: its
`device` is meta.hardware, its shape is meta's T, D, E, K and sharedExperts, its `origin` is
"published" and its `implementation` is its backend.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from workbench.case import PROFILES, STUDY_SHAPE, Case, parse_id
from workbench.errors import InputError, check_number, one_line
from workbench.files import parse_json

Origin = Literal["measured", "published", "predicted", "specification"]
Count = Annotated[int, Field(ge=1)]
Milliseconds = Annotated[float, Field(gt=0, description="ms")]
Rate = Annotated[float, Field(ge=0)]
SHAPE = tuple(STUDY_SHAPE)
METRICS = (
    "iterationMS",
    "forwardMS",
    "backwardMS",
    "usefulTFPerGPU",
    "meanTXGBps",
    "meanRXGBps",
    "modeledHBMGBps",
    "peakAllocatedGiB",
)


class _Model(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class Meta(_Model):
    """Head of a result file. `hardware` names the device; the shape holds for every case that
    does not state its own; `profiles` gives a factor per layer for each profile by name."""

    hardware: str
    T: Count
    D: Count
    E: Count
    K: Count
    sharedExperts: Annotated[int, Field(ge=0)]
    profiles: dict[str, Annotated[list[Rate], Field(min_length=1)]] = {}


class Record(_Model):
    """One case and what was found for it.

    Times in ms, rates in TFLOP/s and GB/s per GPU, peakAllocatedGiB in GiB; null where a figure
    does not exist (no backward in inference) or was not measured. `samples` holds the raw times,
    `provenance` how they came about. `noisy` is true where the slowest window took more than 1.25
    times the median one, null where there is one window. A `failed` record has a `reason` and no
    times.
    """

    id: str
    backend: str
    mode: str
    ep: Count
    precision: str
    pipeline: str
    category: str
    F: Count
    imbalance: float
    profile: str | None
    layers: Count
    iterationMS: Milliseconds | None
    forwardMS: Milliseconds | None
    backwardMS: Milliseconds | None
    usefulTFPerGPU: Rate | None
    meanTXGBps: Rate | None
    meanRXGBps: Rate | None
    modeledHBMGBps: Rate | None
    peakAllocatedGiB: Rate | None
    peakReservedBytes: Annotated[int, Field(ge=0)] | None
    fastMath: bool | None
    sharedSchedule: str | None
    capacity: dict[str, Any] | None = None
    T: Count | None = None
    D: Count | None = None
    E: Count | None = None
    K: Count | None = None
    sharedExperts: Annotated[int, Field(ge=0)] | None = None
    origin: Origin | None = None
    implementation: str | None = None
    device: str | None = None
    status: Literal["ok", "failed"] | None = None
    reason: str | None = None
    noisy: bool | None = None
    samples: dict[str, Any] | None = None
    provenance: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _times(self) -> Self:
        if self.status != "failed":
            needed = ["iterationMS", "forwardMS"] + ["backwardMS"] * (self.mode == "training")
            for name in needed:
                if getattr(self, name) is None:
                    raise ValueError(f"{name} must be a number (mode={self.mode})")
        return self

    def case(self, meta: Mapping[str, Any] | None = None) -> Case:
        """The case of this record; `meta` supplies what the record leaves out. Raises InputError
        if its fields are impossible or contradict its id."""
        meta = meta or {}
        given: dict[str, Any] = {
            name: getattr(self, name) for name in _CASE_FIELDS if name not in SHAPE
        }
        for name in SHAPE:
            own = getattr(self, name)
            given[name] = own if own is not None else meta.get(name, STUDY_SHAPE[name])
        if self.profile is not None:
            profiles = {**PROFILES, **meta.get("profiles", {})}
            if self.profile in profiles:
                given["factors"] = tuple(map(float, profiles[self.profile]))
        for name in ("slotFactor", "scratchFactor"):
            if self.capacity and name in self.capacity:
                given[name] = check_number(f"capacity.{name}", self.capacity[name])
        for name, stated in parse_id(self.id).items():
            held = given.setdefault(name, stated)
            if held != stated:
                raise InputError(f"id={self.id!r} contradicts {name}={held!r}")
        return Case(**given)


class OwnRecord(Record):
    """A record in a file of its own: it states what a case in a result file takes from `meta`.

    `factors` has the imbalance of each layer where the profile is not one of the study's.
    """

    origin: Origin
    implementation: str
    device: str
    T: Count
    D: Count
    E: Count
    K: Count
    sharedExperts: Annotated[int, Field(ge=0)]
    factors: Annotated[list[Rate], Field(min_length=1)] | None = None

    def case(self, meta: Mapping[str, Any] | None = None) -> Case:
        own = {} if self.factors is None else {str(self.profile): self.factors}
        return super().case({"profiles": own} | dict(meta or {}))


_CASE_FIELDS = (
    "backend",
    "mode",
    "ep",
    "precision",
    "pipeline",
    "category",
    "F",
    "imbalance",
    "profile",
    "layers",
    *SHAPE,
)


class Pair(_Model):
    """A matched workload: the fastest dist_moe pipeline, mok, and every dist_moe pipeline."""

    dist: str
    mok: str
    allDistPipelines: list[str]


class PipelinePair(_Model):
    dist: str
    mok: str


class ResultFile(_Model):
    """A whole result file, with the reference set's four keys."""

    meta: Meta
    cases: list[Record]
    pairs: list[Pair]
    allPipelinePairs: list[PipelinePair]


def parse_results(text: str | bytes, path: Path) -> tuple[dict[str, Any], ResultFile, list[Case]]:
    """A result file: as written, checked, its cases. Raises InputError naming place and rule."""
    document = parse_json(text, path)
    file = validate(ResultFile, document, path)
    seen: dict[str, Case] = {}
    for n, record in enumerate(file.cases):
        place = f"{path}: cases[{n}]"
        if record.id in seen:
            raise InputError(f"{place}.id={record.id!r} must not occur twice")
        try:
            seen[record.id] = record.case(document["meta"])
        except InputError as error:
            raise InputError(f"{place} ({record.id}): {error}") from None
    for key in ("pairs", "allPipelinePairs"):
        for n, pair in enumerate(getattr(file, key)):
            members = {"dist": pair.dist, "mok": pair.mok}
            members |= {
                f"allDistPipelines[{k}]": name
                for k, name in enumerate(getattr(pair, "allDistPipelines", []))
            }
            for place, name in members.items():
                if name not in seen:
                    raise InputError(f"{path}: {key}[{n}].{place}={name!r} must name a case")
    return document, file, list(seen.values())


M = TypeVar("M", bound=BaseModel)


def validate(model: type[M], content: Any, path: Path) -> M:
    """`content` as `model`. Raises InputError with the first fault: file, place, value, rule."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise fault(error, path) from None


def fault(error: ValidationError, path: str | Path) -> InputError:
    """The first fault that pydantic found, in one line: file, place, value, rule."""
    first, *more = error.errors(include_url=False)
    place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"])
    value = first["input"]
    shown = "" if isinstance(value, dict | list) else f"={one_line(repr(value), 80)}"
    rule = first["msg"].removeprefix("Value error, ")
    rest = f" (and {len(more)} more)" if more else ""
    return InputError(f"{path}: {place.lstrip('.') or 'top level'}{shown}: {rule}{rest}")
